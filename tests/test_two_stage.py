"""Two-stage top-k: the bits and the order of `topk` on the exact packing, whatever the bounds leave over."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from oracle import DTYPES, KINDS, METRICS, REDUCTIONS, assert_same_bits, tokens

import numkong_py as nk
from numkong_py import two_stage
from numkong_py.two_stage import CERTIFYING

AVAILABLE = [row.name for row in nk.backends() if row.device == "cpu" and row.available]
DTYPES_OF = {row.name: [dtype for dtype in row.dtypes if dtype in DTYPES] for row in nk.backends()}
rows = pytest.mark.parametrize("row", AVAILABLE)


def related(documents: int, queries: int, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Documents of one topic each, and queries that are noisy copies of a document."""
    rng = np.random.default_rng(seed)
    topics = rng.standard_normal((16, 32))
    lengths = rng.integers(0, 9, documents)
    texts = [topics[rng.integers(16)] + 0.3 * rng.standard_normal((n, 32)) for n in lengths]
    asked = rng.choice(np.flatnonzero(lengths > 3), queries)
    questions = [texts[i] + 0.1 * rng.standard_normal(texts[i].shape) for i in asked]
    return [q.astype(np.float32) for q in questions], [t.astype(np.float32) for t in texts]


def assert_same_as_topk(found: Any, queries: Any, exact: Any, k: int, **options: Any) -> None:
    scores, indices = nk.topk(queries, exact, k, **options)
    assert_same_bits(found.scores, scores)
    assert_same_bits(found.indices, indices, "indices")


@rows
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_same_bits_and_order_as_topk(row: str, data: st.DataObject) -> None:
    """Also where every document is refined, and blocks are small: the constants only choose a way."""
    draw = data.draw
    dtype, depth, seed = draw(st.sampled_from(DTYPES_OF[row])), draw(st.integers(1, 40)), draw(st.integers(0, 2**32))
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)), draw(st.lists(st.integers(0, 9), max_size=40))
    queries, documents = (
        [tokens(draw(st.sampled_from([*KINDS])), dtype, n, depth, seed + 2 * i + side) for i, n in enumerate(sizes)]
        for side, sizes in enumerate(counts)
    )
    documents += documents[: draw(st.integers(0, 3))]  # ties
    asked = nk.pack(queries, backend=row)
    exact, coarse = (
        nk.pack(documents, backend=row, precision=precision, dtype=dtype, depth=depth)
        for precision in ("exact", draw(st.sampled_from(CERTIFYING)))
    )
    options = {
        "metric": draw(st.sampled_from(METRICS)),
        "reduction": draw(st.sampled_from(REDUCTIONS)),
        "empty": draw(st.sampled_from([None, 0.1, -1e300, math.nan])),
        "threads": draw(st.sampled_from([1, 2])),
    }
    k = draw(st.integers(1, 50))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_stage, "MOST_REFINED", draw(st.sampled_from([two_stage.MOST_REFINED, 0.5, 2.0])))
        patch.setattr(two_stage, "BLOCK", draw(st.sampled_from([two_stage.BLOCK, 8])))
        found = nk.topk_two_stage(asked, coarse, exact, k, **options)
    assert found.certified
    assert_same_as_topk(found, asked, exact, k, **options)


@rows
@pytest.mark.parametrize("precision", CERTIFYING)
@pytest.mark.parametrize("metric", METRICS)
def test_few_documents_are_refined_where_queries_are_related(
    row: str, precision: str, metric: str, tmp_path: Path
) -> None:
    dtype = DTYPES[DTYPES_OF[row][0]]  # genoa's is bf16
    queries, documents = ([x.astype(dtype) for x in side] for side in related(1000, 5))
    nk.pack(documents, backend=row).save(tmp_path / "exact.safetensors")
    nk.pack(documents, backend=row, precision=precision).save(tmp_path / "coarse.safetensors")
    exact, coarse = nk.open(tmp_path / "exact.safetensors"), nk.open(tmp_path / "coarse.safetensors")
    found = nk.topk_two_stage(queries, coarse, exact, 10, metric=metric)
    assert found.refined.shape == (5,) and found.refined.min() >= 10 and found.refined.max() <= 125
    assert_same_as_topk(found, queries, exact, 10, metric=metric)
    part = nk.topk_two_stage(queries[0], coarse[100:], exact[100:], 10, metric=metric)
    assert part.scores.shape == (10,) and part.refined.shape == (1,)
    assert_same_as_topk(part, queries[0], exact[100:], 10, metric=metric)


def test_unrelated_documents_are_searched_in_full() -> None:
    rng = np.random.default_rng(3)
    documents, query = rng.standard_normal((600, 20, 128), np.float32), rng.standard_normal((32, 128), np.float32)
    exact, coarse = nk.pack(documents), nk.pack(documents, precision="int8")
    found = nk.topk_two_stage(query, coarse, exact, 20)
    assert found.refined.tolist() == [600]
    assert_same_as_topk(found, query, exact, 20)


def test_a_misleading_sample_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, documents = related(400, 3)
    exact, coarse = nk.pack(documents), nk.pack(documents, precision="int8")
    monkeypatch.setattr(two_stage, "_are_promising", lambda queries, *rest: np.ones(len(queries), bool))
    monkeypatch.setattr(two_stage, "MOST_REFINED", 0.0)
    found = nk.topk_two_stage(queries, coarse, exact, 4)
    assert_same_as_topk(found, queries, exact, 4)


def test_some_queries_in_two_stages_and_others_in_full() -> None:
    queries, documents = related(1000, 2)
    queries.insert(1, np.zeros((4, 32), np.float32))  # ties with everything
    exact, coarse = nk.pack(documents), nk.pack(documents, precision="int8")
    found = nk.topk_two_stage(queries, coarse, exact, 10)
    assert found.refined[1] == 1000 and max(found.refined[[0, 2]]) <= 125
    assert_same_as_topk(found, queries, exact, 10)


def test_oversample_scores_as_many_candidates_exactly() -> None:
    queries, documents = related(1000, 5)
    exact, coarse = nk.pack(documents), nk.pack(documents, precision="int8")
    found = nk.topk_two_stage(queries, coarse, exact, 10, oversample=2.5)
    assert not found.certified and found.refined.tolist() == [25] * 5
    _, candidates = nk.topk(queries, coarse, 25)
    scores, indices = nk.topk(queries, exact, 10, candidates=candidates)
    assert_same_bits(found.scores, scores)
    assert_same_bits(found.indices, indices)
    few = nk.topk_two_stage(queries, coarse[:3], exact[:3], 10, oversample=1e15)
    assert_same_as_topk(few, queries, exact[:3], 10)


def test_what_does_not_fit_is_refused() -> None:
    _, documents = related(20, 1)
    exact, coarse = nk.pack(documents), nk.pack(documents, precision="int8")
    query = documents[0] if len(documents[0]) else np.ones((2, 32), np.float32)
    for wrong, error, words in (
        ((query, documents, exact, 1), nk.UnsupportedDtype, r"coarse: a list, wanted a PackedTensor"),
        ((query, exact, exact, 1), nk.LayoutMismatch, r'coarse: precision .*precision="int8"'),
        ((query, coarse, coarse, 1), nk.LayoutMismatch, r"exact: 'int8'"),
        ((query, coarse[1:], exact, 1), nk.ShapeMismatch, r"coarse: 19 documents, and exact: 20"),
        ((query, coarse[::-1], exact, 1), nk.ShapeMismatch, r"coarse: document \d+ has \d tokens, and exact: \d"),
        ((query, coarse, exact.to("serial"), 1), nk.LayoutMismatch, r"pass coarse.to\('serial'\)"),
        ((query, coarse, exact, 0), nk.InvalidArgument, r"k: 0, wanted an integer of at least 1"),
        ((query[:, :5], coarse, exact, 1), nk.ShapeMismatch, r"q: depth 5"),
        ((nk.pack(query, precision="int8"), coarse, exact, 1), nk.LayoutMismatch, r"q: packed with precision"),
    ):
        with pytest.raises(error, match=words):
            nk.topk_two_stage(*wrong)
    for oversample in (0.5, math.nan, math.inf, "8"):
        with pytest.raises(nk.InvalidArgument, match=r"oversample: .*, wanted a finite number of at least 1"):
            nk.topk_two_stage(query, coarse, exact, 1, oversample=oversample)
    with pytest.raises(nk.InvalidArgument, match="metric"):
        nk.topk_two_stage(query, coarse, exact, 1, metric="l2")


def test_a_precision_that_cannot_certify_needs_oversample(monkeypatch: pytest.MonkeyPatch) -> None:
    _, documents = related(20, 1)
    exact, coarse = nk.pack(documents), nk.pack(documents, precision="int8")
    monkeypatch.setattr(two_stage, "CERTIFYING", ())
    with pytest.raises(nk.InvalidArgument, match=r"oversample: missing, and .* pass oversample=8"):
        nk.topk_two_stage(np.ones((2, 32), np.float32), coarse, exact, 1)


def test_empty_corpora_and_no_queries() -> None:
    nothing = [nk.pack([], dtype="f32", depth=32, precision=precision) for precision in ("int8", "exact")]
    query = np.ones((2, 32), np.float32)
    assert_same_as_topk(nk.topk_two_stage(query, *nothing, 3), query, nothing[1], 3)
    _, documents = related(20, 1)
    exact, coarse = nk.pack(documents), nk.pack(documents, precision="int8")
    assert nk.topk_two_stage([], coarse, exact, 3).scores.shape == (0, 3)


def test_infinities_that_coarse_scores_do_not_see_tie_with_those_that_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """172/256 is coded as 64/127 of 170/128, which is less: a score of 2^128 has a finite coarse score."""
    monkeypatch.setattr(two_stage, "MOST_REFINED", 2.0)
    documents = [(2.0**63 * np.array([token])).astype(DTYPES["bf16"]) for token in ([170 / 128, 172 / 256], [1.5, 1.5])]
    query = np.full((1, 2), 2.0**64, DTYPES["bf16"])
    exact, coarse = nk.pack(documents), nk.pack(documents, precision="int8")
    assert np.isinf(nk.maxsim(query, exact)).tolist() == [True, True]
    assert np.isinf(nk.maxsim(query, coarse)).tolist() == [False, True]
    assert_same_as_topk(nk.topk_two_stage(query, coarse, exact, 1), query, exact, 1)


def test_an_empty_value_is_not_rounded_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_stage, "MOST_REFINED", 2.0)
    documents, query = [np.float32([[0.5, 0.2]]), np.zeros((0, 2), np.float32)], np.ones((1, 2), np.float32)
    exact, coarse = nk.pack(documents), nk.pack(documents, precision="int8")
    score = float(nk.maxsim(query, exact)[0])
    empty = score + 1e-9
    assert float(np.float32(empty)) < score < empty
    found = nk.topk_two_stage(query, coarse, exact, 1, empty=empty)
    assert found.indices.tolist() == [1]
    assert_same_as_topk(found, query, exact, 1, empty=empty)
