"""The backward pass of MaxSim against the float64 reference: every layout, type, metric and row, to the bit for dot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracle import DTYPES, FINITE_KINDS, METRICS, REDUCTIONS, Layout, assert_same_bits, lay_out, read, tokens
from test_coded import CODED, coding

import numkong_py as nk
from numkong_py import reference

ROWS = [row for row in nk.backends() if row.device == "cpu" and row.available]
GRADIENTS = {
    "all": (nk.maxsim, nk.maxsim_grad),
    "pairs": (nk.maxsim_pairs, nk.maxsim_pairs_grad),
    "candidates": (nk.maxsim_candidates, nk.maxsim_candidates_grad),
}
QUERY_LAYOUTS = ("one", "list", "offsets", "lengths", "mask")
DOCUMENT_LAYOUTS = QUERY_LAYOUTS[1:]


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Reference gradients in a dtype, rounded once."""
    with np.errstate(all="ignore"):
        return reference.rounded(np.ascontiguousarray(values), np.dtype(dtype))


def ragged(kind: str, dtype: str, counts: list[int], depth: int, seed: int) -> list[np.ndarray]:
    return [tokens(kind, dtype, count, depth, seed + index) for index, count in enumerate(counts)]


def collection(layout: Layout) -> Any:
    return nk.collection(layout.x, **layout.keywords) if layout.keywords else layout.x


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    difference = np.linalg.norm(actual.astype(np.float64) - expected)
    return difference / max(float(np.linalg.norm(expected)), 1e-300)


def cosine(actual: np.ndarray, expected: np.ndarray) -> float:
    actual = actual.astype(np.float64)
    return float((actual * expected).sum() / (np.linalg.norm(actual) * np.linalg.norm(expected)))


# ------------------------------------------------------------------------------------------------ all layouts


def case(queries: str, documents: str, scores: str, dtype: str, kind: str = "random", depth: int = 19) -> Any:
    """Both sides, the extra arguments of the call, an upstream with zeros, and the reference's options."""
    counts = [6] if queries == "one" else [6, 0, 17, 1]
    document_counts = [9, 0, 40, 1, 70, 2][: len(counts) if scores == "pairs" else 6]
    q = lay_out(ragged(kind, dtype, counts, depth, 1), queries, 2)
    d = lay_out(ragged(kind, dtype, document_counts, depth, 100), documents, 3)
    rng = np.random.default_rng(4)
    shape = (
        (len(counts),) if scores == "pairs" else (len(counts), 7 if scores == "candidates" else len(document_counts))
    )
    if queries == "one" and scores != "pairs":
        shape = shape[1:]
    listed = rng.integers(-1, len(document_counts), shape) if scores == "candidates" else None
    upstream = rng.standard_normal(shape) * rng.choice([0.0, 1.0, 1.0, 1.0], shape)
    options = {"pairs": scores == "pairs", "candidates": listed}
    return q, d, (() if listed is None else (listed,)), upstream, options


LAYOUT_PAIRS = [(q, d) for q in QUERY_LAYOUTS for d in DOCUMENT_LAYOUTS]


@pytest.mark.parametrize("scores", GRADIENTS)
@pytest.mark.parametrize("queries, documents", LAYOUT_PAIRS)
def test_every_layout(queries: str, documents: str, scores: str) -> None:
    """Types take turns, so that every layout meets every metric and every type some layout of each kind."""
    forward, backward = GRADIENTS[scores]
    dtype = tuple(DTYPES)[(LAYOUT_PAIRS.index((queries, documents)) + len(scores)) % 3]
    q, d, extra, upstream, options = case(queries, documents, scores, dtype)
    sides = collection(q), collection(d)
    for metric in METRICS:
        winners = forward(*sides, *extra, return_argmax=True, metric=metric).argmax
        for reduction in REDUCTIONS:
            common = {"metric": metric, "reduction": reduction}
            expected = reference.maxsim_grad(read(q), read(d), upstream, argmax=winners, **options, **common)
            found = backward(*sides, *extra, upstream, argmax=winners, **common)
            again = backward(*sides, *extra, upstream, **common)
            for actual, repeated, wanted in zip(found, again, expected):
                assert actual.shape == wanted.shape
                assert_same_bits(repeated, actual, "gradient without an argmax")
                assert relative_error(actual, wanted) < 1e-5
                assert cosine(actual, wanted) > 0.99999
                if metric == "dot":
                    assert_same_bits(actual, rounded(wanted, np.float32), "gradient")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FINITE_KINDS)
def test_every_kind_of_data_to_the_bit(kind: str, dtype: str) -> None:
    for depth in (1, 16, 33):
        q, d, _, upstream, _ = case("list", "mask", "all", dtype, kind, depth)
        sides = collection(q), collection(d)
        winners = nk.maxsim(*sides, return_argmax=True).argmax
        with np.errstate(all="ignore"):
            expected = reference.maxsim_grad(read(q), read(d), upstream, argmax=winners)
        for grad_dtype in {np.dtype(np.float32), DTYPES[dtype]}:
            found = nk.maxsim_grad(*sides, upstream, argmax=winners, grad_dtype=grad_dtype)
            for actual, wanted in zip(found, expected):
                assert_same_bits(actual, rounded(wanted, grad_dtype), f"gradient in {grad_dtype}")


# ------------------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("metric", METRICS)
def test_finite_differences_of_the_reference(metric: str, reduction: str) -> None:
    rng = np.random.default_rng(5)
    sides = [[rng.standard_normal((n, 4)) for n in counts] for counts in ((3, 2), (5, 1, 6))]
    upstream = rng.standard_normal((2, 3))
    common = {"metric": metric, "reduction": reduction}

    def loss(q: list[np.ndarray], d: list[np.ndarray]) -> float:
        return float((upstream * reference.maxsim(q, d, **common)).sum())

    gradients = reference.maxsim_grad(*sides, upstream, **common)
    for side in (0, 1):
        flat = np.concatenate(sides[side])
        cuts = np.cumsum([len(part) for part in sides[side]])[:-1]
        for place in np.ndindex(flat.shape):
            step = np.zeros_like(flat)
            step[place] = 1e-5
            moved = [[*sides], [*sides]]
            for sign, both in zip((1, -1), moved):
                both[side] = np.split(flat + sign * step, cuts)
            slope = (loss(*moved[0]) - loss(*moved[1])) / 2e-5
            np.testing.assert_allclose(gradients[side][place], slope, rtol=1e-6, atol=1e-8)


# ------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("metric", METRICS)
def test_rows_threads_runs_and_batch_mates_change_no_bit(metric: str) -> None:
    for dtype in DTYPES:
        q, d, _, upstream, _ = case("list", "list", "all", dtype, "clustered", 40)
        first = nk.maxsim_grad(q.x, d.x, upstream, metric=metric, threads=1)
        for row in ROWS:
            if dtype in row.dtypes:
                packed = [nk.pack(side, backend=row.name) for side in (q.x, d.x)]
                assert packed[0].backend == row.name
                for actual, wanted in zip(nk.maxsim_grad(*packed, upstream, metric=metric), first):
                    assert_same_bits(actual, wanted, row.name)
        for threads in (*range(2, 8), *[3] * 14):
            again = nk.maxsim_grad(q.x, d.x, upstream, metric=metric, threads=threads)
            for actual, wanted in zip(again, first):
                assert_same_bits(actual, wanted, f"{threads} threads")
        order = np.random.default_rng(6).permutation(len(d.x))
        shuffled = nk.maxsim_grad(q.x, [d.x[b] for b in order], upstream[:, order], metric=metric)[1]
        ends = np.cumsum([len(d.x[b]) for b in order])[:-1]
        parts = dict(zip(order.tolist(), np.split(shuffled, ends)))
        assert_same_bits(np.concatenate([parts[b] for b in range(len(order))]), first[1], "shuffled documents")


def test_columns_by_the_thousand_keep_the_order_of_the_sum() -> None:
    """More columns than are listed at a time."""
    rng = np.random.default_rng(7)
    query = rng.standard_normal((18, 5)).astype(np.float32)
    tokens_, offsets = rng.standard_normal((1300, 5)).astype(np.float32), np.arange(1301)
    upstream = rng.standard_normal(1300)
    expected = np.zeros(5)
    for token, weight in zip(tokens_.astype(np.float64), upstream):
        expected += weight * token
    for metric in METRICS:
        found = nk.maxsim_grad(query, nk.collection(tokens_, offsets=offsets), upstream, metric=metric)
        if metric == "dot":
            assert_same_bits(found[0], np.tile(expected.astype(np.float32), (18, 1)), "query gradient")
        else:
            sets = reference.sets(tokens_, offsets=offsets)
            zeros = np.zeros((1300, 18), np.int32)
            wanted = reference.maxsim_grad(query, sets, upstream, argmax=zeros, metric=metric)
            assert max(map(relative_error, found, wanted)) < 1e-6


# ------------------------------------------------------------------------------------------------ the rules


def test_a_tie_gives_everything_to_the_lowest_token() -> None:
    query, document = np.float32([[1, 0]]), np.float32([[0, 1], [2, 5], [2, 7], [2, 5]])
    query_gradient, document_gradient = nk.maxsim_grad(query, document, 3.0)
    assert query_gradient.tolist() == [[6.0, 15.0]]
    assert document_gradient.tolist() == [[0, 0], [3, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("metric", METRICS)
def test_upstream_zero_silences_nan_and_nan_goes_no_further(metric: str) -> None:
    rng = np.random.default_rng(8)
    documents = [rng.standard_normal((4, 3)).astype(np.float32) for _ in range(3)]
    documents[1][2] = np.nan
    query = rng.standard_normal((2, 3)).astype(np.float32)
    silenced = nk.maxsim_grad(query, documents, [1.0, 0.0, 2.0], metric=metric)
    assert all(np.isfinite(gradient).all() for gradient in silenced)
    assert not silenced[1][4:8].any()
    query_gradient, document_gradient = nk.maxsim_grad(query, documents, 1.0, metric=metric)
    assert np.isnan(query_gradient).all()
    assert np.isfinite(document_gradient[:4]).all() and np.isfinite(document_gradient[8:]).all()
    assert not document_gradient[[4, 5, 7]].any()  # the NaN token won, and nobody else gets anything


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15])
def test_zero_vectors_and_zero_padding_have_zero_gradients(metric: str, scale: float) -> None:
    rng = np.random.default_rng(9)
    query, document = (scale * rng.standard_normal((5, 4)) for _ in range(2))
    query[2] = document[:] = 0.0
    query_gradient, document_gradient = nk.maxsim_grad(query.astype("f"), document.astype("f"), 1.0, metric=metric)
    assert not query_gradient.any()
    if metric != "dot":
        assert not document_gradient.any()
    assert np.isfinite(document_gradient).all()


def test_padding_holds_positive_zeros_whatever_the_input_holds() -> None:
    padded = np.full((2, 3, 2), np.nan, np.float32)
    padded[0, 1], padded[1, 0], padded[1, 2] = (1, 2), (3, 4), (-1, 0)
    mask = np.array([[0, 1, 0], [1, 0, 1]])
    gradient = nk.maxsim_grad(np.float32([[-1, -1]]), nk.collection(padded, mask=mask), 1.0)[1]
    assert gradient.tolist() == [[[0, 0], [-1, -1], [0, 0]], [[0, 0], [0, 0], [-1, -1]]]
    assert not np.signbit(gradient[0, 0]).any()


def test_upstream_of_any_shape_that_broadcasts() -> None:
    q, d, _, _, _ = case("list", "list", "all", "f32")
    rng = np.random.default_rng(10)
    for shape in ((), (1,), (6,), (4, 1), (1, 6), (4, 6)):
        upstream = rng.standard_normal(shape)
        whole = np.ascontiguousarray(np.broadcast_to(upstream, (4, 6)))
        for given in (upstream, upstream.astype(np.float32), np.asfortranarray(whole), whole[::-1][::-1]):
            expected = nk.maxsim_grad(q.x, d.x, whole if given.dtype == np.float64 else np.float32(whole))
            for actual, wanted in zip(nk.maxsim_grad(q.x, d.x, given), expected):
                assert_same_bits(actual, wanted, f"upstream {shape}")


def test_one_side_alone() -> None:
    q, d, _, upstream, _ = case("list", "mask", "all", "bf16")
    both = nk.maxsim_grad(q.x, collection(d), upstream, grad_dtype="bf16")
    only = nk.maxsim_grad(q.x, collection(d), upstream, grad_dtype="bf16", need="queries")
    assert only[1] is None
    assert_same_bits(only[0], both[0], "queries")
    only = nk.maxsim_grad(q.x, collection(d), upstream, grad_dtype=DTYPES["bf16"], need=("documents",))
    assert only[0] is None
    assert_same_bits(only[1], both[1], "documents")


def test_strides_packed_ranges_and_bits_of_bfloat16_give_the_same() -> None:
    rng = np.random.default_rng(11)
    wide = rng.standard_normal((2, 40, 6)).astype(DTYPES["bf16"])
    query, documents = wide[0, ::-2, ::2], wide[:, ::3].transpose(0, 1, 2)[:, :, ::-2]
    wanted = nk.maxsim_grad(query.copy(), documents.copy(), 1.0)
    for actual, expected in zip(nk.maxsim_grad(query, documents, 1.0), wanted):
        assert_same_bits(actual, expected, "strided")
    as_bits = nk.collection(np.ascontiguousarray(query).view(np.uint16), dtype="bf16")
    assert_same_bits(nk.maxsim_grad(as_bits, documents, 1.0)[0], wanted[0], "uint16")
    packed = nk.pack([query.copy(), *documents.copy(), query.copy()])
    found = nk.maxsim_grad(packed[0], packed[1:3], 1.0)
    assert_same_bits(found[0], wanted[0], "packed query")
    assert_same_bits(found[1], wanted[1].reshape(-1, 3), "packed range")
    listed = nk.maxsim_candidates_grad(packed[0], packed[1:3], [1, -1, 0], [1.0, 5.0, 1.0])
    assert_same_bits(listed[1], wanted[1].reshape(-1, 3), "candidates of a packed range")


def test_nothing_at_all() -> None:
    query, none = np.ones((2, 3), np.float32), nk.collection([], depth=3)
    assert [g.tolist() for g in nk.maxsim_grad(query, none, 1.0)] == [np.zeros((2, 3)).tolist(), []]
    assert [g.shape for g in nk.maxsim_grad(none, [query], 1.0)] == [(0, 3), (2, 3)]
    assert not nk.maxsim_candidates_grad(query, [query], np.zeros((1, 0), int), 1.0)[1].any()
    assert [g.shape for g in nk.maxsim_pairs_grad(none, none, 1.0)] == [(0, 3), (0, 3)]


def test_scratch_is_bounded() -> None:
    """Outputs and the argmax; never anything of the size of the similarities."""
    import tracemalloc

    rng = np.random.default_rng(12)
    query, documents = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 8), (200, 300, 8)))
    winners = nk.maxsim(query, documents, return_argmax=True).argmax
    tracemalloc.start()
    try:
        gradients = nk.maxsim_grad(query, documents, 1.0, argmax=winners)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < sum(gradient.nbytes for gradient in gradients) + (1 << 18)


# ------------------------------------------------------------------------------------------------ errors


def test_errors_name_the_argument_and_the_fix() -> None:
    query, documents = np.ones((2, 4), np.float32), [np.ones((3, 4), np.float32)] * 2
    winners = np.zeros((2, 2), np.int32)
    cases = [
        (nk.ShapeMismatch, "upstream: shape .3,., wanted one that broadcasts to .2,.", {"upstream": [1, 2, 3]}),
        (nk.UnsupportedDtype, "upstream", {"upstream": np.ones(2, complex)}),
        (nk.ShapeMismatch, "argmax: shape .2, 3., wanted .2, 2.", {"argmax": np.zeros((2, 3), np.int32)}),
        (nk.UnsupportedDtype, "argmax", {"argmax": winners.astype(float)}),
        (nk.IndexOutOfRange, "argmax: names a token past", {"argmax": winners + 3}),
        (nk.IndexOutOfRange, "argmax: names a token past", {"argmax": winners + np.int64(1 << 40)}),
        (nk.InvalidArgument, "metric: 'l2', wanted one of .*dot", {"metric": "l2"}),
        (nk.InvalidArgument, "reduction: 'max'", {"reduction": "max"}),
        (nk.InvalidArgument, 'need: .*wanted "queries", "documents"', {"need": ("q",)}),
        (nk.InvalidArgument, "need", {"need": ()}),
        (nk.UnsupportedDtype, "grad_dtype: f16, wanted f32", {"grad_dtype": np.float16}),
        (nk.InvalidArgument, "threads", {"threads": 0}),
    ]
    for error, message, options in cases:
        for need in ("queries", "documents"):
            with pytest.raises(error, match=message):
                nk.maxsim_grad(query, documents, **{"upstream": 1.0, "need": need, **options})
    with pytest.raises(nk.IndexOutOfRange, match=r"candidates\[0, 1\]: 2"):
        nk.maxsim_candidates_grad(query, documents, [0, 2], 1.0)
    with pytest.raises(nk.ShapeMismatch, match="candidates: shape"):
        nk.maxsim_candidates_grad(query, documents, [[0], [1]], 1.0)
    with pytest.raises(nk.ShapeMismatch, match="1 queries, and docs: 2"):
        nk.maxsim_pairs_grad(query, documents, 1.0)
    with pytest.raises(nk.UnsupportedDtype, match="q: f32, and docs: f16"):
        nk.maxsim_grad(query, [np.ones((3, 4), np.float16)], 1.0)


# ------------------------------------------------------------------------------------------------ coded documents


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize("scores", GRADIENTS)
@pytest.mark.parametrize("queries", QUERY_LAYOUTS)
def test_gradient_of_queries_by_what_codes_stand_for(queries: str, scores: str, precision: str) -> None:
    """The documents are of a range, with a NaN in the last one."""
    forward, backward = GRADIENTS[scores]
    for dtype in DTYPES:
        q, d, extra, upstream, options = case(queries, "list", scores, dtype)
        d.x[-1][-1, 2] = np.nan
        coded = nk.pack([d.x[-1], *d.x], **coding(precision, d.x[-1].shape[1]))[1:]
        x = collection(q)
        for metric in METRICS:
            winners = forward(x, coded, *extra, return_argmax=True, metric=metric).argmax
            common = {"metric": metric, "reduction": REDUCTIONS[len(metric) % 2]}
            with np.errstate(all="ignore"):
                expected, _ = reference.maxsim_grad(
                    read(q), coded.unpack(), upstream, argmax=winners, **options, **common
                )
            found, nothing = backward(x, coded, *extra, upstream, argmax=winners, need="queries", **common)
            assert nothing is None and found.shape == expected.shape and found.dtype == np.float32
            again, _ = backward(x, coded, *extra, upstream, need="queries", threads=2, **common)
            assert_same_bits(again, found, "gradient without an argmax")
            if metric == "dot":
                assert_same_bits(found, rounded(expected, np.float32), "gradient")
            finite = np.isfinite(expected)
            assert np.array_equal(np.isfinite(found), finite)
            assert relative_error(np.where(finite, found, 0), np.where(finite, expected, 0)) < 1e-5


def test_codes_have_no_gradient() -> None:
    x = tokens("random", "bf16", 5, 8, 1)
    coded = nk.pack([x, x], precision="int8")
    for need in ("documents", ("queries", "documents")):
        with pytest.raises(nk.InvalidArgument, match=r'docs: packed with precision \'int8\', .*pass need="queries"'):
            nk.maxsim_grad(x, coded, 1, need=need)
    with pytest.raises(nk.InvalidArgument, match="q: packed with precision 'int8', and codes have no gradient"):
        nk.maxsim_grad(coded, coded, 1, need="queries")
    with pytest.raises(nk.UnsupportedDtype, match="grad_dtype: bf16, wanted f32"):
        nk.maxsim_grad(x, coded, 1, need="queries", grad_dtype="bf16")
    with pytest.raises(nk.IndexOutOfRange, match="argmax: names a token past the end"):
        nk.maxsim_grad(x, coded, 1, need="queries", argmax=np.full((2, 5), 5, np.int32))
    none = nk.maxsim_grad(x, coded[:0], np.zeros(0), need="queries")[0]
    assert_same_bits(none, np.zeros((5, 8), np.float32), "gradient")
