"""Helpers of the suite: input generators, layouts, bit comparison, and exact arithmetic to judge the reference."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from numkong_py import reference

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
METRICS = ("dot", "cosine", "angular")
REDUCTIONS = ("sum", "mean")
LAYOUTS = ("one", "list", "offsets", "lengths", "mask", "pairs", "candidates")
TILE_EDGES = tuple(sorted({0, 1} | {tile + step for tile in (8, 16, 48) for step in (-1, 0, 1)}))
QUERY_EDGES = (0, 1, 7, 8, 9, 31, 32, 33, 70)
DEPTHS = (*range(1, 131), 384, 768, 1024)

# ------------------------------------------------------------------------------------------------ comparison


def bits(array: np.ndarray) -> np.ndarray:
    """The bytes of an array's elements, every NaN replaced by one NaN: what "the same bits" compares."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_same_bits(actual: Any, expected: Any, what: str = "scores") -> None:
    """Fail unless two arrays agree in dtype, shape and every bit (NaN payloads aside)."""
    assert isinstance(actual, np.ndarray), f"{what}: {type(actual)} is not an array"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    wrong = np.argwhere(bits(actual) != bits(expected))
    if len(wrong):
        place = tuple(int(i) for i in wrong[0])
        values = f"{actual[place]!r}, expected {expected[place]!r}"
        raise AssertionError(f"{what}: {len(wrong)} of {actual.size} differ, first at {place}: {values}")


def assert_same_result(actual: Any, expected: Any) -> None:
    """Compare scores, argmax and token scores of two results; bounds have their own test."""
    assert_same_bits(actual.argmax, expected.argmax, "argmax")
    assert_same_bits(actual.token_scores, expected.token_scores, "token_scores")
    assert_same_bits(actual.scores, expected.scores, "scores")


# --------------------------------------------------------------------------------------------- exact numbers

_integers = np.frompyfunc(int, 1, 1)
_COSINE_BITS = 160


def _scaled(vectors: np.ndarray) -> np.ndarray:
    """Finite float32 (or narrower) elements as Python integers in units of 2^-149: nothing is rounded."""
    return _integers(vectors.astype(np.float64) * 2.0**149)


def exact_values(query: np.ndarray, document: np.ndarray, metric: str) -> tuple[np.ndarray, int]:
    """Pair values in exact integer arithmetic: (integers [query_count, document_count], one over their unit).

    Dots are exact. Cosines come from an integer square root and are right to 2^-160.
    """
    query, document = _scaled(query), _scaled(document)
    dots = query @ document.T
    if metric == "dot":
        return dots, 1 << 298
    one = 1 << _COSINE_BITS
    query_squares, document_squares = (query * query).sum(axis=1), (document * document).sum(axis=1)
    values = np.empty(dots.shape, object)
    for (i, j), dot in np.ndenumerate(dots):
        product = query_squares[i] * document_squares[j]
        cosine = math.isqrt((dot * dot << 2 * _COSINE_BITS) // product) if product else 0
        cosine = cosine if dot >= 0 else -cosine
        both_zero = query_squares[i] == 0 and document_squares[j] == 0
        values[i, j] = cosine if metric == "cosine" else 0 if both_zero else max(0, one - cosine)
    return values, one


def exact_best(values: np.ndarray, metric: str) -> list[int]:
    """The best of every row of `exact_values`."""
    return [min(row) if metric == "angular" else max(row) for row in values]


def pair_error(query: np.ndarray, document: np.ndarray, metric: str) -> list[Fraction]:
    """E_i: how far a pair value of query token i can be from the exact one, by the formula of docs/numerics.md."""
    depth = query.shape[1]
    slack = 1 + Fraction(1, 2**20)
    if metric == "dot":
        norms = np.sqrt((document.astype(np.float64) ** 2).sum(axis=1)).max()
        tokens = np.sqrt((query.astype(np.float64) ** 2).sum(axis=1))
        return [slack * Fraction(depth + 1, 2**53) * Fraction(float(t)) * Fraction(float(norms)) for t in tokens]
    return [slack * Fraction(2 * depth + 6 + (4 if metric == "angular" else 0), 2**53)] * len(query)


def assert_exact(query: np.ndarray, document: np.ndarray, metric: str, reduction: str, result: Any) -> None:
    """Hold one pair's score, bound and argmax against exact arithmetic (finite, non-empty input)."""
    score, argmax, bound = float(result.scores), np.asarray(result.argmax)[: len(query)], float(result.bounds)
    values, unit = exact_values(query, document, metric)
    best = exact_best(values, metric)
    total = Fraction(sum(best), unit * (len(query) if reduction == "mean" else 1))
    if np.isfinite(score):
        assert bound >= 0
        assert np.isinf(bound) or abs(Fraction(score) - total) <= Fraction(bound), (score, float(total), bound)
    else:
        assert np.isinf(bound)
    for i, error in enumerate(pair_error(query, document, metric)):
        loss = abs(best[i] - values[i, argmax[i]])
        assert Fraction(loss, unit) <= 2 * error, f"query token {i}: winner {argmax[i]} is {loss / unit} from the best"


# ------------------------------------------------------------------------------------------------------ data


def _random(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return rng.standard_normal((count, depth))


def _clustered(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    centroids = np.random.default_rng(depth).standard_normal((4, depth))
    return centroids[rng.integers(0, 4, count)] + 0.2 * rng.standard_normal((count, depth))


def _near_duplicates(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return np.random.default_rng(depth).standard_normal((1, depth)) * (1 + 1e-6 * rng.standard_normal((count, depth)))


def _exact_duplicates(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return np.random.default_rng(depth).standard_normal((3, depth))[rng.integers(0, 3, count)]


def _heavy_tailed(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return np.clip(rng.standard_cauchy((count, depth)) ** 3, -1e3, 1e3)


def _one_sided(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return -np.abs(rng.standard_normal((count, depth))) - 0.01


def _zeros(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    values = rng.standard_normal((count, depth))
    values[rng.random(count) < 0.5] = 0.0
    return values * rng.choice([1.0, -1.0], (count, 1))


def _one_hot(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return np.eye(depth)[rng.integers(0, depth, count)] * rng.choice([-1.0, 1.0, 2.0], (count, 1))


def _small_integers(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return rng.integers(-2, 3, (count, depth)).astype(float)


def _dequantised(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return rng.integers(-127, 128, (count, depth)) * np.exp2(rng.uniform(-9, 0, (count, 1)))


def _huge(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return rng.standard_normal((count, depth)) * min(1e20, top / 16)


def _tiny(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return rng.standard_normal((count, depth)) * (1e-35 if top > 1e5 else 1e-6)


def _subnormal(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    return rng.integers(-9, 10, (count, depth)) * (1e-39 if top > 1e5 else 2.0**-24)


def _mixed_scales(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    reach = 35 if top > 1e5 else 4
    return rng.standard_normal((count, depth)) * 10.0 ** rng.integers(-reach, reach + 1, (count, 1))


def _extremes(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    smallest = 1e-40 if top > 1e5 else 2.0**-24
    return rng.choice([top, -top, smallest, -smallest, 1.0, -1.0, 0.0, -0.0], (count, depth))


def _outlier_dimension(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    values = rng.standard_normal((count, depth))
    values[:, depth // 2] += 300.0
    return values


def _some(value: float) -> Any:
    def kind(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
        values = rng.standard_normal((count, depth))
        values[rng.random((count, depth)) < 1 / (16 * depth)] = value
        return values

    return kind


def _infinities(rng: np.random.Generator, count: int, depth: int, top: float) -> np.ndarray:
    values = rng.standard_normal((count, depth))
    hit = rng.random((count, depth)) < 1 / (8 * depth)
    values[hit] = rng.choice([np.inf, -np.inf], hit.sum())
    return values


KINDS = {
    "random": _random,
    "clustered": _clustered,
    "near_duplicates": _near_duplicates,
    "exact_duplicates": _exact_duplicates,
    "heavy_tailed": _heavy_tailed,
    "one_sided": _one_sided,
    "zeros": _zeros,
    "one_hot": _one_hot,
    "small_integers": _small_integers,
    "dequantised": _dequantised,
    "huge": _huge,
    "tiny": _tiny,
    "subnormal": _subnormal,
    "mixed_scales": _mixed_scales,
    "extremes": _extremes,
    "outlier_dimension": _outlier_dimension,
    "infinities": _infinities,
    "nan": _some(np.nan),
}
NON_FINITE_KINDS = ("infinities", "nan")
FINITE_KINDS = tuple(kind for kind in KINDS if kind not in NON_FINITE_KINDS)


def tokens(kind: str, dtype: str, count: int, depth: int, seed: int, *, flip: bool = False) -> np.ndarray:
    """Token vectors ``[count, depth]`` of a kind; `flip` negates them (one-sided kinds then meet all-negative)."""
    top = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    values = KINDS[kind](np.random.default_rng([seed, count, depth]), count, depth, top)
    with np.errstate(all="ignore"):
        return (-values if flip else values).astype(DTYPES[dtype])


# --------------------------------------------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Layout:
    """An array in some layout with its keywords for `nk.pack`, `nk.collection` and `reference.sets`."""

    x: Any
    keywords: dict[str, Any]


def lay_out(parts: list[np.ndarray], layout: str, seed: int = 0) -> Layout:
    """Put token sets into a layout; padding and holes are filled with NaN, infinities, big and ordinary numbers."""
    dtype, depth = parts[0].dtype, parts[0].shape[1]
    counts = np.array([len(part) for part in parts])
    if layout in ("list", "pairs", "candidates"):
        return Layout(list(parts), {})
    if layout == "one":
        return Layout(parts[0], {})
    if layout == "offsets":
        return Layout(np.concatenate(parts), {"offsets": np.cumsum([0, *counts]).astype(np.int64)})
    rng = np.random.default_rng(seed)
    longest = max(1, int(counts.max()) + int(rng.integers(0, 4)))
    padded = rng.choice([0.0, 1e4, np.inf, -np.inf, np.nan, 1.0], (len(parts), longest, depth)).astype(dtype)
    mask = np.zeros((len(parts), longest), bool)
    for b, part in enumerate(parts):
        places = np.arange(len(part)) if layout == "lengths" else np.sort(rng.permutation(longest)[: len(part)])
        padded[b, places] = part
        mask[b, places] = True
    return Layout(padded, {"lengths": counts} if layout == "lengths" else {"mask": mask})


def read(layout: Layout) -> reference.Sets:
    """The token sets of a layout, for the reference."""
    return reference.sets(layout.x, **layout.keywords)


# ------------------------------------------------------------------------------------------------------ rows


def layout_ids() -> dict[str, int]:
    """Row name to layout id, read from the one table of CPU rows."""
    table = (ROOT / "include" / "numkong" / "backends.inc").read_text()
    return {name: int(layout) for name, layout in re.findall(r"^NK_BACKEND\((\w+), \w+, (\d+),", table, re.MULTILINE)}


def header_layout_id(packed: Any) -> int:
    """The layout id in a packed buffer's bytes: a little-endian u32 after the magic and the version."""
    return int.from_bytes(bytes(memoryview(packed_bytes(packed))[12:16]), "little")


def packed_bytes(packed: Any) -> np.ndarray:
    """The buffer of a PackedTensor as bytes."""
    return np.asarray(packed.buffer).view(np.uint8).reshape(-1)
