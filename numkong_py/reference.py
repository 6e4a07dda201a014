"""MaxSim, its gradient and the Chamfer distance in readable float64 NumPy: the definition, and the oracle of the tests.

Nothing here is fast. Every other implementation must return what this one returns: the same bits where the pair value
is the float64 dot (every CPU row), a value within the stated bound elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = [
    "MaxSimResult",
    "Sets",
    "binary_codes",
    "chamfer",
    "chamfer_grad",
    "decoded",
    "fp8_codes",
    "int8_codes",
    "maxsim",
    "maxsim_candidates",
    "maxsim_grad",
    "maxsim_pairs",
    "normalized",
    "pair_values",
    "residual_codes",
    "rounded",
    "sets",
    "squares_of",
    "topk",
]

LANES = 16
LEAST_CODED = 2.0**-80  # tokens without a larger element are coded as zero
LEAST_SCALE = 2.0**-87  # and, where the scale is no largest element over a limit, those with a smaller scale
EMPTY_DOCUMENT = {"dot": -np.inf, "cosine": -np.inf, "angular": np.inf}
REDUCTIONS = ("sum", "mean")


class MaxSimResult(NamedTuple):
    """Scores and whatever else was asked for; the rest is None."""

    scores: np.ndarray
    argmax: np.ndarray | None
    token_scores: np.ndarray | None
    bounds: np.ndarray | None


# --------------------------------------------------------------------------------------------- token sets


@dataclass(frozen=True)
class Sets:
    """A ragged collection of token sets: what every accepted layout becomes once its invalid tokens are removed."""

    tokens: np.ndarray  # [total, depth], the valid tokens of all sets
    offsets: np.ndarray  # [count + 1], set b holds tokens offsets[b] .. offsets[b + 1]
    single: bool  # one 2-D array: results lose the leading axis when it is the query
    places: np.ndarray  # [total], where a valid token sits among the rows of the input layout
    shape: tuple[int, ...]  # of the input layout, which is also the layout of a gradient

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def restore(self, gradient: np.ndarray) -> np.ndarray:
        """Put one row per valid token back into the input layout; the places of invalid tokens hold +0."""
        rows = np.zeros((int(np.prod(self.shape[:-1])), self.shape[-1]), gradient.dtype)
        rows[self.places] = gradient
        return rows.reshape(self.shape)


def sets(x: Any, *, offsets: Any = None, lengths: Any = None, mask: Any = None) -> Sets:
    """Read any layout as token sets.

    Parameters
    ----------
    x : array or list of arrays
        ``[n, depth]`` (one set), a list of ``[n_i, depth]``, ``[total, depth]`` with `offsets`, or ``[count, longest,
        depth]`` with `lengths`, `mask` or neither (then every token is valid).
    offsets : int array, optional
        ``[count + 1]``, from 0 to ``total``.
    lengths : int array, optional
        ``[count]`` valid tokens at the start of every set.
    mask : bool array, optional
        ``[count, longest]``, or ``[n]`` for one set; true where a token is valid, holes allowed.

    Examples
    --------
    >>> padded = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    >>> sets(padded, mask=[[True, False, True], [False, False, False]]).offsets
    array([0, 2, 2])
    """
    if isinstance(x, Sets):
        return x
    if isinstance(x, (list, tuple)):
        tokens = np.concatenate([np.asarray(one) for one in x]) if len(x) else np.zeros((0, 0), np.float32)
        offsets = np.cumsum([0, *(len(one) for one in x)])
        return Sets(tokens, offsets, False, np.arange(len(tokens)), tokens.shape)
    x = np.asarray(x)
    if offsets is not None:
        return Sets(x, np.asarray(offsets), False, np.arange(len(x)), x.shape)
    valid = np.ones(x.shape[:-1], bool) if mask is None else np.asarray(mask).astype(bool)
    if lengths is not None:
        valid = np.arange(x.shape[1]) < np.asarray(lengths)[:, None]
    places = np.flatnonzero(valid)
    counts = np.atleast_1d(valid.sum(axis=-1))
    return Sets(x.reshape(-1, x.shape[-1])[places], np.cumsum([0, *counts]), x.ndim == 2, places, x.shape)


# ---------------------------------------------------------------------------------------- the pair value


def _fold(sums: np.ndarray) -> np.ndarray:
    """Add the sixteen lanes of the last axis in the fixed order +8, +4, +2, +1."""
    for width in (8, 4, 2, 1):
        sums = sums[..., :width] + sums[..., width:]
    return sums[..., 0]


def _lanes(vectors: np.ndarray) -> np.ndarray:
    """Lay float64 vectors out as [count, steps, lane]: element k is at step k // 16 of lane k mod 16.

    The tail is filled with +0. A lane starts from +0 and so never holds -0, which makes adding +0 * +0 change nothing.
    """
    vectors = np.asarray(vectors).astype(np.float64)
    count, depth = vectors.shape
    steps = -(-depth // LANES)
    padded = np.zeros((count, steps * LANES))
    padded[:, :depth] = vectors
    return padded.reshape(count, steps, LANES)


def _dots(query: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Dot of every query token with every document token in the fixed order: [query_count, document_count]."""
    query_lanes, document_lanes = _lanes(query), _lanes(document)
    sums = np.zeros((len(query_lanes), len(document_lanes), LANES))
    for step in range(query_lanes.shape[1]):
        sums += query_lanes[:, None, step] * document_lanes[None, :, step]
    return _fold(sums)


def squares_of(vectors: np.ndarray) -> np.ndarray:
    """Dot of every token with itself, in the same order: [count]."""
    lanes = _lanes(vectors)
    sums = np.zeros((len(lanes), LANES))
    for step in range(lanes.shape[1]):
        sums += lanes[:, step] * lanes[:, step]
    return _fold(sums)


def pair_values(query: np.ndarray, document: np.ndarray, metric: str = "dot") -> np.ndarray:
    """Give the value C of every pair of tokens, to the bit.

    Products are taken in float64, where those of two float32 (or narrower) numbers are exact; element k is added, in
    order, to lane k mod 16 of sixteen sums that start from +0, and the lanes are folded by +8, +4, +2, +1. Cosine is
    dot / sqrt(square * square) clamped to [-1, 1], 0 when a vector is zero; angular is max(0, 1 - cosine), 0 when both
    are. A NaN element always gives NaN.

    Parameters
    ----------
    query, document : array
        ``[query_count, depth]`` and ``[document_count, depth]``, any floating dtype.
    metric : {"dot", "cosine", "angular"}

    Returns
    -------
    array
        float64 ``[query_count, document_count]``.

    Examples
    --------
    >>> pair_values(np.float32([[3, 4]]), np.float32([[3, 4], [0, 0], [-4, 3]]), "angular")
    array([[0., 1., 1.]])
    """
    if metric not in EMPTY_DOCUMENT:
        raise ValueError(f"metric must be one of {sorted(EMPTY_DOCUMENT)}, got {metric!r}")
    with np.errstate(all="ignore"):
        dots = _dots(query, document)
        if metric == "dot":
            return dots
        query_squares, document_squares = squares_of(query)[:, None], squares_of(document)[None, :]
        either_zero = (query_squares == 0) | (document_squares == 0)
        both_zero = (query_squares == 0) & (document_squares == 0)
        has_nan = np.isnan(query_squares) | np.isnan(document_squares)
        cosines = np.clip(dots / np.sqrt(query_squares * document_squares), -1.0, 1.0)
        cosines = np.where(either_zero & ~has_nan, 0.0, cosines)
        if metric == "cosine":
            return cosines
        return np.where(both_zero, 0.0, np.maximum(0.0, 1.0 - cosines))


def rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round float64 values to a dtype, once: a cast to bfloat16 may go through float32 and round twice.

    So the way to float32 is rounded to odd (an inexact result gets an odd last bit), after which rounding to fewer bits
    cannot see a tie that was none.
    """
    near = values.astype(np.float32)
    toward_zero = np.where(np.abs(near) > np.abs(values), np.nextafter(near, np.float32(0)), near)
    odd = (toward_zero.view(np.uint32) | (toward_zero != values)).view(np.float32)
    return (near if dtype == np.float32 else odd).astype(dtype)


def normalized(x: np.ndarray) -> np.ndarray:
    """Divide every token by its norm, rounded once to the dtype of `x`; zero and non-finite tokens stay as they are.

    Takes and returns ``[n, depth]``.

    Examples
    --------
    >>> normalized(np.float32([[3, 4], [0, 0]]))
    array([[0.6, 0.8],
           [0. , 0. ]], dtype=float32)
    """
    with np.errstate(all="ignore"):
        norms = np.sqrt(squares_of(x))[:, None]
        units = x.astype(np.float64) / norms
    return np.where((norms > 0) & (norms < np.inf), rounded(units, x.dtype), x)


# ---------------------------------------------------------------------------------------------- coded tokens


def _scales(largest: np.ndarray, limit: float) -> np.ndarray:
    """Largest magnitudes over the limit in float32, 0 below LEAST_CODED; limit x scale stays finite."""
    top = float(np.finfo(np.float32).max) / limit * (1 - 2.0**-23)
    most = np.float32(top)
    most = np.nextafter(most, np.float32(np.inf)) if float(most) < top else most
    scales = np.minimum(largest.astype(np.float32) / np.float32(limit), most)
    return np.where(largest < LEAST_CODED, np.float32(0), scales)


def int8_codes(x: np.ndarray, limit: int = 127) -> tuple[np.ndarray, np.ndarray]:
    """Code every token as float32 scale x integers in [-limit, limit].

    ``scale = max|x| / limit`` and ``code = round(x (1 / scale))``, every operation rounded to float32 once, to nearest
    even. A token with a NaN or an infinity has scale NaN and zero codes, one without an element of 2^-80 scale 0.

    Parameters
    ----------
    x : array
        ``[count, depth]``, any floating dtype.
    limit : int
        127, or the row's limit for queries.

    Returns
    -------
    codes, scales : arrays
        float64 ``[count, depth]`` and float32 ``[count]``.

    Examples
    --------
    >>> int8_codes(np.float32([[127, -63.6, 0.4], [0, 0, 0]]))
    (array([[127., -64.,   0.],
           [  0.,   0.,   0.]]), array([1., 0.], dtype=float32))
    """
    x = np.asarray(x).astype(np.float32)
    finite = np.isfinite(x).all(axis=1)
    with np.errstate(all="ignore"):
        scales = _scales(np.abs(x).max(axis=1, initial=0), limit)
        codes = np.clip(np.rint(x * (np.float32(1) / scales)[:, None]), -limit, limit).astype(np.float64)
    codes = np.where((finite & (scales > 0))[:, None], codes, 0.0) + 0.0  # no -0
    return codes, np.where(finite, scales, np.float32(np.nan))


def fp8_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Code every token as float32 scale x e4m3 numbers (OCP FP8, finite, up to 448), as `int8_codes` does.

    Examples
    --------
    >>> fp8_codes(np.float32([[448, -17, 3]]))
    (array([[448., -16.,   3.]]), array([1.], dtype=float32))
    """
    x = np.asarray(x).astype(np.float32)
    finite = np.isfinite(x).all(axis=1)
    with np.errstate(all="ignore"):
        scales = _scales(np.abs(x).max(axis=1, initial=0), 448)
        codes = (x * (np.float32(1) / scales)[:, None]).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    codes = np.where((finite & (scales > 0))[:, None], codes, 0.0)
    return codes, np.where(finite, scales, np.float32(np.nan))


def binary_codes(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Code every token as float32 scale x signs: -1 for a negative element, else 1.

    The scale is the mean magnitude, which no other scale of the signs comes nearer with in the least-squares sense:
    summed in float64 in the order of the pair value and rounded once. A mean below 2^-87 counts as zero.

    Examples
    --------
    >>> binary_codes(np.float32([[4, -1, 1, 0]]))
    (array([[ 1., -1.,  1.,  1.]]), array([1.5], dtype=float32))
    """
    x = np.asarray(x).astype(np.float32)
    finite = np.isfinite(x).all(axis=1)
    with np.errstate(all="ignore"):
        sums = np.zeros((len(x), LANES))
        for step in np.moveaxis(_lanes(np.abs(x)), 1, 0):
            sums += step
        scales = (_fold(sums) / x.shape[1]).astype(np.float32)
    scales = np.where(scales < LEAST_SCALE, np.float32(0), scales)
    codes = np.where((finite & (scales > 0))[:, None], np.where(x < 0, -1.0, 1.0), 0.0)
    return codes, np.where(finite, scales, np.float32(np.nan))


def residual_codes(x: np.ndarray, codebook: Any) -> tuple[np.ndarray, np.ndarray]:
    """Code every token as float32 scale x (code of its nearest centroid + codes of its buckets' weights).

    Centroids and weights are integers in units of ``(max|centroid| + max|weight|) / 126`` (rounded to float32), so that
    no sum passes 127. An element of the token less its centroid, in float32, falls into the bucket of the first cutoff
    that is not below it. The scale is the least-squares one, ``x . code / code . code``, the dot in float64 in the
    order of the pair value; at most 2^120, and 0 below 2^-87.

    Parameters
    ----------
    x : array
        ``[count, depth]``.
    codebook : Codebook
        ``centroids``, ``weights`` and ``cutoffs``.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> book = SimpleNamespace(centroids=np.float32([[100, 0]]), weights=np.float32([-26, 26]), cutoffs=np.float32([0]))
    >>> residual_codes(np.float32([[126, -26]]), book)
    (array([[126., -26.]]), array([1.], dtype=float32))
    """
    x = np.asarray(x).astype(np.float32)
    finite = np.isfinite(x).all(axis=1)
    x = np.where(finite[:, None], x, np.float32(0))
    centroids, weights = codebook.centroids.astype(np.float64), codebook.weights.astype(np.float64)
    unit = np.float64(np.float32((np.abs(centroids).max() + np.abs(weights).max()) / 126))
    nearest = np.argmax(x.astype(np.float64) @ centroids.T - (centroids * centroids).sum(axis=1) / 2, axis=1)
    buckets = np.searchsorted(codebook.cutoffs, x - codebook.centroids[nearest], side="left")
    codes = np.rint(centroids / unit)[nearest] + np.rint(weights / unit)[buckets]
    dots = np.array([_dots(row[None], code[None])[0, 0] for row, code in zip(x, codes, strict=True)]).reshape(len(x))
    squares = (codes * codes).sum(axis=1)
    scales = np.divide(dots, squares, out=np.zeros(len(x)), where=squares > 0)
    scales = np.where(scales < LEAST_SCALE, 0, np.minimum(scales, 2.0**120)).astype(np.float32)
    return np.where((scales > 0)[:, None], codes, 0.0), np.where(finite, scales, np.float32(np.nan))


CODERS = {"int8": int8_codes, "fp8": fp8_codes, "binary": binary_codes}


def _codes(x: np.ndarray, precision: str, codebook: Any) -> tuple[np.ndarray, np.ndarray]:
    return residual_codes(x, codebook) if precision == "residual" else CODERS[precision](x)


def decoded(x: np.ndarray, precision: str, codebook: Any = None) -> np.ndarray:
    """What a coded packing unpacks to: scale x code, each element rounded to float32 once.

    Examples
    --------
    >>> decoded(np.float32([[127, -63.6, 0.4]]), "int8")
    array([[127., -64.,   0.]], dtype=float32)
    """
    codes, scales = _codes(x, precision, codebook)
    return scales[:, None] * codes.astype(np.float32)


class _Operand(NamedTuple):
    """A query as it is multiplied, and what a product is then worth."""

    rows: np.ndarray  # [count, depth]
    scales: np.ndarray  # [count], 0 for a token that counts as zero
    dot_weights: np.ndarray
    cosine_weights: np.ndarray


def _integer_operand(query: np.ndarray, limit: int) -> _Operand:
    codes, scales = int8_codes(query, limit)
    return _Operand(codes, scales, scales.astype(np.float64) * 2.0**32, _inverse_norms(codes, scales))


def _float_operand(query: np.ndarray) -> _Operand:
    """The query itself, but for the power of two that takes its largest element into [1, 2)."""
    query = np.asarray(query).astype(np.float32)
    finite, largest = np.isfinite(query).all(axis=1), np.abs(query).max(axis=1, initial=0)
    counts = finite & (largest >= LEAST_CODED)
    exponents = np.where(counts, np.frexp(np.where(counts, largest, 1))[1] - 1, 0)
    rows = np.where(counts[:, None], np.ldexp(query, -exponents[:, None]), np.float32(0))
    worth = np.where(finite, counts * 1.0, np.nan)
    norms = np.where(counts, np.sqrt(squares_of(query)), 1.0)
    weights = np.ldexp(worth, exponents + 32), np.ldexp(worth / norms, exponents)
    return _Operand(rows, worth, *weights)


def _chains(query: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Dots of float32 rows with codes by fused multiply-adds in float32, element after element: [queries, tokens]."""
    sums = np.zeros((len(query), len(codes)), np.float32)
    for element, code in zip(query.astype(np.float64).T, codes.T, strict=True):
        sums = _added(sums.astype(np.float64), element[:, None] * code)
    return sums


def _added(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a + b of float64 arrays, rounded to float32 once.

    The float64 sum is rounded to odd (Boldo and Melquiond, IEEE Transactions on Computers, 2008): what it lost is known
    exactly, and an inexact sum gets an odd last bit, after which rounding to 24 bits cannot see a tie that was none.
    """
    total = a + b
    back = total - a
    lost = (a - (total - back)) + (b - back)
    bits = total.view(np.int64)
    towards = np.where((lost > 0) == (total > 0), 1, -1)
    odd = np.where((lost != 0) & (bits % 2 == 0), bits + towards, bits)
    return odd.view(np.float64).astype(np.float32)


def _similarities(
    query: np.ndarray, document: np.ndarray, metric: str, precision: str, limit: int, codebook: Any
) -> np.ndarray:
    """Dot products, or cosines before they are clamped, of query tokens with the codes of document tokens.

    ``(float32(products factor)) weight``, the products rounded to float32: of int8, the integer dot with the codes of
    the query; of fp8, a chain of fused multiply-adds. The factor is 2^-32 x scale for dot, and for cosine and angular
    1 / norm of the codes, rounded to float32, 0 for zero codes. Two zero vectors are at cosine 1 under angular, else 0.
    """
    codes, scales = _codes(document, precision, codebook)
    operand = _float_operand(query) if precision == "fp8" else _integer_operand(query, limit)
    if precision != "fp8":
        products = (operand.rows @ codes.T).astype(np.float32)  # integers below 2^31: exact in float64
    else:
        products = _chains(operand.rows, codes)
    if metric == "dot":
        factors = scales * np.float32(2.0**-32)
        return (products * factors).astype(np.float64) * operand.dot_weights[:, None]
    values = (products * _inverse_norms(codes, scales)).astype(np.float64) * operand.cosine_weights[:, None]
    both_zero = (operand.scales == 0)[:, None] & (scales == 0)
    return np.where(both_zero, 1.0, values) if metric == "angular" else values


def _inverse_norms(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    squares = (codes * codes).sum(axis=1)
    inverse = np.divide(1.0, np.sqrt(squares), out=np.zeros(len(codes)), where=squares > 0)
    return np.where(np.isnan(scales), np.nan, inverse).astype(np.float32)


def _coded_best(
    query: np.ndarray, document: np.ndarray, metric: str, precision: str, limit: int, codebook: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Lowest token of the largest similarity, the lowest NaN before all, and what that similarity is worth."""
    similarities = _similarities(query, document, metric, precision, limit, codebook)
    best = np.argmax(similarities, axis=1)
    values = np.take_along_axis(similarities, best[:, None], axis=1)[:, 0]
    if metric == "dot":
        return best, values
    cosines = np.clip(values, -1.0, 1.0)
    return best, cosines if metric == "cosine" else 1.0 - cosines


def _chord(ratio: Any) -> Any:
    """How far apart two directions can be where the difference is `ratio` of one of the vectors."""
    inside = np.minimum(ratio, 1.0)
    return np.where(ratio < 1, inside * np.sqrt(2 / (1 + np.sqrt(1 - inside * inside))), 2.0)


def _losses(x: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Norms of tokens, and of what their codes leave over."""
    wide = x.astype(np.float64)
    rest = wide - codes * scales.astype(np.float64)[:, None]
    return np.sqrt((wide * wide).sum(axis=1)), np.sqrt((rest * rest).sum(axis=1))


def _coded_bound(
    query: np.ndarray,
    document: np.ndarray,
    score: float,
    total: float,
    metric: str,
    reduction: str,
    precision: str,
    limit: int,
    codebook: Any,
) -> float:
    """Largest possible |score - exact score of the vectors that were coded|, by the formula of docs/numerics.md."""
    if not np.isfinite(score):
        return np.inf
    count = len(query)
    query_norms, query_losses = _losses(query, *int8_codes(query, limit))
    norms, losses = _losses(document, *_codes(document, precision, codebook))
    rounding = 8 * 2.0**-24 + count * 2.0**-52
    if precision == "fp8":
        query_losses = np.where(_float_operand(query).scales == 0, query_norms, 0.0)
        rounding = (16 + (1 + 2.0**-6) * query.shape[1]) * 2.0**-24 + count * 2.0**-52
    if metric == "dot":
        reach = (query_norms + query_losses).sum()
        error = (
            reach * losses.max() + query_losses.sum() * norms.max() + rounding * reach * (norms.max() + losses.max())
        )
    else:
        ratios, query_ratios = (
            np.divide(loss, norm, out=np.zeros(len(norm)), where=norm > 0)
            for loss, norm in ((losses, norms), (query_losses, query_norms))
        )
        error = _chord(query_ratios).sum() + count * (_chord(ratios.max()) + rounding)
    error = (1 + 2.0**-20) * (error + 2.0**-24 * abs(total))
    return (error / count + 2.0**-53 * abs(float(score)) if reduction == "mean" else error) + 2.0**-149


# ------------------------------------------------------------------------------------------------ scores


def output_dtype(dtype: Any) -> np.dtype:
    """Type of a score: float32 for 16-bit inputs, else float64."""
    return np.dtype(np.float32 if np.dtype(dtype).itemsize == 2 else np.float64)


def _best(values: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Lowest index of the best value of every row, and that value. A NaN beats everything, the lowest NaN first."""
    best = np.argmin(values, axis=1) if metric == "angular" else np.argmax(values, axis=1)
    return best, np.take_along_axis(values, best[:, None], axis=1)[:, 0]


def _score(best_values: np.ndarray, reduction: str, dtype: np.dtype) -> Any:
    """Add in ascending order of the query token, from +0, and round once."""
    total = np.add.accumulate(np.concatenate([[0.0], best_values]))[-1]
    return (total / len(best_values) if reduction == "mean" else total).astype(dtype)


def _bound(query: np.ndarray, document: np.ndarray, score: float, metric: str, reduction: str, wide: bool) -> float:
    """Largest possible |score - exact score|, by the formula of docs/numerics.md with the float64 dot as pair value."""
    if not np.isfinite(score):
        return np.inf
    count, depth = query.shape
    unit, output_unit = 2.0**-53, 0.0 if wide else 2.0**-24
    underflow = 0.0 if wide else count * depth * 2.0**-149 + 2.0**-149
    total = abs(float(score)) * (count if reduction == "mean" else 1)
    if metric == "dot":
        up = 1 + (depth + 4) * unit  # covers the rounding of a norm
        norms = np.sqrt(squares_of(query)).sum() * up, np.sqrt(squares_of(document)).max() * up
        error = ((depth + 1) * unit + count * unit) * norms[0] * norms[1]
    else:
        error = count * ((2 * depth + 6) * unit + count * unit)
    if metric == "angular":
        error += 4 * count * unit
    error = (1 + 2.0**-20) * (error + output_unit * total + underflow)
    if reduction == "mean":
        error = error / count + unit * abs(float(score))
    return np.inf if np.isnan(error) else error


def _score_index(
    queries: Sets,
    documents: Sets,
    index: np.ndarray,
    *,
    metric: str = "dot",
    reduction: str = "sum",
    empty: float | None = None,
    precision: str = "exact",
    query_limit: int = 127,
    codebook: Any = None,
    return_argmax: bool = False,
    return_token_scores: bool = False,
    return_bounds: bool = False,
) -> Any:
    """Score query set s against documents index[s, c]; -1 is none and scores like an empty document."""
    if metric not in EMPTY_DOCUMENT:
        raise ValueError(f"metric must be one of {sorted(EMPTY_DOCUMENT)}, got {metric!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    coded = () if precision == "exact" else (precision, query_limit, codebook)
    dtype = np.dtype(np.float32) if coded else output_dtype(queries.tokens.dtype)
    empty_value = EMPTY_DOCUMENT[metric] if empty is None else empty
    longest = int(np.diff(queries.offsets).max(initial=0))
    scores = np.zeros(index.shape, dtype)
    bounds = np.zeros(index.shape)
    argmax = np.full((*index.shape, longest), -1, np.int32)
    token_scores = np.zeros((*index.shape, longest), dtype)
    for (s, c), b in np.ndenumerate(index):
        query = queries[s]
        if len(query) == 0:
            continue
        document = documents[b] if b >= 0 else documents.tokens[:0]
        if len(document) == 0:
            scores[s, c] = empty_value
            token_scores[s, c, : len(query)] = empty_value
            continue
        with np.errstate(all="ignore"):
            if coded:
                best, best_values = _coded_best(query, document, metric, *coded)
            else:
                best, best_values = _best(pair_values(query, document, metric), metric)
            scores[s, c] = _score(best_values, reduction, dtype)
            argmax[s, c, : len(query)] = best
            token_scores[s, c, : len(query)] = best_values
            if return_bounds and coded:
                total = best_values.sum()
                bounds[s, c] = _coded_bound(query, document, scores[s, c], total, metric, reduction, *coded)
            elif return_bounds:
                bounds[s, c] = _bound(query, document, scores[s, c], metric, reduction, dtype == np.float64)
    if not (return_argmax or return_token_scores or return_bounds):
        return scores
    return MaxSimResult(
        scores,
        argmax if return_argmax else None,
        token_scores if return_token_scores else None,
        bounds if return_bounds else None,
    )


def _map(result: Any, function: Any) -> Any:
    """Apply a function to an array, or to every array that a result holds."""
    if isinstance(result, MaxSimResult):
        return MaxSimResult(*(None if array is None else function(array) for array in result))
    return function(result)


def _all_documents(queries: Sets, documents: Sets) -> np.ndarray:
    return np.broadcast_to(np.arange(len(documents)), (len(queries), len(documents)))


def _pairs(queries: Sets, documents: Sets) -> np.ndarray:
    if len(queries) != len(documents):
        raise ValueError(f"pairs need as many queries as documents, got {len(queries)} and {len(documents)}")
    return np.arange(len(documents))[:, None]


def maxsim(queries: Any, documents: Any, **options: Any) -> Any:
    """Score every query set against every document: the sum over query tokens of the best pair value.

    ``score = sum_i max_j C(q_i, d_j)`` (Khattab and Zaharia, ColBERT, SIGIR 2020, equation 3), with ``min`` instead of
    ``max`` for the angular metric.

    Parameters
    ----------
    queries, documents : array, list of arrays or Sets
        See `sets`.
    metric : {"dot", "cosine", "angular"}
    reduction : {"sum", "mean"}
        ``"mean"`` divides by the number of valid query tokens.
    empty : float, optional
        Score of a document without tokens; default -inf (dot, cosine) or +inf (angular).
    precision : {"exact", "int8", "fp8", "binary", "residual"}
        How the documents are coded, with `codebook` for residual; `query_limit` is the largest code of a query on the
        row, 1 for decoded queries that were packed as signs and meet signs.
    return_argmax, return_token_scores, return_bounds : bool
        Ask for a `MaxSimResult`.

    Returns
    -------
    array or MaxSimResult
        Scores ``[query_count, document_count]``, or ``[document_count]`` for one 2-D query array. An empty query scores
        0; then an empty document its empty value; then a NaN element makes the score NaN.

    Examples
    --------
    >>> query = np.float32([[1, 0], [0, 1]])
    >>> maxsim(query, [np.float32([[2, 0], [0, 3]]), np.zeros((0, 2), np.float32)])
    array([  5., -inf])
    """
    queries, documents = sets(queries), sets(documents)
    result = _score_index(queries, documents, _all_documents(queries, documents), **options)
    return _map(result, lambda array: array[0]) if queries.single else result


def maxsim_pairs(queries: Any, documents: Any, **options: Any) -> Any:
    """Score the i-th query set against the i-th document; options as for `maxsim`, shapes without the query axis.

    Examples
    --------
    >>> maxsim_pairs([np.float32([[1, 0]]), np.float32([[0, 1]])], [np.float32([[2, 3]]), np.float32([[4, 5]])])
    array([2., 5.])
    """
    queries, documents = sets(queries), sets(documents)
    return _map(_score_index(queries, documents, _pairs(queries, documents), **options), lambda array: array[:, 0])


def maxsim_candidates(queries: Any, documents: Any, candidates: Any, **options: Any) -> Any:
    """Score query set s against documents ``candidates[s, c]``; -1 is none and scores like an empty document.

    Examples
    --------
    >>> maxsim_candidates(np.float32([[1, 0]]), [np.float32([[2, 3]]), np.float32([[4, 5]])], [1, -1])
    array([  4., -inf])
    """
    queries, documents = sets(queries), sets(documents)
    result = _score_index(queries, documents, np.atleast_2d(np.asarray(candidates)), **options)
    return _map(result, lambda array: array[0]) if queries.single else result


def rank(scores: np.ndarray, indices: np.ndarray, metric: str) -> np.ndarray:
    """Positions of scores ``[count]`` in order: best first, ties by index, then the empty value, NaN last."""
    return np.lexsort((indices, scores if metric == "angular" else -scores))


def topk(queries: Any, documents: Any, k: int, *, candidates: Any = None, metric: str = "dot", **options: Any) -> Any:
    """Find the best `k` documents of every query set: scores ``[query_count, k]`` and int64 indices of the same shape.

    Examples
    --------
    >>> topk(np.float32([[1, 0]]), [np.float32([[2, 3]]), np.float32([[4, 5]]), np.float32([[4, 6]])], 2)
    (array([4., 4.]), array([1, 2]))
    """
    queries, documents = sets(queries), sets(documents)
    index = _all_documents(queries, documents) if candidates is None else np.atleast_2d(np.asarray(candidates))
    scores = _score_index(queries, documents, index, metric=metric, **options)
    order = np.stack([rank(row, columns, metric)[:k] for row, columns in zip(scores, index)])
    best = np.take_along_axis(scores, order, axis=1), np.take_along_axis(index, order, axis=1).astype(np.int64)
    return (best[0][0], best[1][0]) if queries.single else best


# --------------------------------------------------------------------------------------------- gradients


def _unit(vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors divided by their norms, and one over the norms; both 0 for a zero vector."""
    norms = np.sqrt(squares_of(vectors))[:, None]
    inverse = np.where(norms == 0, 0.0, 1.0 / norms)
    return np.where(norms == 0, 0.0, vectors * inverse), inverse


def _pair_gradients(query: np.ndarray, winners: np.ndarray, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Derivatives of C(query[i], winners[i]) by the query token and by the winner, each [query_count, depth]."""
    if metric == "dot":
        return winners, query
    (query_units, query_inverse), (winner_units, winner_inverse) = _unit(query), _unit(winners)
    cosines = np.sum(query_units * winner_units, axis=1, keepdims=True)
    sign = -1.0 if metric == "angular" else 1.0
    by_query = sign * query_inverse * (winner_units - cosines * query_units)
    by_winner = sign * winner_inverse * (query_units - cosines * winner_units)
    return by_query, by_winner


def maxsim_grad(
    queries: Any,
    documents: Any,
    upstream: Any,
    *,
    argmax: Any = None,
    pairs: bool = False,
    candidates: Any = None,
    metric: str = "dot",
    reduction: str = "sum",
) -> tuple[np.ndarray, np.ndarray]:
    """Differentiate the scores at the forward's argmax.

    ``dQ_i += g d_j*`` and ``dD_j* += g q_i`` in float64, documents (columns) and query tokens in ascending order. The
    winner of a tie gets all of the gradient; the clamps of cosine and angular are ignored; a zero vector gets 0. Where
    the upstream is exactly 0, or the query or the document is empty, nothing is added, whatever the tokens hold.

    Parameters
    ----------
    queries, documents : array, list of arrays or Sets
    upstream : array
        Derivative of the loss by the scores; broadcasts to their shape.
    argmax : int array, optional
        The forward's, of the scores' shape + ``[longest query]``; recomputed when left out.
    pairs : bool
        The scores are those of `maxsim_pairs`.
    candidates : int array, optional
        The scores are those of `maxsim_candidates`.

    Returns
    -------
    tuple of arrays
        float64, in the layout of the inputs; one ``[tokens, depth]`` array for a list or offsets.

    Examples
    --------
    >>> query_gradient, _ = maxsim_grad(np.float32([[1, 0]]), [np.float32([[2, 3], [1, 1]])], [10.0])
    >>> query_gradient
    array([[20., 30.]])
    """
    queries, documents = sets(queries), sets(documents)
    index = _all_documents(queries, documents)
    if pairs:
        index = _pairs(queries, documents)
    if candidates is not None:
        index = np.atleast_2d(np.asarray(candidates))
    shape = index.shape[:1] if pairs else index.shape[1:] if queries.single else index.shape
    upstream = np.broadcast_to(np.asarray(upstream, np.float64), shape).reshape(index.shape)
    if argmax is not None:
        argmax = np.asarray(argmax).reshape(*index.shape, -1)
    by_query = np.zeros(queries.tokens.shape)
    by_document = np.zeros(documents.tokens.shape)
    for (s, c), b in np.ndenumerate(index):
        query, document = queries[s], documents[b] if b >= 0 else documents.tokens[:0]
        weight = upstream[s, c]
        if len(query) == 0 or len(document) == 0 or weight == 0:
            continue
        with np.errstate(all="ignore"):
            best = _best(pair_values(query, document, metric), metric)[0] if argmax is None else argmax[s, c]
            best = best[: len(query)]
            weight = weight / len(query) if reduction == "mean" else weight
            query, winners = query.astype(np.float64), document[best].astype(np.float64)
            query_part, winner_part = _pair_gradients(query, winners, metric)
            by_query[queries.offsets[s] : queries.offsets[s + 1]] += weight * query_part
            np.add.at(by_document, documents.offsets[b] + best, weight * winner_part)
    return queries.restore(by_query), documents.restore(by_document)


# ----------------------------------------------------------------------------------------------- chamfer


def _nearest(points: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of the nearest other point (the lowest of equals) and the squared distance, by differences."""
    differences = points.astype(np.float64)[:, None, :] - others.astype(np.float64)[None, :, :]
    return _best(_fold_squares(differences), "angular")


def _fold_squares(differences: np.ndarray) -> np.ndarray:
    count, others, depth = differences.shape
    return squares_of(differences.reshape(count * others, depth)).reshape(count, others)


def _directions(p: Any, q: Any, both: bool) -> Any:
    """Pairs (index, points, others) of a batch, p against q and then q against p; a single cloud is a batch of one."""
    for index in _pairs(p, q)[:, 0]:
        yield index, p, q
        if both:
            yield index, q, p


def chamfer(p: Any, q: Any, *, reduction: str = "mean", squared: bool = True, both: bool = True) -> Any:
    """Chamfer distance between point clouds: the reduced squared distance to the nearest neighbour, both ways.

    ``sum_i min_j |p_i - q_j|^2 + sum_j min_i |p_i - q_j|^2``, each sum divided by its count for ``"mean"``. Distances
    are taken from differences in float64, so clouds far from the origin lose nothing. An empty cloud is 0 from its own
    points and +inf from the points of another.

    Parameters
    ----------
    p, q : array, list of arrays or Sets
        One cloud ``[count, depth]`` each, or batches of equally many clouds.
    squared : bool
        False takes plain distances.
    both : bool
        False leaves out the distances from the points of `q`.

    Returns
    -------
    float64 or array
        A number for two 2-D arrays, else ``[batch]``.

    Examples
    --------
    >>> float(chamfer(np.float32([[0, 0], [1, 0]]), np.float32([[0, 1]])))
    2.5
    """
    p, q = sets(p), sets(q)
    distances = np.zeros(len(p))
    for index, points, others in _directions(p, q, both):
        if len(points[index]) == 0:
            continue
        if len(others[index]) == 0:
            distances[index] = np.inf
            continue
        with np.errstate(all="ignore"):
            _, squares = _nearest(points[index], others[index])
            distances[index] += _score(squares if squared else np.sqrt(squares), reduction, np.dtype(np.float64))
    return distances[0] if p.single and q.single else distances


def chamfer_grad(
    p: Any, q: Any, upstream: Any = 1.0, *, reduction: str = "mean", squared: bool = True, both: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Differentiate `chamfer` at the nearest neighbours: float64 gradients in the layout of `p` and of `q`.

    Plain distances have derivative 0 where two points coincide.

    Examples
    --------
    >>> chamfer_grad(np.float32([[0, 0]]), np.float32([[0, 1]]))
    (array([[ 0., -4.]]), array([[0., 4.]]))
    """
    p, q = sets(p), replace(sets(q))  # a copy, so that a batch against itself still has two sides
    upstream = np.broadcast_to(np.asarray(upstream, np.float64), (len(p),))
    by_p, by_q = np.zeros(p.tokens.shape), np.zeros(q.tokens.shape)
    for index, points, others in _directions(p, q, both):
        weight = upstream[index]
        if weight == 0 or len(points[index]) == 0 or len(others[index]) == 0:
            continue
        nearest, squares = _nearest(points[index], others[index])
        weight = weight / len(nearest) if reduction == "mean" else weight
        step = points[index].astype(np.float64) - others[index][nearest].astype(np.float64)
        if squared:
            step = 2.0 * step
        else:
            length = np.sqrt(squares)[:, None]
            step = np.divide(step, length, out=np.zeros_like(step), where=length != 0)
        by_points, by_others = (by_p, by_q) if points is p else (by_q, by_p)
        by_points[points.offsets[index] : points.offsets[index + 1]] += weight * step
        np.add.at(by_others, others.offsets[index] + nearest, -weight * step)
    return p.restore(by_p), q.restore(by_q)
