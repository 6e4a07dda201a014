"""The command line in its own process: results, files, JSON, errors, exit codes, pipes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import numkong_py as nk
from numkong_py import reference
from numkong_py.cli import main

ROOT = Path(__file__).resolve().parent.parent
RANDOM = np.random.default_rng(4)
TOKENS = RANDOM.standard_normal((30, 8)).astype(np.float32)
OFFSETS = np.array([0, 4, 4, 20, 30, 30])
QUERIES = RANDOM.standard_normal((2, 3, 8)).astype(np.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.savez(tmp_path / "documents.npz", tokens=TOKENS, offsets=OFFSETS)
    np.savez(tmp_path / "list.npz", *np.split(TOKENS, OFFSETS[1:-1]))
    np.save(tmp_path / "queries.npy", QUERIES)
    np.save(tmp_path / "query.npy", QUERIES[0])
    return tmp_path


def json_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert main([*map(str, arguments), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([*map(str, arguments)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"numkong-py {arguments[0]}: ")
    assert "Traceback" not in captured.err
    return captured.err


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json_of(capsys, "info")
    assert [row["name"] for row in facts["backends"]] == [row.name for row in nk.backends()]
    assert all(row["available"] or row["reason"] for row in facts["backends"])
    assert facts["libraries"]["numpy"] == np.__version__
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert all(row.name in text for row in nk.backends())


def test_pack_inspect_and_score(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = nk.maxsim(QUERIES, nk.pack(TOKENS, offsets=OFFSETS))
    for source in ("documents.npz", "list.npz"):
        packed = folder / f"{source}.nk"
        facts = json_of(capsys, "pack", folder / source, "-o", packed)
        assert (facts["documents"], facts["tokens"], facts["empty"], facts["depth"]) == (5, 30, 2, 8)
        inspected = json_of(capsys, "inspect", packed)
        assert {key: inspected[key] for key in inspected if key != "input"}.items() <= facts.items()
        assert np.array_equal(nk.open(packed).lengths, np.diff(OFFSETS))
        for documents in (packed, folder / source):
            scores = json_of(capsys, "score", folder / "queries.npy", documents)["scores"]
            assert scores == [[None if np.isneginf(score) else score for score in row] for row in expected.tolist()]
    json_of(capsys, "score", folder / "queries.npy", packed, "-o", folder / "scores.npy")
    assert np.array_equal(np.load(folder / "scores.npy"), expected)


def test_score_as_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(folder / "query.npy"), str(folder / "list.npz"), "--metric", "angular"]) == 0
    numbers = [float(word) for word in capsys.readouterr().out.split()]
    expected = nk.maxsim(QUERIES[0], np.split(TOKENS, OFFSETS[1:-1]), metric="angular")
    assert np.allclose(numbers, expected, rtol=1e-8)


def test_search(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hits = json_of(capsys, "search", folder / "queries.npy", folder / "documents.npz", "-k", 3, "--metric", "cosine")
    scores, indices = nk.topk(QUERIES, nk.pack(TOKENS, offsets=OFFSETS), 3, metric="cosine")
    assert [[hit["document"] for hit in row] for row in hits["hits"]] == indices.tolist()
    assert [[hit["score"] for hit in row] for row in hits["hits"]] == scores.tolist()
    assert main(["search", str(folder / "query.npy"), str(folder / "documents.npz")]) == 0
    assert f"1. document {indices[0, 0]}" in capsys.readouterr().out


def test_bfloat16_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = TOKENS.astype(ml_dtypes.bfloat16)
    np.save(folder / "bf16.npy", tokens)
    assert 'view(np.uint16) with dtype="bf16"' in error_of(capsys, "pack", folder / "bf16.npy", "-o", folder / "x")
    json_of(capsys, "pack", folder / "bf16.npy", "-o", folder / "bf16.nk", "--dtype", "bf16")
    assert np.array_equal(nk.open(folder / "bf16.nk").buffer, nk.pack(tokens).buffer)


def test_safetensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    numpy.save_file({"tokens": TOKENS, "offsets": OFFSETS}, folder / "documents.safetensors")
    facts = json_of(capsys, "pack", folder / "documents.safetensors", "-o", folder / "documents.nk")
    assert facts["documents"] == 5


def test_options_of_pack(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "documents.nk"
    facts = json_of(capsys, "pack", folder / "documents.npz", "-o", output, "--precision", "int8")
    assert facts["precision"] == "int8" and nk.open(output).precision == "int8"
    json_of(capsys, "export", output, "-o", folder / "decoded.npz")
    assert np.array_equal(np.load(folder / "decoded.npz")["tokens"], reference.decoded(TOKENS, "int8"))
    json_of(capsys, "pack", folder / "documents.npz", "-o", output, "--normalize", "--backend", "serial")
    expected = nk.pack(TOKENS, offsets=OFFSETS, normalize=True, backend="serial")
    assert np.array_equal(nk.open(output).buffer, expected.buffer)
    np.save(folder / "nan.npy", np.full((2, 8), np.nan, np.float32))
    assert "token 0" in error_of(capsys, "pack", folder / "nan.npy", "-o", output, "--check-finite")


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = folder / "documents.nk"
    json_of(capsys, "pack", folder / "documents.npz", "-o", packed)
    for arguments, verified in (([], "header"), (["--full"], "full")):
        facts = json_of(capsys, "verify", packed, *arguments)
        assert (facts["verified"], facts["documents"], facts["tokens"]) == (verified, 5, 30)
    damaged = bytearray(packed.read_bytes())
    damaged[-1] ^= 1
    packed.write_bytes(damaged)
    assert main(["verify", str(packed)]) == 0  # the contents are not read
    assert "verified" in capsys.readouterr().out
    assert "originals" in error_of(capsys, "verify", packed, "--full")
    packed.write_bytes(damaged[:-1])
    assert "truncated" in error_of(capsys, "verify", packed)


def test_a_packed_file_can_be_packed_for_another_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, again = folder / "documents.nk", folder / "serial.nk"
    json_of(capsys, "pack", folder / "documents.npz", "-o", packed)
    json_of(capsys, "pack", packed, "-o", again, "--backend", "serial")
    assert np.array_equal(nk.open(again).buffer, nk.pack(TOKENS, offsets=OFFSETS, backend="serial").buffer)
    json_of(capsys, "pack", packed, "-o", packed, "--backend", "serial")  # over the file that is being read
    assert packed.read_bytes() == again.read_bytes()


def test_a_file_of_another_row_is_scored_and_said_aloud(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = nk.find_kernel("pack", "f32").name
    if row == "serial":
        pytest.skip("this machine has one row only")
    json_of(capsys, "pack", folder / "documents.npz", "-o", folder / "documents.nk")
    before = json_of(capsys, "search", folder / "queries.npy", folder / "documents.nk")
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "serial")
    assert not json_of(capsys, "inspect", folder / "documents.nk")["available"]
    assert main(["search", str(folder / "queries.npy"), str(folder / "documents.nk"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["hits"] == before["hits"]
    assert captured.err.startswith("numkong-py search: ") and repr(row) in captured.err and "'serial'" in captured.err


def test_a_failed_pack_leaves_the_old_file_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = folder / "documents.nk"
    json_of(capsys, "pack", folder / "documents.npz", "-o", output)
    before, names = output.read_bytes(), sorted(os.listdir(folder))
    np.save(folder / "wide.npy", TOKENS.astype(np.float64))
    assert "astype(np.float32)" in error_of(capsys, "pack", folder / "wide.npy", "-o", output)
    assert output.read_bytes() == before
    assert sorted(os.listdir(folder)) == sorted([*names, "wide.npy"])
    if os.name == "posix":
        mask = os.umask(0)
        os.umask(mask)
        assert stat.S_IMODE(output.stat().st_mode) == 0o666 & ~mask


def test_errors_name_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_of(capsys, "pack", folder / "documents.npz", "-o", folder / "documents.nk")
    whole = (folder / "documents.nk").read_bytes()
    for size in (0, 5, 100, 256, len(whole) - 1):
        (folder / "short.nk").write_bytes(whole[:size])
        assert str(size) in error_of(capsys, "inspect", folder / "short.nk")
    assert "missing.npy" in error_of(capsys, "pack", folder / "missing.npy", "-o", folder / "x")
    (folder / "tokens.csv").write_text("1,2\n")
    assert ".safetensors" in error_of(capsys, "pack", folder / "tokens.csv", "-o", folder / "x")
    (folder / "broken.npz").write_bytes(b"PK\3\4 and then nothing")
    assert "broken.npz" in error_of(capsys, "pack", folder / "broken.npz", "-o", folder / "x")
    (folder / "broken.safetensors").write_bytes(b"12345678 and more")
    assert "broken.safetensors" in error_of(capsys, "pack", folder / "broken.safetensors", "-o", folder / "x")
    np.save(folder / "objects.npy", np.array([[1], [1, 2]], object), allow_pickle=True)
    assert "objects.npy" in error_of(capsys, "pack", folder / "objects.npy", "-o", folder / "x")
    np.savez(folder / "two.npz", a=TOKENS, b=TOKENS, offsets=OFFSETS)
    assert "offsets" in error_of(capsys, "pack", folder / "two.npz", "-o", folder / "x")
    np.savez(folder / "falls.npz", a=TOKENS, offsets=[0, 9, 3, 30])
    assert "falls.npz: offsets" in error_of(capsys, "pack", folder / "falls.npz", "-o", folder / "x")
    assert "no row" in error_of(capsys, "pack", folder / "list.npz", "-o", folder / "x", "--backend", "pentium")
    assert not (folder / "x").exists()


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["score"], ["score", "a", "b", "--metric", "l2"], ["search", "a", "b", "-k", "0"], ["pack", "a"]],
    ids=" ".join,
)
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: numkong-py" in capsys.readouterr().err


def test_demo(capsys: pytest.CaptureFixture[str]) -> None:
    report = json_of(capsys, "demo", "-k", 1)
    assert len(report["answers"]) >= 20
    assert main(["demo", "-k", "1"]) == 0
    assert "searched exactly" in capsys.readouterr().out


def test_as_a_process(folder: Path) -> None:
    def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TOOL": f"{sys.executable} -m numkong_py", **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    done = run("$TOOL pack documents.npz -o d.nk && $TOOL search queries.npy d.nk --json")
    assert (done.returncode, done.stderr) == (0, "")  # no progress bar when it is not a terminal
    assert run("$TOOL inspect nothing").returncode == 1
    assert run("$TOOL inspect").returncode == 2
    assert "Traceback" not in run("$TOOL info | true").stderr
    bad = run("$TOOL info", NUMKONG_CAPABILITIES="serial,avx3")
    assert bad.returncode == 1 and "'avx3'" in bad.stderr and "Traceback" not in bad.stderr
    assert json.loads(run("$TOOL info --json", NUMKONG_CAPABILITIES="serial").stdout)["devices"] == ["cpu"]
