"""The reference against exact integer arithmetic, literal loops, finite differences and the rules it must state."""

from __future__ import annotations

import doctest
import itertools

import numpy as np
import pytest
from oracle import (
    DTYPES,
    FINITE_KINDS,
    METRICS,
    REDUCTIONS,
    assert_exact,
    assert_same_bits,
    assert_same_result,
    exact_values,
    lay_out,
    read,
    tokens,
)

from numkong_py import reference

F32 = np.float32
EVERYTHING = {"return_argmax": True, "return_token_scores": True, "return_bounds": True}
NAN, INF = np.nan, np.inf


def pair(query: np.ndarray, document: np.ndarray, **options: object) -> reference.MaxSimResult:
    """Everything about one query against one document."""
    result = reference.maxsim(query, document, **EVERYTHING, **options)
    return reference.MaxSimResult(*(array[0] for array in result))


def literal_dot(query: np.ndarray, document: np.ndarray) -> float:
    """The pair value written as the contract says it: sixteen Python floats and a fold."""
    lanes = [0.0] * 16
    for k, (left, right) in enumerate(zip(query.tolist(), document.tolist())):
        lanes[k % 16] += float(left) * float(right)
    for width in (8, 4, 2, 1):
        lanes = [lanes[i] + lanes[i + width] for i in range(width)]
    return lanes[0]


def test_docstring_examples() -> None:
    outcome = doctest.testmod(reference)
    assert outcome.attempted > 10
    assert outcome.failed == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [1, 2, 15, 16, 17, 31, 33, 64, 100, 130])
def test_the_dot_adds_in_the_stated_order(dtype: str, depth: int) -> None:
    for kind in ("random", "mixed_scales", "heavy_tailed"):
        query, document = tokens(kind, dtype, 3, depth, 1), tokens(kind, dtype, 4, depth, 2)
        expected = [[literal_dot(q, d) for d in document.astype(float)] for q in query.astype(float)]
        assert_same_bits(reference.pair_values(query, document), np.array(expected))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FINITE_KINDS)
def test_scores_are_within_their_bound_of_the_exact_ones(kind: str, dtype: str, metric: str, reduction: str) -> None:
    for seed, (query_count, document_count, depth) in enumerate([(5, 9, 7), (1, 1, 1), (9, 3, 40), (3, 4, 130)]):
        query = tokens(kind, dtype, query_count, depth, 2 * seed, flip=seed % 2 == 0)
        document = tokens(kind, dtype, document_count, depth, 2 * seed + 1)
        result = pair(query, document, metric=metric, reduction=reduction)
        assert not np.isnan(result.scores)
        assert_exact(query, document, metric, reduction, result)


def test_the_exact_oracle_is_right_about_known_pairs() -> None:
    query, document = np.array([[3, 4], [0, 0]], F32), np.array([[3, 4], [-4, 3], [0, 0], [-6, -8]], F32)
    for metric, rows in {
        "dot": [[25, 0, 0, -50], [0, 0, 0, 0]],
        "cosine": [[1, 0, 0, -1], [0, 0, 0, 0]],
        "angular": [[0, 1, 1, 2], [1, 1, 0, 1]],
    }.items():
        values, unit = exact_values(query, document, metric)
        assert [[value / unit for value in row] for row in values] == rows
        assert reference.pair_values(query, document, metric).tolist() == rows


@pytest.mark.parametrize("kind", ["random", "tiny", "huge", "subnormal", "mixed_scales"])
def test_a_token_against_itself_is_at_angular_zero(kind: str) -> None:
    for depth in range(1, 60):
        token = tokens(kind, "f32", 4, depth, depth)
        assert np.all(np.diagonal(reference.pair_values(token, token, "angular")) == 0)


def test_zero_vectors() -> None:
    zero, other, negative_zero = np.zeros((1, 3), F32), np.ones((1, 3), F32), -np.zeros((1, 3), F32)
    for left, right in itertools.product([zero, negative_zero], repeat=2):
        assert reference.pair_values(left, right, "cosine") == 0
        assert reference.pair_values(left, right, "angular") == 0
    for left, right in [(zero, other), (other, zero), (negative_zero, other)]:
        assert reference.pair_values(left, right, "cosine") == 0
        assert reference.pair_values(left, right, "angular") == 1
    assert reference.pair_values(zero, np.array([[INF, 0, 0]], F32), "cosine") == 0
    for metric in METRICS:
        assert np.isnan(reference.pair_values(zero, np.array([[NAN, 0, 0]], F32), metric))
        assert np.isnan(reference.pair_values(np.array([[0, NAN, 0]], F32), zero, metric))


def test_infinities_follow_ieee_arithmetic() -> None:
    infinite = np.array([[INF, 1]], F32)
    assert reference.pair_values(infinite, np.array([[2, 1]], F32)) == INF
    assert reference.pair_values(infinite, np.array([[-2, 1]], F32)) == -INF
    assert np.isnan(reference.pair_values(infinite, np.array([[0, 1]], F32)))
    assert np.isnan(reference.pair_values(infinite, infinite, "cosine"))


def test_ties_go_to_the_lowest_token_and_nan_wins() -> None:
    query = np.array([[1, 0]], F32)
    assert pair(query, np.array([[1, 5], [2, 1], [2, 9]], F32)).argmax == [1]
    assert pair(query, np.array([[-0.0, 5], [0.0, 1]], F32)).argmax == [0]
    result = pair(query, np.array([[7, 0], [NAN, 0], [9, 0], [NAN, 1]], F32))
    assert result.argmax == [1]
    assert np.isnan(result.scores) and np.isnan(result.token_scores).all() and result.bounds == INF
    assert pair(query, np.array([[7, 0], [NAN, 0], [9, 0]], F32), metric="angular").argmax == [1]


def test_the_true_metric_decides_the_winner() -> None:
    query, document = np.array([[1, 0]], F32), np.array([[10, 10], [1, 0]], F32)
    assert pair(query, document, metric="dot").argmax == [0]
    assert pair(query, document, metric="cosine").argmax == [1]
    assert pair(query, document, metric="angular").argmax == [1]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_precedence_of_empty_query_empty_document_and_nan(reduction: str) -> None:
    query, bad = np.ones((2, 3), F32), np.full((2, 3), NAN, F32)
    nothing = np.zeros((0, 3), F32)
    queries, documents = [nothing, query, bad], [query, nothing, bad]
    for metric, empty_value in {"dot": -INF, "cosine": -INF, "angular": INF}.items():
        result = reference.maxsim(queries, documents, metric=metric, reduction=reduction, **EVERYTHING)
        assert result.scores[0].tolist() == [0, 0, 0]
        assert result.scores[1, 1] == result.scores[2, 1] == empty_value
        assert np.isnan(result.scores[[1, 2, 2], [2, 0, 2]]).all() and np.isfinite(result.scores[1, 0])
        assert (result.argmax[0] == -1).all() and (result.token_scores[0] == 0).all()
        assert (result.argmax[:, 1] == -1).all() and (result.token_scores[1:, 1] == empty_value).all()
        assert result.bounds[:, 1].tolist() == result.bounds[0].tolist() == [0, 0, 0]
        assert reference.maxsim(queries, documents, metric=metric, empty=-7.0)[:, 1].tolist() == [0, -7, -7]


def test_query_values_are_added_in_ascending_order_and_rounded_once() -> None:
    for dtype, output in {"f32": np.float64, "bf16": np.float32, "f16": np.float32}.items():
        query, document = tokens("heavy_tailed", dtype, 70, 8, 1), tokens("random", dtype, 9, 8, 2)
        total = 0.0
        for value in reference.pair_values(query, document).max(axis=1).tolist():
            total += value
        assert_same_bits(reference.maxsim(query, document), np.array([total]).astype(output))
        assert_same_bits(reference.maxsim(query, document, reduction="mean"), np.array([total / 70]).astype(output))


@pytest.mark.parametrize("layout", ["offsets", "lengths", "mask"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_padding_change_nothing(dtype: str, layout: str) -> None:
    queries = [tokens("random", dtype, count, 5, 1) for count in (3, 0, 1, 4)]
    documents = [tokens("random", dtype, count, 5, 2) for count in (0, 2, 7, 1, 0)]
    expected = reference.maxsim(queries, documents, **EVERYTHING)
    for seed in range(3):
        actual = reference.maxsim(
            read(lay_out(queries, layout, seed)), read(lay_out(documents, layout, 9 - seed)), **EVERYTHING
        )
        assert_same_result(actual, expected)


def test_shapes() -> None:
    query, documents = np.ones((2, 3), F32), [np.ones((4, 3), F32)] * 5
    assert reference.maxsim(query, documents).shape == (5,)
    assert reference.maxsim([query], documents).shape == (1, 5)
    assert reference.maxsim(query, documents[0]).shape == (1,)
    assert reference.maxsim(query, []).shape == (0,)
    assert reference.maxsim_pairs(documents, documents, return_argmax=True).argmax.shape == (5, 4)
    assert reference.maxsim_candidates(query, documents, [0, -1, 2], return_argmax=True).argmax.shape == (3, 2)
    assert reference.maxsim_candidates([query] * 2, documents, [[0], [1]]).shape == (2, 1)


def test_pairs_and_candidates_pick_from_all_pairs() -> None:
    queries = [tokens("random", "f32", count, 6, count) for count in (2, 0, 3)]
    documents = [tokens("random", "f32", count, 6, 10 + count) for count in (4, 1, 0)]
    everything = reference.maxsim(queries, documents)
    assert_same_bits(reference.maxsim_pairs(queries, documents), np.diagonal(everything))
    candidates = np.array([[2, 0], [1, -1], [-1, 1]])
    expected = np.take_along_axis(everything, np.maximum(candidates, 0), axis=1)
    expected[1, 1], expected[2, 0] = 0.0, -INF
    assert_same_bits(reference.maxsim_candidates(queries, documents, candidates), expected)


def test_topk_orders_by_score_then_index_then_empty_then_nan() -> None:
    query = np.array([[1.0, 0]], F32)
    documents = [np.array([[value, 0]], F32) for value in (2, NAN, 3, 3, 2)]
    documents[1:1] = [np.zeros((0, 2), F32)]
    scores, indices = reference.topk(query, documents, 6)
    assert indices.dtype == np.int64
    assert indices.tolist() == [3, 4, 0, 5, 1, 2]
    assert scores[:5].tolist() == [3, 3, 2, 2, -INF] and np.isnan(scores[5])
    assert reference.topk(query, documents, 3, candidates=[5, 2, 0, 4])[1].tolist() == [4, 0, 5]
    scores, indices = reference.topk(query, documents, 6, metric="angular")
    assert indices.tolist() == [0, 3, 4, 5, 1, 2] and scores[4] == INF and np.isnan(scores[5])


# --------------------------------------------------------------------------------------------- gradients


def numeric_gradient(loss: object, x: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """Central differences of a scalar function of `x`, which is changed in place and put back."""
    gradient = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        kept = x[place]
        x[place] = kept + step
        above = loss()
        x[place] = kept - step
        gradient[place] = (above - loss()) / (2 * step)
        x[place] = kept
    return gradient


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("metric", METRICS)
def test_gradients_against_finite_differences(metric: str, reduction: str) -> None:
    rng = np.random.default_rng(3)
    queries = [rng.standard_normal((count, 4)) for count in (2, 0, 3)]
    documents = [rng.standard_normal((count, 4)) for count in (3, 0, 5)]
    weights = rng.standard_normal((3, 3))
    weights[:, 1] = 0

    def loss() -> float:
        scores = reference.maxsim(queries, documents, metric=metric, reduction=reduction)
        return float((np.where(weights == 0, 0, scores) * weights).sum())

    by_query, by_document = reference.maxsim_grad(queries, documents, weights, metric=metric, reduction=reduction)
    expected_query = np.concatenate([numeric_gradient(loss, part) for part in queries])
    expected_document = np.concatenate([numeric_gradient(loss, part) for part in documents])
    np.testing.assert_allclose(by_query, expected_query, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(by_document, expected_document, rtol=1e-6, atol=1e-7)


def test_gradient_of_a_tie_goes_to_the_lowest_token() -> None:
    query, document = np.array([[1, 2]], F32), np.array([[0, 1], [2, 0], [0, 1]], F32)
    _, by_document = reference.maxsim_grad(query, document, 3.0)
    assert by_document.tolist() == [[3, 6], [0, 0], [0, 0]]


def test_gradient_of_pairs_and_candidates() -> None:
    queries = [tokens("random", "f32", count, 6, count) for count in (2, 1, 3)]
    documents = [tokens("random", "f32", count, 6, 10 + count) for count in (4, 1, 2)]
    upstream = np.diag([1.0, 2.0, 3.0])
    expected = reference.maxsim_grad(queries, documents, upstream)
    by_pairs = reference.maxsim_grad(queries, documents, [1.0, 2.0, 3.0], pairs=True)
    candidates, weights = [[0, -1], [-1, 1], [2, -1]], [[1.0, 9.0], [9.0, 2.0], [3.0, 9.0]]
    by_candidates = reference.maxsim_grad(queries, documents, weights, candidates=candidates)
    for one, two, three in zip(expected, by_pairs, by_candidates):
        assert_same_bits(two, one)
        assert_same_bits(three, one)


def test_gradient_takes_the_argmax_it_is_given() -> None:
    query, document = np.array([[1, 2]], F32), np.array([[0, 1], [2, 0]], F32)
    by_query, by_document = reference.maxsim_grad(query, document, 1.0, argmax=np.array([[1]]))
    assert by_query.tolist() == [[2, 0]] and by_document.tolist() == [[0, 0], [1, 2]]


def test_gradient_of_masked_tokens_is_plus_zero_in_the_input_layout() -> None:
    parts = [tokens("random", "f32", count, 3, count) for count in (2, 0, 4)]
    layout = lay_out(parts, "mask", 5)
    by_query, by_document = reference.maxsim_grad(np.ones((2, 3), F32), read(layout), 1.0)
    assert by_query.shape == (2, 3) and by_document.shape == layout.x.shape
    assert_same_bits(by_document[~layout.keywords["mask"]], np.zeros((layout.keywords["mask"].size - 6, 3)))


def test_gradient_where_nothing_may_be_added() -> None:
    bad, nothing = np.full((2, 3), NAN, F32), np.zeros((0, 3), F32)
    for upstream in (0.0, [[0.0, 5.0], [0.0, 5.0]]):
        by_query, by_document = reference.maxsim_grad([bad, nothing], [bad, nothing], upstream)
        assert_same_bits(by_query, np.zeros((2, 3)))
        assert_same_bits(by_document, np.zeros((2, 3)))
    for metric in ("cosine", "angular"):
        by_query, by_document = reference.maxsim_grad(np.zeros((1, 2), F32), np.ones((1, 2), F32), 1.0, metric=metric)
        assert not by_query.any() and not by_document.any()


def test_gradient_of_a_nan_maximum_belongs_to_the_lowest_nan_token() -> None:
    query, document = np.array([[1, 2]], F32), np.array([[5, 5], [NAN, 1], [NAN, 2]], F32)
    by_query, by_document = reference.maxsim_grad(query, document, 1.0)
    assert np.isnan(by_query[0, 0]) and by_query[0, 1] == 1
    assert by_document.tolist() == [[0, 0], [1, 2], [0, 0]]


# ----------------------------------------------------------------------------------------------- chamfer


def test_chamfer_is_right_far_from_the_origin() -> None:
    rng = np.random.default_rng(1)
    p, q = rng.integers(0, 64, (20, 3)).astype(F32), rng.integers(0, 64, (30, 3)).astype(F32)
    distances = ((p[:, None].astype(float) - q[None].astype(float)) ** 2).sum(axis=2)
    expected = distances.min(axis=1).mean() + distances.min(axis=0).mean()
    assert reference.chamfer(p, q) == pytest.approx(expected, rel=1e-15)
    assert reference.chamfer(p + F32(100000), q + F32(100000)) == reference.chamfer(p, q)
    assert reference.chamfer(p, q, reduction="sum", both=False) == distances.min(axis=1).sum()
    assert reference.chamfer(p, q, squared=False) == pytest.approx(
        np.sqrt(distances).min(axis=1).mean() + np.sqrt(distances).min(axis=0).mean(), rel=1e-14
    )


def test_chamfer_of_batches_and_empty_clouds() -> None:
    cloud, nothing = np.ones((2, 3), F32), np.zeros((0, 3), F32)
    p, q = [cloud, nothing, cloud, nothing], [cloud, cloud, nothing, nothing]
    assert reference.chamfer(p, q).tolist() == [0, INF, INF, 0]
    assert reference.chamfer(p, q, both=False).tolist() == [0, 0, INF, 0]
    assert not np.concatenate(reference.chamfer_grad(p, q)).any()


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_chamfer_gradients_against_finite_differences(reduction: str, squared: bool, both: bool) -> None:
    rng = np.random.default_rng(4)
    p = [rng.standard_normal((count, 3)) for count in (4, 2)]
    q = [rng.standard_normal((count, 3)) for count in (3, 5)]
    options = {"reduction": reduction, "squared": squared, "both": both}
    weights = np.array([0.7, -1.3])
    by_p, by_q = reference.chamfer_grad(p, q, weights, **options)

    def loss() -> float:
        return float((reference.chamfer(p, q, **options) * weights).sum())

    np.testing.assert_allclose(by_p, np.concatenate([numeric_gradient(loss, part) for part in p]), atol=1e-7)
    np.testing.assert_allclose(by_q, np.concatenate([numeric_gradient(loss, part) for part in q]), atol=1e-7)


def test_chamfer_gradient_of_a_batch_against_itself() -> None:
    batch = reference.sets([tokens("random", "f32", 4, 3, 1)])
    for gradient in reference.chamfer_grad(batch, batch, squared=False):
        assert_same_bits(np.abs(gradient), np.zeros((4, 3)))
