"""Coded packings (approximate precisions) on every CPU row: the reference's bits, within the stated bounds."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
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

QUERY_LIMITS = {"haswell": 63}  # elsewhere 127
CODED = ("int8",)
DEPTHS = (*range(1, 131), 384, 1024)


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
        precision=precision, query_limit=limit_of(row), **EVERYTHING,
    )  # fmt: skip
    packed, asked = pack(documents, row, precision=precision), pack(queries, row)
    assert packed.precision == precision
    actual = call(nk, case, asked, packed, candidates, **EVERYTHING)
    assert_same_result(actual, expected)
    assert_same_bits(call(nk, case, asked, packed, candidates), expected.scores)
    assert_bounds_follow_the_formula(actual.bounds, expected.bounds)
    exact = call(reference, case, read(queries), read(documents), candidates)
    assert_within_bounds(actual, exact)


def assert_bounds_follow_the_formula(actual: np.ndarray, expected: np.ndarray) -> None:
    """A bound is at least the formula's, and hardly above it.

    Residuals are found in float32: they may be above by 2^-24 of a scale, a 63rd of the norm, on either side, which is
    0.4 % of the rounding term of 2^-21; and by (depth + 64) 2^-24 of themselves.
    """
    assert actual.shape == expected.shape and actual.dtype == np.float64
    assert np.all(actual >= expected * (1 - 2.0**-20)), "a bound is below the formula"
    assert np.all((actual <= expected * 1.005 + 2.0**-100) | (expected == np.inf)), "a bound is far above the formula"


def assert_within_bounds(actual: Any, exact: np.ndarray) -> None:
    """Scores are as near to the exact ones as they say; where one is not finite, so is the other, or its bound."""
    with np.errstate(invalid="ignore"):
        near = np.abs(actual.scores.astype(np.float64) - exact.astype(np.float64)) <= actual.bounds
    same = (actual.scores == exact) | np.isinf(actual.bounds)
    assert np.all(near | same)


def test_serial_and_the_other_rows_of_limit_127_agree_to_the_bit() -> None:
    query, documents = tokens("random", "f32", 40, 96, 1), [tokens("random", "f32", n, 96, n) for n in (3, 0, 70, 900)]
    rows = [row for row in ROWS if ROWS[row].available and limit_of(row) == 127 and "f32" in ROWS[row].dtypes]
    results = [nk.maxsim(query, nk.pack(documents, precision="int8", backend=row), **EVERYTHING) for row in rows]
    assert "serial" in rows
    for result in results:
        assert_same_result(result, results[-1])


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_unpack_gives_what_the_codes_stand_for(row: str, dtype: str, precision: str) -> None:
    need(row, dtype)
    for kind, depth in itertools.product(KINDS, (1, 7, 64, 129)):
        documents = [tokens(kind, dtype, count, depth, count) for count in (3, 0, 17, 1)]
        packed = pack(lay_out(documents, "mask", 3), row, precision=precision)
        expected = reference.decoded(np.concatenate(documents), precision)
        assert_same_bits(np.concatenate(packed.unpack()), expected)
        assert packed.dtype == dtype and packed.precision == precision and f"{precision}, row" in repr(packed)


@pytest.mark.parametrize("precision", CODED)
@pytest.mark.parametrize(("row", "dtype"), ROW_AND_DTYPE)
def test_ranges_and_gathers_keep_codes_and_bounds(row: str, dtype: str, precision: str, tmp_path: Path) -> None:
    need(row, dtype)
    documents = [tokens("random", dtype, count, 37, count) for count in (3, 0, 17, 1, 70)]
    query = pack(tokens("random", dtype, 5, 37, 9), row)
    packed = pack(documents, row, precision=precision)
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
    packs = {row: nk.pack(documents, precision=precision, backend=row) for row in rows}
    for source, target in itertools.product(rows, rows):
        moved = packs[source].to(target)
        assert moved.backend == target and header_layout_id(moved) == layout_ids()[target]
        sides = [regions(packed.buffer, precision) for packed in (moved, packs[target])]
        for name in ("header", "offsets", "scale", "inverse_norm", "plane", "ids", "codebook"):
            assert np.array_equal(*(getattr(side, name) for side in sides)), name
        assert np.array_equal(sides[0].documents, regions(packs[source].buffer, precision).documents)


def test_bytes_of_a_token() -> None:
    for precision, expected in (("int8", 136),):
        size = [nk.pack_size(count, 128, "f32", precision=precision) for count in (0, 1 << 16)]
        assert (size[1] - size[0]) >> 16 == expected


def test_errors_name_what_came_and_the_fix() -> None:
    x = np.ones((3, 8), np.float32)
    coded = nk.pack(x, precision="int8")
    with pytest.raises(nk.InvalidArgument, match="precision: 'int4', wanted one of 'exact', 'int8'"):
        nk.pack(x, precision="int4")
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
