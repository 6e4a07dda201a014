"""Error reports: every number against a plain computation, whatever the collection, the precision and the blocks."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import DTYPES, METRICS, REDUCTIONS
from scipy import stats

import numkong_py as nk
from numkong_py import report as module
from numkong_py.cli import main
from numkong_py.packed import PRECISIONS

RANDOM = np.random.default_rng(8)
LENGTHS = np.array([3, 0, 7, 1, 12, 5, 9, 2, 4, 8])
TOKENS = RANDOM.standard_normal((LENGTHS.sum(), 24)).astype(np.float32)
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
DOCUMENTS = np.split(TOKENS, OFFSETS[1:-1])
QUERIES = [RANDOM.standard_normal((n, 24)).astype(np.float32) for n in (5, 2, 0, 8)]
GAINS = RANDOM.integers(0, 3, (4, 10))


def plain(packed: nk.PackedTensor, k: int, gains: np.ndarray, **options: Any) -> dict[str, float]:
    """The same numbers one by one."""
    everything = {"return_argmax": True, "return_bounds": True}
    exact, found = (nk.maxsim(QUERIES, docs, **options, **everything) for docs in (nk.pack(DOCUMENTS), packed))
    errors, shares, rho, overlap, ndcg = [], [], [], [], []
    sign = 1 if options["metric"] == "angular" else -1
    for query in range(4):
        pairs = [d for d in range(10) if math.isfinite(exact.scores[query, d])]
        errors += [abs(found.scores[query, d] - exact.scores[query, d]) for d in pairs]
        bounds = [found.bounds[query, d] for d in pairs]
        shares += [e / b if b else 0.0 for e, b in zip(errors[-len(pairs) :], bounds)]
        if len(QUERIES[query]):
            rho.append(stats.spearmanr(found.scores[query, pairs], exact.scores[query, pairs]).statistic)
        order, exact_order = (np.argsort(sign * r.scores[query], kind="stable")[:k] for r in (found, exact))
        overlap.append(len({*order} & {*exact_order}) / k)
        discounts = [1 / math.log2(rank + 2) for rank in range(k)]
        ideal = sum(g * w for g, w in zip(sorted(gains[query], reverse=True), discounts))
        if ideal:
            ndcg.append(sum(gains[query, d] * w for d, w in zip(order, discounts)) / ideal)
    same = [f == e for f, e in zip(found.argmax.ravel(), exact.argmax.ravel()) if e >= 0]
    return {
        "max_error": max(errors),
        "mean_error": np.mean(errors),
        "max_error_of_bound": max(shares),
        "argmax_agreement": np.mean(same),
        "topk_overlap": np.mean(overlap),
        "spearman": np.mean(rho),
        "ndcg": np.mean(ndcg),
    }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_number(precision: str, metric: str, reduction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    centroids, weights = np.concatenate(DOCUMENTS)[:4], np.float32([-0.5, -0.1, 0.1, 0.5])
    codebook = nk.Codebook(centroids, weights) if precision == "residual" else None
    packed = nk.pack(DOCUMENTS, precision=precision, codebook=codebook)
    options = {"metric": metric, "reduction": reduction}
    whole = nk.error_report(packed, DOCUMENTS, QUERIES, k=4, relevance=GAINS, **options)
    for name, value in plain(packed, 4, GAINS, **options).items():
        assert whole.as_dict()[name] == pytest.approx(value, rel=1e-12), name
    assert whole.max_error <= whole.max_bound and whole.max_error_of_bound <= 1
    assert (whole.queries, whole.documents, whole.k, whole.precision) == (4, 10, 4, precision)
    monkeypatch.setattr(module, "BLOCK_TOKENS", 10)
    assert nk.error_report(packed, DOCUMENTS, QUERIES, k=4, relevance=GAINS, **options) == whole
    monkeypatch.setattr(module, "BLOCK_WINNERS", 1)
    assert nk.error_report(packed, DOCUMENTS, QUERIES, k=4, relevance=GAINS, **options) == whole


def padded() -> tuple[np.ndarray, np.ndarray]:
    valid = np.arange(LENGTHS.max()) < LENGTHS[:, None]
    values = np.full((*valid.shape, 24), np.nan, np.float32)
    values[valid] = TOKENS
    return values, valid


COLLECTIONS: dict[str, Callable[[], Any]] = {
    "list": lambda: DOCUMENTS,
    "offsets": lambda: nk.collection(TOKENS, offsets=OFFSETS),
    "lengths": lambda: nk.collection(padded()[0], lengths=LENGTHS),
    "mask": lambda: nk.collection(padded()[0], mask=padded()[1]),
    "packed": lambda: nk.pack(DOCUMENTS),
    "range": lambda: nk.pack([QUERIES[0], *DOCUMENTS])[1:],
}


@pytest.mark.parametrize("kind", COLLECTIONS)
def test_every_kind_of_collection(kind: str) -> None:
    x, expected = COLLECTIONS[kind](), nk.error_report(nk.pack(DOCUMENTS, precision="int8"), DOCUMENTS, QUERIES, k=3)
    packed = nk.pack([QUERIES[0], *DOCUMENTS], precision="int8")[1:]
    assert nk.error_report(packed, x, QUERIES, k=3) == expected
    assert nk.error_report(packed, x, nk.pack(QUERIES), k=3) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_query_of_any_type(dtype: str) -> None:
    documents = [document.astype(DTYPES[dtype]) for document in DOCUMENTS]
    report = nk.error_report(nk.pack(documents, precision="int8"), documents, QUERIES[0].astype(DTYPES[dtype]))
    assert report.queries == 1 and report.k == 10 and 0 < report.max_error <= report.max_bound


def test_what_is_not_finite_is_not_counted() -> None:
    documents = [document.copy() for document in DOCUMENTS]
    documents[2][1, 3], documents[4][0, 0] = np.nan, np.inf
    report = nk.error_report(nk.pack(documents, precision="int8"), documents, QUERIES, k=3)
    assert math.isfinite(report.max_error) and math.isfinite(report.max_bound)
    nothing = nk.error_report(nk.pack(documents[1:2], precision="int8"), documents[1:2], QUERIES[:2])
    assert nothing.max_error == 0 and math.isnan(nothing.spearman) and nothing.topk_overlap == 1


def test_ranks_share_their_mean() -> None:
    values = RANDOM.integers(0, 5, 40).astype(float)
    assert np.array_equal(module._ranks(values), stats.rankdata(values))
    assert module._spearman(np.zeros(3), np.arange(3.0)) == 0


def test_text() -> None:
    text = str(nk.error_report(nk.pack(DOCUMENTS, precision="fp8"), DOCUMENTS, QUERIES, k=3))
    assert text.startswith("fp8, ") and "top-3 overlap" in text and "nDCG" not in text and len(text.splitlines()) == 7


def test_what_does_not_fit_is_refused() -> None:
    packed = nk.pack(DOCUMENTS, precision="int8")
    for arguments, options, error, words in (
        ((DOCUMENTS, DOCUMENTS, QUERIES), {}, nk.UnsupportedDtype, "packed: a list, wanted a PackedTensor"),
        ((packed, packed, QUERIES), {}, nk.InvalidArgument, "x: packed with precision 'int8', wanted the exact"),
        ((packed, DOCUMENTS, packed), {}, nk.InvalidArgument, "queries: packed with precision 'int8'"),
        ((packed, DOCUMENTS[1:], QUERIES), {}, nk.ShapeMismatch, "x: 9 documents, and packed: 10"),
        ((packed, DOCUMENTS[::-1], QUERIES), {}, nk.ShapeMismatch, "x: document 0 has 8 tokens, and in packed 3"),
        ((packed, DOCUMENTS, TOKENS[:, :3]), {}, nk.ShapeMismatch, "queries: depth 3"),
        ((packed, DOCUMENTS, QUERIES), {"k": 0}, nk.InvalidArgument, "k: 0, wanted"),
        ((packed, DOCUMENTS, QUERIES), {"metric": "l2"}, nk.InvalidArgument, "metric: 'l2'"),
        ((packed, DOCUMENTS, QUERIES), {"relevance": GAINS[1:]}, nk.ShapeMismatch, r"relevance: shape \(3, 10\)"),
        ((packed, DOCUMENTS, QUERIES), {"relevance": GAINS - 1}, nk.InvalidArgument, "relevance: wanted gains"),
        ((packed, DOCUMENTS, QUERIES), {"relevance": 0 * GAINS}, nk.InvalidArgument, "not all of them 0"),
    ):
        with pytest.raises(error, match=words):
            nk.error_report(*arguments, **options)


# ------------------------------------------------------------------------------------- command line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    np.savez(tmp_path / "documents.npz", tokens=TOKENS, offsets=OFFSETS)
    np.savez(tmp_path / "queries.npz", *QUERIES)
    np.save(tmp_path / "relevance.npy", GAINS)
    return tmp_path


def command(folder: Path, *more: object) -> list[str]:
    files = [folder / name for name in ("codes.nk", "documents.npz", "queries.npz")]
    return [str(each) for each in ("report", *files, *more)]


def test_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packing = ["pack", str(folder / "documents.npz"), "-o", str(folder / "codes.nk"), "--precision", "int8"]
    assert main([*packing, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "int8"
    expected = nk.error_report(nk.open(folder / "codes.nk"), DOCUMENTS, QUERIES, k=3, relevance=GAINS)
    options = ("-k", 3, "--relevance", folder / "relevance.npy")
    assert main(command(folder, *options)) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    for suffix in ("png", "svg", "pdf"):
        assert main(command(folder, *options, "--json", "--plot", folder / f"plot.{suffix}")) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out) == {"packed": str(folder / "codes.nk"), **expected.as_dict()}
        assert captured.err == "" and (folder / f"plot.{suffix}").stat().st_size > 1000


def test_exit_codes(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nk.pack(DOCUMENTS, precision="int8").save(folder / "codes.nk")
    with pytest.raises(SystemExit) as usage:
        main(command(folder, "-k", 0))
    assert usage.value.code == 2
    with pytest.raises(SystemExit) as usage:
        main(["pack", str(folder / "documents.npz"), "-o", "out", "--precision", "int3"])
    assert usage.value.code == 2
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for arguments, words in (
        (command(folder, "--plot", folder / "plot.txt"), "--plot: "),
        (command(folder, "--plot", folder / "plot.png"), "pip install 'numkong-py[report]'"),
        (["report", *map(str, [folder / "documents.npz"] * 3)], "not packed; `pack --precision int8`"),
        (["report", *map(str, [folder / "codes.nk"] * 3)], "x: packed with precision 'int8'"),
        (["pack", str(folder / "codes.nk"), "-o", str(folder / "again.nk")], "precision 'int8' keeps no vectors"),
        (["append", str(folder / "corpus"), str(folder / "codes.nk")], "precision 'int8' keeps no vectors"),
    ):
        assert main(arguments) == 1
        captured = capsys.readouterr()
        assert words in captured.err and captured.out == "" and "Traceback" not in captured.err
    assert not (folder / "again.nk").exists() and not (folder / "corpus").exists()
