"""Every CPU row against the reference: the same bits, for every dtype, layout, metric, tile edge, depth, kind of data.

Each case runs, skips with the row's own reason, or must raise (a row that lacks the dtype). What is compared is never
a tolerance: on all CPU rows the pair value is the float64 dot, so scores, argmax and token scores are the same bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import (
    DEPTHS,
    DTYPES,
    FINITE_KINDS,
    KINDS,
    LAYOUTS,
    METRICS,
    QUERY_EDGES,
    REDUCTIONS,
    TILE_EDGES,
    Layout,
    assert_exact,
    assert_same_bits,
    assert_same_result,
    bits,
    header_layout_id,
    lay_out,
    layout_ids,
    read,
    tokens,
)

import numkong_py as nk
from numkong_py import reference
from numkong_py.cpu import METRICS as METRIC_NUMBERS

TABLE = {row.name: row for row in nk.backends() if row.device == "cpu"}
ROWS = {name: row for name, row in TABLE.items() if row.reason != "not this architecture"}
EVERYTHING = {"return_argmax": True, "return_token_scores": True, "return_bounds": True}
ROW_AND_DTYPE = [pytest.param(name, dtype, id=f"{name}-{dtype}") for name in ROWS for dtype in DTYPES]


def need(row: str, dtype: str) -> None:
    """Skip with the row's reason where the machine lacks it, or where the row does not have the dtype."""
    if dtype not in ROWS[row].dtypes:
        pytest.skip(f"{row} has no {dtype}: test_a_row_is_refused_by_name_where_it_cannot_run")
    if not ROWS[row].available:
        pytest.skip(f"{row}: {ROWS[row].reason}")


def row_name(packed: Any) -> str:
    """Name of the row that packed a tensor."""
    return getattr(packed.backend, "name", packed.backend)


def pack(layout: Layout | list[np.ndarray] | np.ndarray, row: str, **options: Any) -> Any:
    """Pack with a row forced by name, and make sure that this very row did it."""
    x, keywords = (layout.x, layout.keywords) if isinstance(layout, Layout) else (layout, {})
    packed = nk.pack(x, **keywords, **options, backend=row)
    assert row_name(packed) == row
    assert header_layout_id(packed) == layout_ids()[row]
    return packed


# --------------------------------------------------------------------------------------------- the cases


@dataclass(frozen=True)
class Case:
    """One set of inputs and options, from a seed; its name is enough to make it again."""

    dtype: str
    layout: str
    kind: str
    metric: str
    reduction: str
    depth: int
    query_counts: tuple[int, ...]
    document_counts: tuple[int, ...]
    seed: int

    def __str__(self) -> str:
        return f"{self.dtype}-{self.layout}-{self.kind}-{self.metric}-{self.reduction}-d{self.depth}-s{self.seed}"


def deck(rng: np.random.Generator, *axes: Any) -> Iterator[Any]:
    """Deal every combination of the axes in random order, again and again."""
    combinations = list(itertools.product(*axes))
    while True:
        yield from (combinations[i] for i in rng.permutation(len(combinations)))


def cases() -> list[Case]:
    """Twice every depth for every dtype; layout x kind, metric x reduction and the token counts are dealt from decks.

    So every pair of (dtype, depth), (layout, kind) under every dtype, and metric with reduction occurs, and every
    collection of documents holds every tile edge, in another order each time.
    """
    rng = np.random.default_rng(20)
    layouts, options = deck(rng, LAYOUTS, KINDS), deck(rng, METRICS, REDUCTIONS)
    singles, query_counts = deck(rng, QUERY_EDGES, TILE_EDGES), deck(rng, QUERY_EDGES)
    dealt = []
    for seed, (dtype, depth) in enumerate(itertools.product(DTYPES, DEPTHS + DEPTHS)):
        layout, kind = next(layouts)
        queries = tuple(next(query_counts)[0] for _ in range(2 if depth > 130 else 3))
        documents = tuple(int(count) for count in rng.permutation(TILE_EDGES))
        if layout == "pairs":
            queries = tuple(next(query_counts)[0] for _ in documents)
        if layout == "one":
            queries, documents = ((count,) for count in next(singles))
        dealt.append(Case(dtype, layout, kind, *next(options), depth, queries, documents, seed))
    return dealt


@functools.lru_cache(maxsize=2)
def inputs(case: Case) -> tuple[Layout, Layout, np.ndarray | None]:
    """Query and document layouts of a case, and its candidates."""
    parts = [
        [
            tokens(case.kind, case.dtype, count, case.depth, 1000 * case.seed + 2 * i + side, flip=side == 0)
            for i, count in enumerate(counts)
        ]
        for side, counts in enumerate((case.query_counts, case.document_counts))
    ]
    queries, documents = (lay_out(side, case.layout, case.seed) for side in parts)
    rng = np.random.default_rng(case.seed)
    candidates = rng.integers(-1, len(parts[1]), (len(parts[0]), 5)) if case.layout == "candidates" else None
    return queries, documents, candidates


def call(module: Any, case: Case, queries: Any, documents: Any, candidates: Any, **options: Any) -> Any:
    """Run a case through the reference or through the package: they share names and keywords."""
    options = {"metric": case.metric, "reduction": case.reduction, **options}
    if case.layout == "pairs":
        return module.maxsim_pairs(queries, documents, **options)
    if case.layout == "candidates":
        return module.maxsim_candidates(queries, documents, candidates, **options)
    return module.maxsim(queries, documents, **options)


@functools.lru_cache(maxsize=2)
def expected_result(case: Case) -> Any:
    """The reference's answer, computed once for all rows."""
    queries, documents, candidates = inputs(case)
    return call(reference, case, read(queries), read(documents), candidates, **EVERYTHING)


@pytest.mark.parametrize(("case", "row"), [pytest.param(c, r, id=f"{c}-{r}") for c in cases() for r in ROWS])
def test_same_bits_as_the_reference(case: Case, row: str) -> None:
    queries, documents, candidates = inputs(case)
    if case.dtype not in ROWS[row].dtypes:
        with pytest.raises((nk.MissingKernel, nk.BackendUnavailable)):
            pack(documents, row)
        return
    need(row, case.dtype)
    queries, documents = pack(queries, row), pack(documents, row)
    actual = call(nk, case, queries, documents, candidates, **EVERYTHING)
    expected = expected_result(case)
    assert_same_result(actual, expected)
    assert_bounds_follow_the_formula(actual.bounds, expected.bounds)
    assert_same_bits(call(nk, case, queries, documents, candidates), expected.scores)


def assert_bounds_follow_the_formula(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bounds are the formula's, whose slack of 2^-20 covers its own evaluation: never below it, hardly above."""
    assert actual.shape == expected.shape and actual.dtype == np.float64
    assert np.all(actual >= expected * (1 - 2.0**-20)), "a bound is below the formula"
    assert np.all((actual <= expected * (1 + 2.0**-15)) | (expected == np.inf)), "a bound is far above the formula"


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
@pytest.mark.parametrize("kind", FINITE_KINDS)
def test_scores_and_winners_against_exact_arithmetic(row: str, dtype: str, kind: str) -> None:
    need(row, dtype)
    for seed, (metric, reduction) in enumerate(itertools.product(METRICS, REDUCTIONS)):
        query, document = tokens(kind, dtype, 5, 19, seed, flip=True), tokens(kind, dtype, 17, 19, 100 + seed)
        result = nk.maxsim_packed(
            pack(query, row), pack(document, row), metric=metric, reduction=reduction, **EVERYTHING
        )
        assert_exact(query, document, metric, reduction, type(result)(*(array[0] for array in result)))


# -------------------------------------------------------------------------------------- rows and selection


def test_layout_ids_are_distinct_and_every_row_of_the_table_is_listed() -> None:
    ids = layout_ids()
    assert len(set(ids.values())) == len(ids)
    assert list(ids) == list(TABLE) and len(TABLE) == 9
    assert list(TABLE)[-1] == "serial", "the row that every machine has is the last"
    families = ("sapphireamx genoa icelake alder haswell serial", "sme neonsdot serial", "v128relaxed serial")
    assert " ".join(ROWS) in families, "one architecture's rows, the others say that they are another's"


def test_serial_is_always_available_and_others_say_why_not() -> None:
    assert ROWS["serial"].available
    for row in TABLE.values():
        assert row.available or len(row.reason) > 10, row.name
        assert row.available or row.reason.strip() == row.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_available_row_with_the_dtype_is_chosen(dtype: str) -> None:
    best = next(row for row in ROWS.values() if row.available and dtype in row.dtypes)
    packed = nk.pack(tokens("random", dtype, 3, 8, 1))
    assert row_name(packed) == best.name
    assert header_layout_id(packed) == layout_ids()[best.name]


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_capabilities_of_a_row_choose_that_row(row: str, dtype: str) -> None:
    need(row, dtype)
    packed = nk.pack(tokens("random", dtype, 3, 8, 1), capabilities=ROWS[row].required)
    assert row_name(packed) == row


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_a_row_is_refused_by_name_where_it_cannot_run(row: str, dtype: str) -> None:
    if ROWS[row].available and dtype in ROWS[row].dtypes:
        assert row_name(nk.pack(tokens("random", dtype, 3, 8, 1), backend=row)) == row
        return
    with pytest.raises((nk.BackendUnavailable, nk.MissingKernel)) as error:
        nk.pack(tokens("random", dtype, 3, 8, 1), backend=row)
    assert row in str(error.value)


# ----------------------------------------------------------------------- the same bits, whatever else is there


@functools.lru_cache(maxsize=4)
def collection(kind: str, dtype: str, depth: int = 33) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Three queries and 60 ragged documents, some of them empty."""
    rng = np.random.default_rng(7)
    queries = [tokens(kind, dtype, count, depth, 50 + count, flip=True) for count in (9, 0, 32)]
    documents = [tokens(kind, dtype, int(count), depth, i) for i, count in enumerate(rng.integers(0, 30, 60))]
    documents[0], documents[-1] = documents[0][:0], documents[-1][:0]
    return queries, documents


def together(parts: list[Any], axis: int = 1) -> Any:
    """Join results along an axis."""
    return type(parts[0])(*(np.concatenate([part[i] for part in parts], axis=axis) for i in range(len(parts[0]))))


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_threads_change_no_bit(row: str, dtype: str) -> None:
    need(row, dtype)
    for kind, metric in (("heavy_tailed", "dot"), ("exact_duplicates", "cosine"), ("nan", "angular")):
        queries, documents = (pack(side, row) for side in collection(kind, dtype))
        one = nk.maxsim_packed(queries, documents, metric=metric, threads=1, **EVERYTHING)
        for threads in (None, 2, 3, 5, 8, 16, 31, 32):
            many = nk.maxsim_packed(queries, documents, metric=metric, threads=threads, **EVERYTHING)
            assert_same_result(many, one)
            assert_same_bits(many.bounds, one.bounds, "bounds")


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
@pytest.mark.parametrize("metric", METRICS)
def test_batch_and_order_change_no_bit(row: str, dtype: str, metric: str) -> None:
    need(row, dtype)
    for kind in ("random", "mixed_scales", "infinities"):
        queries, documents = collection(kind, dtype)
        packed_queries, packed = pack(queries, row), pack(documents, row)
        whole = nk.maxsim_packed(packed_queries, packed, metric=metric, **EVERYTHING)
        alone = [nk.maxsim_packed(packed_queries, pack([one], row), metric=metric, **EVERYTHING) for one in documents]
        assert_same_result(together(alone), whole)
        order = np.random.default_rng(1).permutation(len(documents))
        permuted = nk.maxsim_packed(packed_queries, pack([documents[i] for i in order], row), metric=metric)
        assert_same_bits(permuted, whole.scores[:, order])
        pieces = [nk.maxsim_packed(packed_queries, packed[i : i + 7], metric=metric) for i in range(0, 60, 7)]
        assert_same_bits(np.concatenate(pieces, axis=1), whole.scores)
        assert_same_bits(nk.maxsim_packed(packed_queries, packed[order], metric=metric), whole.scores[:, order])
        single = nk.maxsim_packed(pack(queries[2], row), packed, metric=metric)
        assert_same_bits(single, whole.scores[2])


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_layouts_change_no_bit(row: str, dtype: str) -> None:
    need(row, dtype)
    queries, documents = collection("random", dtype)
    expected = nk.maxsim_packed(pack(queries, row), pack(documents, row), **EVERYTHING)
    for left, right, seed in (("offsets", "mask", 1), ("lengths", "offsets", 2), ("mask", "lengths", 3)):
        packed = pack(lay_out(queries, left, seed), row), pack(lay_out(documents, right, seed + 9), row)
        assert_same_result(nk.maxsim_packed(*packed, **EVERYTHING), expected)


@pytest.mark.parametrize("layout", ["list", "offsets", "lengths", "mask"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_and_collections_score_like_packed_tensors(dtype: str, layout: str) -> None:
    queries, documents = (lay_out(side, layout, 4) for side in collection("random", dtype))
    packed = [nk.pack(side.x, **side.keywords) for side in (queries, documents)]
    views = [nk.collection(side.x, **side.keywords) for side in (queries, documents)]
    expected = reference.maxsim(read(queries), read(documents), **EVERYTHING)
    for sides in itertools.product(*zip(packed, views)):
        assert_same_result(nk.maxsim(*sides, **EVERYTHING), expected)
    if layout == "list":
        assert_same_result(nk.maxsim(queries.x, documents.x, **EVERYTHING), expected)


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_pairs_and_candidates_are_entries_of_the_full_matrix(row: str, dtype: str) -> None:
    need(row, dtype)
    queries, documents = collection("clustered", dtype)
    packed_queries, packed = pack(queries, row), pack(documents, row)
    whole = nk.maxsim_packed(packed_queries, packed)
    assert_same_bits(nk.maxsim_pairs(packed_queries, packed[5:8]), np.diagonal(whole[:, 5:8]))
    candidates = np.random.default_rng(2).integers(0, 60, (3, 200))
    for dtype_of_candidates in (np.int64, np.int32, np.uint8):
        scores = nk.maxsim_candidates(packed_queries, packed, candidates.astype(dtype_of_candidates))
        assert_same_bits(scores, np.take_along_axis(whole, candidates, axis=1))


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_empty_value_replaces_only_empty_documents(row: str, dtype: str) -> None:
    need(row, dtype)
    queries, documents = collection("one_sided", dtype)
    packed = pack(queries, row), pack(documents, row)
    for metric, empty in itertools.product(METRICS, (0.0, -3.5, np.inf)):
        expected = reference.maxsim(queries, documents, metric=metric, empty=empty, **EVERYTHING)
        assert_same_result(nk.maxsim_packed(*packed, metric=metric, empty=empty, **EVERYTHING), expected)


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_nan_stays_where_it_is(row: str, dtype: str) -> None:
    need(row, dtype)
    queries, documents = (list(side) for side in collection("random", dtype))
    clean = nk.maxsim_packed(pack(queries, row), pack(documents, row))
    documents[3] = documents[3].copy()
    documents[3][-1, -1] = np.nan
    spoiled = nk.maxsim_packed(pack(queries, row), pack(documents, row))
    assert np.isnan(spoiled[[0, 2], 3]).all() and spoiled[1, 3] == 0
    assert_same_bits(np.delete(spoiled, 3, axis=1), np.delete(clean, 3, axis=1))
    queries[0] = queries[0].copy()
    queries[0][0, 0] = np.nan
    spoiled = nk.maxsim_packed(pack(queries, row), pack(documents, row))
    with_tokens = np.array([len(document) > 0 for document in documents])
    assert np.isnan(spoiled[0, with_tokens]).all() and (spoiled[0, ~with_tokens] == -np.inf).all()
    assert_same_bits(spoiled[2, 4:], clean[2, 4:])


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
@pytest.mark.parametrize("metric", METRICS)
def test_every_pair_of_special_vectors(row: str, dtype: str, metric: str) -> None:
    need(row, dtype)
    special = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan]
    vectors = np.array(list(itertools.product(special, repeat=2))).astype(DTYPES[dtype])
    vectors = np.pad(vectors, ((0, 0), (0, 3)))
    sets = [vector[None] for vector in vectors]
    expected = reference.maxsim(sets, sets, metric=metric, **EVERYTHING)
    packed = pack(sets, row)
    assert_same_result(nk.maxsim_packed(packed, packed, metric=metric, **EVERYTHING), expected)
    together = [vectors[[16, i, j]] for i, j in list(itertools.combinations(range(len(vectors)), 2))[::5]]
    expected = reference.maxsim(vectors, together, metric=metric, **EVERYTHING)
    actual = nk.maxsim_packed(pack(vectors, row), pack(together, row), metric=metric, **EVERYTHING)
    assert_same_result(actual, expected)


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
@pytest.mark.parametrize("metric", METRICS)
def test_documents_whose_tokens_differ_in_scale(row: str, dtype: str, metric: str) -> None:
    need(row, dtype)
    reach = {"bf16": 120, "f16": 12, "f32": 120}[dtype]
    for seed, (depth, spread) in enumerate(itertools.product((8, 33, 128), (1.0, 0.1, 0.01, 0.001))):
        rng = np.random.default_rng(seed)
        base = rng.standard_normal((1, depth)) + spread * rng.standard_normal((60, depth))
        document = (base * 2.0 ** rng.integers(-reach, reach, (60, 1))).astype(DTYPES[dtype])
        query = (base[:33] * 2.0 ** rng.integers(-reach, reach, (33, 1))).astype(DTYPES[dtype])
        result = nk.maxsim_packed(pack(query, row), pack(document, row), metric=metric, **EVERYTHING)
        assert_same_result(result, reference.maxsim(query, document, metric=metric, **EVERYTHING))


@pytest.mark.parametrize("results", list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_what_is_returned_changes_no_bit(row: str, dtype: str, results: tuple[bool, ...]) -> None:
    need(row, dtype)
    packed = [pack(side, row) for side in collection("near_duplicates", dtype)]
    expected = nk.maxsim_packed(*packed)
    asked = dict(zip(EVERYTHING, results))
    actual = nk.maxsim_packed(*packed, **asked)
    assert_same_bits(actual.scores if any(results) else actual, expected)
    assert not any(results) or [part is not None for part in actual[1:]] == list(results)


# ------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
@pytest.mark.parametrize("depth", [1000, 4096, 5001, 140_000])
def test_large_depths(row: str, dtype: str, depth: int) -> None:
    need(row, dtype)
    query, documents = tokens("random", dtype, 3, depth, 1), [tokens("extremes", dtype, 2, depth, 2)] * 2
    documents[1] = tokens("dequantised", dtype, 9, depth, 3)
    for metric in METRICS:
        result = nk.maxsim_packed(pack(query, row), pack(documents, row), metric=metric, **EVERYTHING)
        assert_same_result(result, reference.maxsim(query, documents, metric=metric, **EVERYTHING))


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_many_small_documents_and_one_large(row: str, dtype: str) -> None:
    need(row, dtype)
    query, x = tokens("random", dtype, 4, 8, 1), tokens("random", dtype, 20_000, 8, 2)
    values = reference.pair_values(query, x)
    packed_query = pack(query, row)
    small = nk.maxsim_packed(packed_query, pack(Layout(x, {"offsets": np.arange(20_001)}), row))
    assert_same_bits(small, np.add.accumulate(values)[-1].astype(small.dtype))
    large = nk.maxsim_packed(packed_query, pack(x, row), return_argmax=True)
    assert_same_bits(large.argmax, values.argmax(axis=1)[None].astype(np.int32))
    long_query = nk.maxsim_packed(pack(x, row), pack(query, row), return_argmax=True)
    assert_same_bits(long_query.argmax, values.argmax(axis=0)[None].astype(np.int32))


def test_empty_collections_have_shapes() -> None:
    x = np.ones((3, 4), np.float32)
    nothing = nk.pack(x[:0], offsets=np.zeros(1, np.int64))
    assert len(nothing) == 0
    assert nk.maxsim(x, nothing).shape == (0,)
    assert nk.maxsim([x, x], nothing, return_argmax=True).argmax.shape == (2, 0, 3)
    assert nk.maxsim(nothing, [x]).shape == (0, 1)
    assert nk.maxsim_candidates([x, x], [x], np.zeros((2, 0), np.int64)).shape == (2, 0)
    assert nk.maxsim_pairs(nothing, nothing).shape == (0,)
    trailing = nk.pack(x, offsets=[0, 3, 3, 3])
    assert nk.maxsim(x, trailing).tolist()[1:] == [-np.inf, -np.inf]


# ------------------------------------------------------------------------------------ memory of the inputs


def structured(x: np.ndarray) -> np.ndarray:
    """Elements as the misaligned field of 9-byte records."""
    records = np.zeros(x.shape, np.dtype({"names": ["value"], "formats": [x.dtype], "offsets": [3], "itemsize": 9}))
    records["value"] = x
    return records["value"]


def stepped(x: np.ndarray) -> np.ndarray:
    """Every second row and every third element of a bigger array."""
    bigger = np.full((2 * x.shape[0], 3 * x.shape[1]), np.nan, x.dtype)
    bigger[::2, ::3] = x
    return bigger[::2, ::3]


def read_only(x: np.ndarray) -> np.ndarray:
    """A copy that must not be written to."""
    copy = x.copy()
    copy.flags.writeable = False
    return copy


def unaligned(x: np.ndarray) -> np.ndarray:
    """A contiguous array that starts on an odd byte."""
    raw = np.zeros(x.nbytes + 1, np.uint8)
    view = raw[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


STRIDES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": lambda x: x.copy(),
    "reversed rows": lambda x: x[::-1].copy()[::-1],
    "reversed elements": lambda x: x[:, ::-1].copy()[:, ::-1],
    "reversed both": lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
    "stepped": stepped,
    "transposed": lambda x: x.T.copy().T,
    "fortran": np.asfortranarray,
    "structured": structured,
    "read-only": read_only,
    "unaligned": unaligned,
    "column slice": lambda x: np.concatenate([x, x], axis=1)[:, : x.shape[1]],
}


@pytest.mark.parametrize("view", STRIDES)
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_strides_change_no_bit(row: str, dtype: str, view: str) -> None:
    need(row, dtype)
    for depth in (1, 7, 48):
        x, query = tokens("random", dtype, 23, depth, 1), tokens("random", dtype, 5, depth, 2)
        strided, strided_query = STRIDES[view](x), STRIDES[view](query)
        assert np.array_equal(bits(strided), bits(x))
        offsets = np.array([0, 4, 4, 17, 23])
        expected = reference.maxsim(query, reference.sets(x, offsets=offsets))
        packed_query = pack(strided_query, row)
        assert_same_bits(nk.maxsim_packed(packed_query, pack(Layout(strided, {"offsets": offsets}), row)), expected)
        parts = [strided[i:j] for i, j in itertools.pairwise(offsets)]
        assert_same_bits(nk.maxsim_packed(packed_query, pack(parts, row)), expected)
        assert_same_bits(bits(pack(strided, row).unpack()), bits(x), "unpacked")


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_strides_of_padded_arrays_change_no_bit(row: str, dtype: str) -> None:
    need(row, dtype)
    parts = [tokens("random", dtype, count, 9, count) for count in (4, 0, 7, 1)]
    query = tokens("random", dtype, 5, 9, 2)
    expected = reference.maxsim(query, parts)
    for layout, seed in itertools.product(("lengths", "mask"), range(2)):
        padded = lay_out(parts, layout, seed)
        x = padded.x
        for view in (
            x.transpose(2, 0, 1).copy().transpose(1, 2, 0),
            x[::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1],
            np.asfortranarray(x),
            structured(x),
            np.repeat(x, 2, axis=1)[:, ::2],
        ):
            packed = pack(Layout(view, padded.keywords), row)
            assert_same_bits(nk.maxsim_packed(pack(query, row), packed), expected)


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_broadcast_strides(row: str, dtype: str) -> None:
    need(row, dtype)
    query = tokens("random", dtype, 5, 12, 2)
    token, element = tokens("random", dtype, 1, 12, 3), tokens("random", dtype, 6, 1, 4)
    for x in (np.broadcast_to(token, (6, 12)), np.broadcast_to(element, (6, 12))):
        assert_same_bits(nk.maxsim_packed(pack(query, row), pack(x, row)), reference.maxsim(query, x.copy()))
    windows = np.lib.stride_tricks.sliding_window_view(tokens("random", dtype, 1, 40, 5)[0], 12)
    assert_same_bits(nk.maxsim_packed(pack(query, row), pack(windows, row)), reference.maxsim(query, windows.copy()))
    batch = np.broadcast_to(token, (3, 4, 12))
    packed = pack(Layout(batch, {"lengths": [4, 0, 1]}), row)
    assert_same_bits(
        nk.maxsim_packed(pack(query, row), packed), reference.maxsim(query, reference.sets(batch, lengths=[4, 0, 1]))
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_mapped_and_foreign_byte_order(dtype: str, tmp_path: Path) -> None:
    x, query = tokens("random", dtype, 23, 12, 1), tokens("random", dtype, 5, 12, 2)
    expected = reference.maxsim(query, x)
    x.tofile(tmp_path / "tokens")
    mapped = np.memmap(tmp_path / "tokens", x.dtype, "r", shape=x.shape)
    assert_same_bits(nk.maxsim(query, mapped), expected)
    assert_same_bits(nk.maxsim(query, mapped[::-1]), expected)
    if dtype == "bf16":
        return  # ml_dtypes has no byte-swapped bfloat16
    swapped = x.astype(x.dtype.newbyteorder())
    try:
        scores = nk.maxsim(query, swapped)
    except TypeError as error:
        assert "byte" in str(error)
    else:
        assert_same_bits(scores, expected)


def same_codes(dtype: str, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """A document of 16 tokens twelve times over, but for one element that differs by less than its codes see.

    So the screen takes copies for equals, and a pass over a row has them in one lane, of one token or of four.
    """
    rng = np.random.default_rng(depth)
    document = np.tile(rng.standard_normal((16, depth)), (12, 1))
    document[:, depth // 2] = rng.uniform(0.002, 0.02, len(document))
    return rng.standard_normal((7, depth)).astype(DTYPES[dtype]), document.astype(DTYPES[dtype])


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_copies_that_only_exact_values_tell_apart(row: str, dtype: str) -> None:
    need(row, dtype)
    query, document = same_codes(dtype, 127)
    wanted = reference.maxsim([query], [document], **EVERYTHING)
    assert (wanted.argmax >= 64).any() and (wanted.argmax < 64).any(), "copies of all spans must win"
    packed = nk.pack([query], backend=row), nk.pack([document], backend=row)
    assert_same_result(nk.maxsim_packed(*packed, **EVERYTHING), wanted)


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_inputs_are_not_written_and_not_kept(row: str, dtype: str) -> None:
    need(row, dtype)
    x, query = tokens("random", dtype, 23, 12, 1), tokens("random", dtype, 5, 12, 2)
    before, expected = x.copy(), reference.maxsim(query, x)
    packed = pack(x, row)
    nk.maxsim_packed(pack(query, row), packed)
    assert np.array_equal(bits(x), bits(before))
    x[...] = 0
    assert_same_bits(nk.maxsim_packed(pack(query, row), packed), expected)


# ------------------------------------------------------------------------------------------ packed tensors


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_unpack_gives_the_bits_back(row: str, dtype: str, kind: str) -> None:
    need(row, dtype)
    documents = [tokens(kind, dtype, count, 21, count) for count in (3, 0, 17, 1)]
    packed = pack(lay_out(documents, "mask", 3), row)
    flat = np.concatenate(documents)
    unpacked = packed.unpack()
    unpacked = np.concatenate(unpacked) if isinstance(unpacked, list) else np.asarray(getattr(unpacked, "x", unpacked))
    assert unpacked.dtype == flat.dtype
    assert unpacked.tobytes() == flat.tobytes()
    assert list(packed.lengths) == [3, 0, 17, 1] and packed.depth == 21 and len(packed) == 4


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_packing_is_deterministic_and_padding_leaves_no_trace(row: str, dtype: str) -> None:
    need(row, dtype)
    parts = [tokens("random", dtype, count, 21, count) for count in (3, 0, 17, 1)]
    packs = [pack(parts, row), *(pack(lay_out(parts, "mask", seed), row) for seed in range(3))]
    assert len({bytes(memoryview(np.asarray(packed.buffer).view(np.uint8).reshape(-1))) for packed in packs}) == 1


@pytest.mark.parametrize("kind", ["random", "zeros", "huge", "tiny", "subnormal", "extremes", "nan"])
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_normalize_divides_by_the_norm_and_rounds_once(row: str, dtype: str, kind: str) -> None:
    need(row, dtype)
    x, query = tokens(kind, dtype, 17, 21, 1), tokens("random", dtype, 3, 21, 2)
    packed = pack(x, row, normalize=True)
    expected = reference.normalized(x)
    assert np.array_equal(bits(np.asarray(packed.unpack())), bits(expected))
    assert_same_bits(nk.maxsim_packed(pack(query, row), packed), reference.maxsim(query, expected))


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_normalized_tokens_are_not_rounded_twice(row: str, dtype: str) -> None:
    need(row, dtype)
    x = tokens("random", dtype, 8000, 64, 1)
    wrong = bits(pack(x, row, normalize=True).unpack()) != bits(reference.normalized(x))
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} elements"


# -------------------------------------------------------------------------------------------------- top-k


@pytest.mark.parametrize("kind", ["random", "exact_duplicates", "one_hot", "nan", "infinities", "zeros", "huge"])
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_topk_is_the_sorted_full_matrix(row: str, dtype: str, kind: str) -> None:
    need(row, dtype)
    queries, documents = collection(kind, dtype)
    packed_queries, packed = pack(queries, row), pack(documents, row)
    for metric, k in (("dot", 1), ("cosine", 7), ("angular", 13), ("dot", 60)):
        scores, indices = nk.topk(packed_queries, packed, k, metric=metric)
        expected_scores, expected_indices = reference.topk(queries, documents, k, metric=metric)
        assert_same_bits(indices, expected_indices, "indices")
        assert_same_bits(scores, expected_scores)
        for options in ({"block": 11}, {"threads": 3}, {"screen": "never"}):
            again = nk.topk(packed_queries, packed, k, metric=metric, **options)
            assert_same_bits(again[1], indices, f"indices with {options}")
            assert_same_bits(again[0], scores, f"scores with {options}")


def topical(dtype: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Documents about two of sixteen topics and queries about one document each: scores lie far apart."""
    rng = np.random.default_rng(11)
    topics = rng.standard_normal((16, 40))
    documents = [
        (topics[rng.integers(0, 16, 2)[rng.integers(0, 2, length)]] + rng.normal(0, 0.3, (length, 40))).astype(
            DTYPES[dtype]
        )
        for length in rng.integers(0, 40, 120)
    ]
    asked = [max(documents, key=len)[:count] for count in (32, 9, 23, 0, 40, 32)]
    asked.append(np.zeros((4, 40), DTYPES[dtype]))
    return asked, documents


@pytest.mark.parametrize("metric", ["dot", "cosine", "angular"])
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_what_cannot_reach_the_floor_is_left_out(row: str, dtype: str, metric: str) -> None:
    need(row, dtype)
    queries, documents = topical(dtype)
    packed_queries, packed = pack(queries, row), pack(documents, row)
    sign = -1 if metric == "angular" else 1
    options = {"metric": METRIC_NUMBERS[metric], "mean": metric == "cosine"}
    scores = packed.row.score(packed_queries, packed, **options).scores
    ordered = sign * np.sort(-sign * scores, axis=1) * -1  # best first
    for rank in range(0, 100, 3):  # a document at its own floor stays, however tight
        floors = np.ascontiguousarray(ordered[:, rank], np.float64)
        floored = packed.row.score(packed_queries, packed, **options, floors=floors).scores
        left_out = bits(floored) != bits(scores)
        assert not (left_out & (sign * scores >= sign * floors[:, None])).any()
        assert (sign * floored[left_out] == -np.inf).all()
        if rank == 3 and row != "serial":
            assert left_out[0].mean() > 0.5, "one whole block of query tokens"
            assert left_out[1].mean() > 0.5, "a query that shares its block"
    for k in (1, 5, 119):
        alone = nk.topk(packed_queries, packed, k, metric=metric, screen="never")
        for block in (None, 7):
            actual = nk.topk(packed_queries, packed, k, metric=metric, block=block)
            assert_same_bits(actual[1], alone[1], "indices")
            assert_same_bits(actual[0], alone[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_among_candidates(dtype: str) -> None:
    queries, documents = collection("exact_duplicates", dtype)
    candidates = np.stack([np.random.default_rng(i).permutation(60)[:20] for i in range(3)])
    expected = reference.topk(queries, documents, 8, candidates=candidates)
    actual = nk.topk(queries, documents, 8, candidates=candidates)
    assert_same_bits(actual[1], expected[1], "indices")
    assert_same_bits(actual[0], expected[0])
