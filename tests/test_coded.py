"""Coded packings (approximate precisions) on every CPU row: the reference's bits, within the stated bounds."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from oracle import (
    DTYPES,
    KINDS,
    LAYOUTS,
    METRICS,
    QUERY_EDGES,
    REDUCTIONS,
    TILE_EDGES,
    assert_same_bits,
    assert_same_result,
    header_layout_id,
    lay_out,
    layout_ids,
    read,
    tokens,
)
from test_conformance import EVERYTHING, ROW_AND_DTYPE, ROWS, Case, call, deck, inputs, need, pack

import numkong_py as nk
from numkong_py import reference
from numkong_py.coded import regions
from numkong_py.layout import Coding
from numkong_py.packed import pack_collection

QUERY_LIMITS = {"haswell": 63}  # elsewhere 127
CODED = ("int8", "fp8", "binary", "residual")
DEPTHS = (*range(1, 131), 384, 1024)


@cache
def coding(precision: str, depth: int) -> dict[str, Any]:
    """Options of `pack` and of the reference; of residual, a codebook with 1, 2, 4 or 8 bits, in turn by depth."""
    if precision != "residual":
        return {"precision": precision}
    rng = np.random.default_rng(depth)
    bits = (1, 2, 4, 8)[depth % 4 if depth % 2 else depth // 2 % 4]
    weights = np.sort(rng.normal(0, 0.3, 1 << bits)).astype(np.float32)
    return {"precision": precision, "codebook": nk.Codebook(rng.normal(0, 1, (5, depth)), weights)}


def limit_of(row: str) -> int:
    return QUERY_LIMITS.get(row, 127)


def cases() -> list[tuple[str, Case]]:
    """Every depth for every precision; dtype, layout x kind, metric x reduction and counts are dealt from decks."""
    rng = np.random.default_rng(21)
    dtypes, layouts, options = deck(rng, DTYPES), deck(rng, LAYOUTS, KINDS), deck(rng, METRICS, REDUCTIONS)
    counts = deck(rng, QUERY_EDGES)
    dealt = []
    for seed, (precision, depth) in enumerate(itertools.product(CODED, DEPTHS)):
        layout, kind = next(layouts)
        documents = tuple(int(count) for count in rng.permutation(TILE_EDGES))
        queries = tuple(next(counts)[0] for _ in (documents if layout == "pairs" else range(3)))
        if layout == "one":
            queries, documents = queries[:1], documents[:1]
        case = Case(next(dtypes)[0], layout, kind, *next(options), depth, queries, documents, 5000 + seed)
        dealt.append((precision, case))
    return dealt


CASES = [pytest.param(p, c, r, id=f"{p}-{c}-{r}") for p, c in cases() for r in ROWS]


@pytest.mark.parametrize(("precision", "case", "row"), CASES)
def test_same_bits_as_the_reference(precision: str, case: Case, row: str) -> None:
    need(row, case.dtype)
    queries, documents, candidates = inputs(case)
    expected = call(
        reference, case, read(queries), read(documents), candidates,
        **coding(precision, case.depth), query_limit=limit_of(row), **EVERYTHING,
    )  # fmt: skip
    packed, asked = pack(documents, row, **coding(precision, case.depth)), pack(queries, row)
    assert packed.precision == precision
    actual = call(nk, case, asked, packed, candidates, **EVERYTHING)
    assert_same_result(actual, expected)
    assert_same_bits(call(nk, case, asked, packed, candidates), expected.scores)
    assert_bounds_follow_the_formula(actual.bounds, expected.bounds)
    exact = call(reference, case, widened(read(queries)), widened(read(documents)), candidates)
    assert_within_bounds(actual, exact)


def widened(x: Any) -> reference.Sets:
    """The same tokens in float32, whose exact scores are float64: not rounded to the float32 of 16-bit types."""
    found = reference.sets(x)
    return replace(found, tokens=found.tokens.astype(np.float32))


def assert_bounds_follow_the_formula(actual: np.ndarray, expected: np.ndarray) -> None:
    """A bound is at least the formula's, and hardly above it.

    Residuals are found in float32: they may be above by 2^-24 of a scale, a 63rd of the norm, on either side, which is
    0.4 % of the rounding term of 2^-21; and by (depth + 64) 2^-24 of themselves. One past float32's range is infinite.
    """
    assert actual.shape == expected.shape and actual.dtype == np.float64
    assert np.all(actual >= expected * (1 - 2.0**-20)), "a bound is below the formula"
    assert np.all((actual <= expected * 1.005 + 2.0**-100) | (expected > 2.0**127)), "a bound is far above the formula"


def assert_within_bounds(actual: Any, exact: np.ndarray) -> None:
    """Scores are as near to the exact ones as they say; where one is not finite, so is the other, or its bound."""
    with np.errstate(invalid="ignore"):
        near = np.abs(actual.scores.astype(np.float64) - exact.astype(np.float64)) <= actual.bounds
    same = (actual.scores == exact) | np.isinf(actual.bounds)
    assert np.all(near | same)


@pytest.mark.parametrize("precision", CODED)
def test_serial_and_the_other_rows_agree_to_the_bit(precision: str) -> None:
    """All rows do for fp8; those with queries of 8 bits for int8."""
    query, documents = tokens("random", "f32", 40, 96, 1), [tokens("random", "f32", n, 96, n) for n in (3, 0, 70, 900)]
    rows = [row for row in ROWS if ROWS[row].available and "f32" in ROWS[row].dtypes]
    rows = [row for row in rows if precision == "fp8" or limit_of(row) == 127]
    results = [nk.maxsim(query, nk.pack(documents, **coding(precision, 96), backend=row), **EVERYTHING) for row in rows]
    assert "serial" in rows
    for result in results:
        assert_same_result(result, results[-1])


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_unpack_gives_what_the_codes_stand_for(row: str, dtype: str, precision: str) -> None:
    need(row, dtype)
    for kind, depth in itertools.product(KINDS, (1, 7, 64, 129)):
        documents = [tokens(kind, dtype, count, depth, count) for count in (3, 0, 17, 1)]
        packed = pack(lay_out(documents, "mask", 3), row, **coding(precision, depth))
        expected = reference.decoded(np.concatenate(documents), **coding(precision, depth))
        assert_same_bits(np.concatenate(packed.unpack()), expected)
        assert packed.dtype == dtype and packed.precision == precision and f"{precision}, row" in repr(packed)


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_ranges_and_gathers_keep_codes_and_bounds(row: str, dtype: str, precision: str, tmp_path: Path) -> None:
    need(row, dtype)
    documents = [tokens("random", dtype, count, 37, count) for count in (3, 0, 17, 1, 70)]
    query = pack(tokens("random", dtype, 5, 37, 9), row)
    packed = pack(documents, row, **coding(precision, 37))
    whole = nk.maxsim(query, packed, **EVERYTHING)
    packed.save(tmp_path / "whole.safetensors")
    packed[1:4].save(tmp_path / "part.safetensors")
    views: dict[str, tuple[Callable[[], Any], Any]] = {
        "range": (lambda: packed[1:4], slice(1, 4)),
        "gather": (lambda: packed[[4, 0, 4]], [4, 0, 4]),
        "gather of a range": (lambda: packed[1:][[2, -1]], [3, 4]),
        "steps": (lambda: packed[::-2], [4, 2, 0]),
        "pickled": (lambda: pickle.loads(pickle.dumps(packed)), slice(None)),
        "pickled range": (lambda: pickle.loads(pickle.dumps(packed[2:])), slice(2, None)),
        "copied": (lambda: copy.deepcopy(packed), slice(None)),
        "saved": (lambda: nk.open(tmp_path / "whole.safetensors", verify="full"), slice(None)),
        "saved range": (lambda: nk.open(tmp_path / "part.safetensors"), slice(1, 4)),
    }
    for name, (view, sets) in views.items():
        part = view()
        assert part.precision == precision, name
        result = nk.maxsim(query, part, **EVERYTHING)
        assert_same_result(result, type(whole)(*(array[sets] for array in whole)))
        assert np.array_equal(result.bounds, whole.bounds[sets]), name


@pytest.mark.parametrize("precision", CODED)
def test_rows_exchange_codes_to_the_bit(precision: str) -> None:
    documents = [tokens("random", "f32", count, 50, count) for count in (3, 0, 17, 1, 70)]
    rows = [row for row in ROWS if ROWS[row].available and "f32" in ROWS[row].dtypes]
    packs = {row: nk.pack(documents, **coding(precision, 50), backend=row) for row in rows}
    for source, target in itertools.product(rows, rows):
        moved = packs[source].to(target)
        assert moved.backend == target and header_layout_id(moved) == layout_ids()[target]
        sides = [regions(packed.buffer, precision) for packed in (moved, packs[target])]
        for name in ("header", "offsets", "scale", "inverse_norm", "plane", "ids", "codebook"):
            assert np.array_equal(*(getattr(side, name) for side in sides)), name
        assert np.array_equal(sides[0].documents, regions(packs[source].buffer, precision).documents)


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_a_pair_scores_the_same_in_any_company(row: str, dtype: str, precision: str) -> None:
    """Alone, among documents that fill several windows, in lists, with many queries, and on several threads."""
    need(row, dtype)
    lengths = (5, 0, 300, 900, 64, 1, 769, 33)
    documents = [tokens("random", dtype, count, 8, count) for count in lengths]
    queries = [tokens("random", dtype, count, 8, 90 + count) for count in (1, 40, 0, 32, 1100, 1100)]
    packed, together = pack(documents, row, **coding(precision, 8)), pack(queries, row)
    for metric, asked in (("dot", together), ("cosine", together[:4]), ("angular", together[:4])):
        options = {"metric": metric, **EVERYTHING}
        whole = nk.maxsim(asked, packed, **options)
        for s, b in itertools.product(range(4), range(len(documents))):
            alone = nk.maxsim(asked[s], packed[b], **options)
            assert_same_bits(alone.scores, whole.scores[s, b : b + 1])
            assert_same_bits(alone.argmax[0], whole.argmax[s, b, : len(queries[s])], "argmax")
        assert_same_result(nk.maxsim(asked, packed, threads=3, **options), whole)
        candidates = np.random.default_rng(1).integers(0, len(lengths), (len(asked), 5))
        listed = nk.maxsim_candidates(asked, packed, candidates, **options)
        assert_same_bits(listed.scores, np.take_along_axis(whole.scores, candidates, axis=1))
        assert np.array_equal(listed.bounds, np.take_along_axis(whole.bounds, candidates, axis=1))
    one = reference.maxsim(queries[1], documents, **coding(precision, 8), query_limit=limit_of(row), **EVERYTHING)
    assert_same_bits(nk.maxsim(together[1], packed), one.scores)


@pytest.mark.parametrize("row", ROWS)
def test_nothing_wraps_or_saturates(row: str) -> None:
    """Codes of the largest magnitude and of one sign, up to the largest depth."""
    need(row, "f32")
    for depth in (4, 64, 1000, 131072):
        signs = np.array([[1.0], [-1.0]], np.float32)
        x = np.concatenate([signs * np.ones(depth), signs * np.resize([1, -1], depth), -128 * np.ones((1, depth))])
        x = x.astype(np.float32)
        packed = pack(x, row, precision="int8")
        for query in x:
            result = nk.maxsim(pack(query[None], row), packed, **EVERYTHING)
            exact = (x.astype(np.float64) @ query.astype(np.float64)).max()
            norms = np.linalg.norm(query.astype(np.float64)) * 128 * depth**0.5
            assert abs(result.scores[0] - exact) <= result.bounds[0] <= 2.0**-20 * norms
            assert_same_bits(
                result.scores, reference.maxsim(query[None], x, precision="int8", query_limit=limit_of(row))
            )


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize("row", ROWS)
def test_largest_numbers_stay_finite(row: str, precision: str) -> None:
    """Products past float32 are no infinity before the score is rounded: opposite ones do not meet as NaN."""
    need(row, "f32")
    top = np.finfo(np.float32).max
    x = np.float32([[top, top], [top, -top / 3], [1e-24, 0]])
    packed = pack(x, row, **coding(precision, 2))
    assert np.isfinite(packed.unpack()).all()
    small, large = np.float32([[1e-20, 1e-20], [-1e-21, 0]]), np.float32([[top, top], [-top, -top]])
    result = nk.maxsim(pack(small, row), packed, **EVERYTHING)
    assert np.isfinite(result.scores).all() and np.isfinite(result.bounds).all()
    assert_within_bounds(result, reference.maxsim(small, x))
    assert nk.maxsim(pack(large, row), packed)[0] == np.inf, "2 top^2, and the negative one against 1e-24"


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize("row", ROWS)
def test_nan_stays_where_it_is(row: str, precision: str) -> None:
    need(row, "f32")
    documents = [tokens("random", "f32", count, 24, count) for count in (5, 40, 3)]
    queries = [tokens("random", "f32", count, 24, 50 + count) for count in (2, 33)]
    clean = nk.maxsim(pack(queries, row), pack(documents, row, **coding(precision, 24)))
    for value, (side, index) in itertools.product((np.nan, np.inf, -np.inf), ((0, 1), (1, 1))):
        dirty = [[part.copy() for part in parts] for parts in (queries, documents)]
        dirty[side][index][1, 7] = value
        result = nk.maxsim(pack(dirty[0], row), pack(dirty[1], row, **coding(precision, 24)), **EVERYTHING)
        touched = np.zeros(clean.shape, bool)
        touched[(index,) if side == 0 else (slice(None), index)] = True
        assert np.isnan(result.scores[touched]).all() and np.isinf(result.bounds[touched]).all()
        assert_same_bits(result.scores[~touched], clean[~touched])
        if side == 1:
            assert (result.argmax[0, index, :2] == 1).all(), "the NaN token"


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize("row", ROWS)
def test_coded_queries_are_their_decoded_tokens(row: str, precision: str) -> None:
    """Scores are those of the decoded queries; bounds reach to the vectors that were coded."""
    need(row, "f32")
    queries = [tokens("random", "f32", count, 40, 50 + count) for count in (2, 0, 33)]
    documents = [tokens("random", "f32", count, 40, count) for count in (5, 0, 40, 3)]
    coded, packed = pack(queries, row, **coding(precision, 40)), pack(documents, row, **coding(precision, 40))
    for metric in METRICS:
        actual = nk.maxsim(coded, packed, metric=metric, **EVERYTHING)
        if precision == "binary":  # signs meet signs
            limit = {"precision": precision, "query_limit": 1}
            decoded = reference.maxsim(coded.unpack(), documents, metric=metric, **limit, **EVERYTHING)
        else:
            decoded = nk.maxsim(pack(coded.unpack(), row), packed, metric=metric, **EVERYTHING)
        assert_same_result(actual, decoded)
        assert (actual.bounds >= decoded.bounds).all()
        assert_within_bounds(actual, reference.maxsim(queries, documents, metric=metric))


@pytest.mark.parametrize("row", ROWS)
def test_signs_against_signs_at_every_depth(row: str) -> None:
    """Binary queries: every depth, zero and NaN tokens, numbers of queries that fill no group, several windows."""
    need(row, "f32")
    for depth in (*DEPTHS, 131072):
        rng = np.random.default_rng(depth)
        longest = 3 if depth > 2000 else 1700 if depth % 40 == 7 else 70
        queries = [tokens("random", "f32", count, depth, 50 + count) for count in (1, 5, 35)]
        documents = [tokens("random", "f32", count, depth, count) for count in (longest, 0, 2, 64)]
        queries[1][3], documents[0][1], documents[2][0] = 0, 0, np.nan
        metric, limit = str(rng.choice(METRICS)), {"precision": "binary", "query_limit": 1}
        coded = pack(queries, row, precision="binary")
        actual = nk.maxsim(coded, pack(documents, row, precision="binary"), metric=metric, **EVERYTHING)
        decoded = [reference.decoded(query, "binary") for query in queries]
        expected = reference.maxsim(decoded, documents, metric=metric, **limit, **EVERYTHING)
        assert_same_result(actual, expected)
        assert_within_bounds(actual, reference.maxsim(queries, documents, metric=metric))


@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_normalize_comes_before_the_codes(row: str, dtype: str) -> None:
    need(row, dtype)
    x, query = tokens("mixed_scales", dtype, 17, 21, 1), pack(tokens("random", dtype, 3, 21, 2), row)
    actual, expected = (
        nk.maxsim(query, packed, **EVERYTHING)
        for packed in (
            pack(x, row, precision="int8", normalize=True),
            pack(reference.normalized(x), row, precision="int8"),
        )
    )
    assert_same_result(actual, expected)
    assert np.array_equal(actual.bounds, expected.bounds)


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize("kind", ["random", "exact_duplicates", "nan", "zeros"])
@pytest.mark.parametrize("row", ROWS)
def test_topk_is_the_sorted_full_matrix(row: str, kind: str, precision: str) -> None:
    need(row, "f32")
    queries = [tokens(kind, "f32", count, 24, 100 + count) for count in (3, 32, 40)]
    documents = [tokens(kind, "f32", count, 24, seed) for seed, count in enumerate([0, 5, 17, 1] * 15)]
    asked, packed = pack(queries, row), pack(documents, row, **coding(precision, 24))
    for metric, k in (("dot", 1), ("cosine", 7), ("angular", 60)):
        scores, indices = nk.topk(asked, packed, k, metric=metric)
        full = nk.maxsim(asked, packed, metric=metric)
        order = np.stack([reference.rank(row_, np.arange(60), metric)[:k] for row_ in full])
        assert_same_bits(indices, order, "indices")
        assert_same_bits(scores, np.take_along_axis(full, order, axis=1))
        again = nk.topk(asked, packed, k, metric=metric, block=11)
        assert_same_bits(again[1], indices, "indices")


# ---------------------------------------------------------------------------------------------- what is lost


def collections() -> dict[str, tuple[list[np.ndarray], list[np.ndarray]]]:
    """Queries and documents of the demo and of random numbers."""
    from numkong_py import demo  # here: copies of the package for mutants leave it out

    rng = np.random.default_rng(3)
    corpus = demo.load()
    return {
        "demo": (list(corpus.question_vectors), list(corpus.vectors)),
        "random": tuple(
            [rng.standard_normal((length, 128)).astype(np.float32) for length in rng.integers(8, most, count)]
            for most, count in ((33, 20), (90, 400))
        ),
    }


@pytest.mark.parametrize("name", ["demo", "random"])
@pytest.mark.parametrize(("precision", "least"), [("int8", 0.999), ("fp8", 0.999)])
def test_ranks_are_nearly_those_of_exact_scores(precision: str, least: float, name: str) -> None:
    queries, documents = collections()[name]
    exact = nk.maxsim(queries, documents)
    coded = nk.maxsim(queries, nk.pack(documents, precision=precision), return_bounds=True)
    assert (np.abs(coded.scores - exact) <= coded.bounds).all()
    for scores, approximate, bounds in zip(exact, coded.scores, coded.bounds, strict=True):
        assert spearman(scores, approximate) >= least
        best, found = (set(np.argsort(-values, kind="stable")[:20].tolist()) for values in (scores, approximate))
        for lost, won in itertools.product(best - found, found - best):  # an exchange needs a close pair
            assert scores[lost] - scores[won] <= 2 * max(bounds[lost], bounds[won])


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of the ranks of distinct scores."""
    ranks = [np.argsort(np.argsort(values, kind="stable")) for values in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


# ------------------------------------------------------------------------------------------------- the packing


@pytest.mark.parametrize("precision", CODED)
def test_files_of_other_rows_keep_their_codes(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a row that cannot run here is opened as the best row that can, codes to the bit."""
    documents = [tokens("random", "f32", count, 50, count) for count in (3, 0, 17, 1, 70)]
    names = [row for row in ROWS if ROWS[row].available and "f32" in ROWS[row].dtypes and row != "serial"]
    for name in names:
        nk.pack(documents, **coding(precision, documents[0].shape[1]), backend=name).save(tmp_path / name)
    wanted = {name: nk.open(tmp_path / name).to("serial") for name in names}
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "serial")
    for name in names:
        with pytest.warns(nk.RepackWarning, match=name):
            opened = nk.open(tmp_path / name)
        assert np.array_equal(opened.buffer, wanted[name].buffer)
    if not names:
        pytest.skip("this machine has one row only")


@pytest.mark.parametrize("precision", CODED)
def test_other_programs_get_what_the_codes_stand_for(precision: str, tmp_path: Path) -> None:
    documents = [tokens("random", "bf16", count, 24, count) for count in (3, 0, 17)]
    packed = nk.pack(documents, **coding(precision, documents[0].shape[1]))
    for suffix in (".npz", ".safetensors"):
        nk.write_tokens(packed, tmp_path / f"tokens{suffix}")
        again = nk.pack(nk.read_tokens(tmp_path / f"tokens{suffix}").sets)
        assert again.dtype == "f32"
        for part, expected in zip(again.unpack(), packed.unpack(), strict=True):
            assert_same_bits(part, expected)


def test_bytes_of_a_token() -> None:
    for precision, expected in (("int8", 136), ("fp8", 136), ("binary", 20)):
        size = [nk.pack_size(count, 128, "f32", precision=precision) for count in (0, 1 << 16)]
        assert (size[1] - size[0]) >> 16 == expected


def test_errors_name_what_came_and_the_fix() -> None:
    x = np.ones((3, 8), np.float32)
    coded = nk.pack(x, precision="int8")
    with pytest.raises(nk.InvalidArgument, match="precision: 'int4', wanted one of 'exact', 'int8'"):
        nk.pack(x, precision="int4")
    with pytest.raises(nk.MissingKernel, match="precision: 'int8' has CPU rows only, and this is for cuda:1"):
        nk.pack(x, precision="int8", device="cuda:1")
    device_row = SimpleNamespace(device="cuda", name="sm90")
    with pytest.raises(nk.MissingKernel, match="precision: 'int8' has CPU rows only, and this is for cuda"):
        pack_collection(nk.collection(x), device_row, device="cuda", coding=Coding("int8"))
    with pytest.raises(nk.UnsupportedDtype, match=r"q: f16, and docs: f32"):
        nk.maxsim(x.astype(np.float16), coded)
    with pytest.raises(nk.ShapeMismatch, match=r"depth 131073.*131072.*exact"):
        nk.pack(np.ones((1, 131073), np.float32), precision="int8")
    with pytest.raises(nk.LayoutMismatch, match="q: packed with precision 'int8', and docs: exact"):
        nk.maxsim(coded, nk.pack(x))
    with pytest.raises(nk.LayoutMismatch, match="q: packed with precision 'int8', and docs: exact"):
        nk.maxsim(coded, x)
    with pytest.raises(nk.InvalidArgument, match="document 0 has a NaN or an infinity in its valid token 1"):
        nk.pack(np.float32([[1, 2], [np.nan, 1]]), precision="int8", check_finite=True)
    with pytest.raises(nk.InvalidArgument, match="p: packed with precision 'int8'"):
        nk.chamfer(coded, coded)
