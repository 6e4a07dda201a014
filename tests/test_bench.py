"""The bench: its inputs repeat, its verdicts tell right from wrong, contenders take turns, records become tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
if not (BENCH / "run.py").exists():
    pytest.skip("bench/ is not part of this copy of the sources", allow_module_level=True)
sys.path.insert(0, str(BENCH))

import report  # noqa: E402
from ceilings import Ceilings  # noqa: E402
from checks import judge, truth  # noqa: E402
from measure import Effort, interleave  # noqa: E402
from workloads import DTYPES, UNNORMALISED, WORKLOADS, Workload, make  # noqa: E402

import numkong_py as nk  # noqa: E402

SMALL = Workload("small", queries=2, query_tokens=7, documents=20, lengths=(30, 500), depth=40)


@pytest.mark.parametrize("name", WORKLOADS)
def test_inputs_have_the_shape_that_they_say_and_repeat(name: str) -> None:
    workload = WORKLOADS[name].smaller(1000)
    inputs, again = make(workload), make(workload)
    assert [query.shape for query in inputs.queries] == [(workload.query_tokens, workload.depth)] * workload.queries
    lengths = np.diff(inputs.offsets)
    assert len(lengths) == workload.documents and inputs.offsets[-1] == len(inputs.tokens)
    assert workload.lengths[0] <= lengths.min() and lengths.max() <= workload.lengths[1]
    assert inputs.tokens.dtype == np.float32 and np.array_equal(inputs.tokens, again.tokens)
    if workload.data not in UNNORMALISED:
        np.testing.assert_allclose(np.linalg.norm(inputs.tokens, axis=1), 1, rtol=1e-5)


def test_padding_keeps_every_token() -> None:
    inputs = make(SMALL)
    documents, valid = inputs.padded()
    assert np.array_equal(documents[valid], inputs.tokens) and not documents[~valid].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_verdicts(dtype: str) -> None:
    inputs = make(SMALL).astype(dtype)
    expected = truth(inputs, dtype)
    scores = nk.maxsim(inputs.queries, nk.collection(inputs.tokens, offsets=inputs.offsets))
    assert judge(scores, expected).verdict == "exact"
    assert judge(scores, expected).top10 == 1
    off = expected.scale * np.sign(scores)
    assert judge(scores + 1e-6 * off, expected).verdict == "float32"
    assert judge(scores + 2e-4 * off, expected).verdict == ("wrong" if dtype == "f32" else "16-bit")
    assert judge(scores + 2e-2 * off, expected).verdict == "wrong"
    assert judge(-scores, expected).top10 < 1


def test_contenders_take_turns() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name), lambda name=name: order.append(f"{name}!")) for name in "ab"}
    seconds, rates = interleave(calls, None, Effort(least=3, most=3, turn_seconds=0.0))
    assert order[-12:] == ["a!", "a", "b!", "b"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3} and rates == {}


def test_ceilings_are_measured() -> None:
    ceilings = Ceilings()
    if ceilings.reason:
        pytest.skip(ceilings.reason)
    assert "memory_read" in ceilings.names
    assert all(0.05 < rate < 1e5 for rate in ceilings.sample_all().values())


def test_a_run_writes_stamped_records_that_become_a_document(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = [
        sys.executable,
        str(BENCH / "run.py"),
        "--quick",
        "--out",
        str(out),
        "--workload",
        "1x10",
        "top-10: real",
    ]
    command += ["--dtype", "f32", "--part", "scores", "topk", "kernels", "overhead"]
    command += ["--contender", "numpy"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    first, *records = map(json.loads, out.read_text().splitlines())
    assert first["kind"] == "run" and first["machine"]["model"] and first["versions"]["numpy"] == np.__version__
    kernels = [row for row in nk.backends() if row.device == "cpu" and row.available and row.name != "serial"]
    assert [record["kind"] for record in records] == ["scores", "topk", *["kernels"] * len(kernels), "overhead"]
    assert {record["run"] for record in records} == {first["run"]}
    found = records[0]["contenders"]
    assert next(iter(found)).startswith("numkong_py:") and next(iter(found.values()))["verdict"] == "exact"
    assert found["numpy loop"]["verdict"] == "float32" and len(found["numpy loop"]["seconds"]) >= 3

    assert report.read([out]) == []  # quick runs are left out
    text = report.document(report.read([out], quick=True), tmp_path, plots=False)
    assert "| 1x10 | f32 | 1 x 10, 32 x 300, d = 128 |" in text and "maxsim_packed above its C call, us" in text


def test_precisions_become_a_table(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = [sys.executable, str(BENCH / "run.py"), "--quick", "--out", str(out), "--workload", "rerank"]
    subprocess.run([*command, "--part", "precision"], check=True, capture_output=True, timeout=300)
    _, record, loss = map(json.loads, out.read_text().splitlines())
    found = record["contenders"]
    assert found["exact"]["error"] <= found["int8"]["error"] < 0.01 and found["int8"]["bytes_per_token"] < 140
    text = report.precision_table(report.read([out], quick=True)[0])
    assert f"| rerank, {record['row']} | f32 | 1 x 100, 32 x 300, d = 128 | 1 | int8 |" in text
    (tmp_path / "numerics.md").write_text("before\n<!-- bench/report.py: loss -->\nold\n<!-- end -->\nafter\n")
    report.put_loss(report.read([out], quick=True), tmp_path / "numerics.md")
    text = (tmp_path / "numerics.md").read_text()
    assert f"| exact | {loss['row']} |" in text and "old" not in text and text.endswith("<!-- end -->\nafter\n")


def test_two_stages_become_a_table(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = [sys.executable, str(BENCH / "run.py"), "--quick", "--out", str(out), "--workload", "two-stage: related"]
    subprocess.run([*command, "--part", "topk"], check=True, capture_output=True, timeout=300)
    _, record = map(json.loads, out.read_text().splitlines())
    assert [len(record["cold"][name]) for name in list(record["contenders"])[:2]] == [1, 1]
    text = report.staged_table(report.read([out], quick=True)[0])
    assert "| two-stage: related | f32 | 1 x 1000, 32 x 120, d = 128 | 1 | 100 |" in text


def test_an_unknown_workload_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "run.py"), "--out", str(tmp_path / "x"), "--workload", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and "'rerank'" in done.stderr


def test_training_and_chamfer_records_become_tables(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = [sys.executable, str(BENCH / "run.py"), "--quick", "--out", str(out)]
    command += ["--workload", "step 1x1000", "chamfer 8k, 16", "--dtype", "f32", "--part", "training", "chamfer"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    _, step, clouds = map(json.loads, out.read_text().splitlines())
    assert step["contenders"]["numkong_py backward"]["verdict"] == "exact"
    assert all(entry["verdict"] != "wrong" for entry in step["contenders"].values())
    machine = report.read([out], quick=True)[0]
    assert "| step 1x1000 | f32 | 1 x 1000, 32 x 300, d = 128 | 1 |" in report.training_table(machine)
    assert f"| chamfer 8k, 16 | cube | {clouds['points']} | 16 | 1 |" in report.chamfer_table(machine)
