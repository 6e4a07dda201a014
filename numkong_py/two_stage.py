"""Exact top-k in two stages: a coded packing says which documents can be among the best, an exact one scores those."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .cpu import score_dtype
from .errors import InvalidArgument, LayoutMismatch, ShapeMismatch, UnsupportedDtype
from .ops import both_packed, fill_up, keep_best, score_packed, topk
from .packed import PackedTensor
from .storage import read_ahead

__all__ = ["CERTIFYING", "TwoStageResult", "topk_two_stage"]

CERTIFYING = ("int8", "fp8")  # precisions whose bounds are narrow enough to rule documents out
SAMPLE = 256  # documents that tell how many the bounds leave over
MOST_REFINED = 1 / 8  # of the documents: where more are left over, the coarse pass costs more than it spares
FLOAT32_MAX = float(np.finfo(np.float32).max)
BLOCK = 1 << 20  # coarse scores and bounds held at a time


class TwoStageResult(NamedTuple):
    """The best documents, and how they were found."""

    scores: np.ndarray  # [queries, k], as `topk` returns them
    indices: np.ndarray  # int64 [queries, k]
    refined: np.ndarray  # int64 [queries]: documents that were scored with the exact packing
    certified: bool  # whether these are the best of all documents, to the bit


class _Limits(NamedTuple):
    """What documents score at most and at least, float64 [queries, documents]; angular scores are negated."""

    upper: np.ndarray
    lower: np.ndarray


class _Left(NamedTuple):
    """Documents of one query that no floor has ruled out, what they score at most, and the best lower limits so far."""

    indices: np.ndarray
    upper: np.ndarray
    lowers: np.ndarray


def topk_two_stage(
    q: Any,
    coarse: PackedTensor,
    exact: PackedTensor,
    k: int,
    *,
    oversample: float | None = None,
    metric: str = "dot",
    reduction: str = "sum",
    empty: float | None = None,
    threads: int | None = None,
) -> TwoStageResult:
    """Find the best k documents of every query exactly, reading few of the exact vectors.

    All documents are scored with the coded packing. What its bounds cannot rule out is scored with the exact one, the
    most promising first, while the k-th best score so far rules out more: so the result is that of ``topk(q, exact,
    k)``, to the bit. The exact packing may be a memory-mapped file of which only those documents are read. Where a
    sample says that bounds rule out too little, the exact packing is searched in full.

    Parameters
    ----------
    q : array, list of arrays, Collection or PackedTensor
    coarse : PackedTensor
        The documents in a precision other than exact.
    exact : PackedTensor
        The same documents, exact, packed by the same row.
    k : int
    oversample : float, optional
        Score exactly only the best ``oversample * k`` of the coarse scores, without a certificate: the only way for
        ``"binary"`` and ``"residual"``, whose bounds rule out nothing. Default: certify.
    metric, reduction, empty, threads
        As for `topk`.

    Returns
    -------
    TwoStageResult
        Scores and indices as of `topk`; how many documents of each query were scored exactly; whether it is certified.

    Raises
    ------
    InvalidArgument
        The precision cannot certify and `oversample` is missing, or an option has no such value.
    UnsupportedDtype, ShapeMismatch, LayoutMismatch
        The packings do not hold the same documents. Others as for `topk`.

    Examples
    --------
    >>> from numkong_py import pack
    >>> documents = [np.float32([[2, 3]]), np.float32([[4, 5]]), np.float32([[4, 6]])]
    >>> found = topk_two_stage(np.float32([[1, 0]]), pack(documents, precision="int8"), pack(documents), 2)
    >>> found.scores, found.indices, found.certified
    (array([4., 4.]), array([1, 2]), True)
    """
    _check_counts(k, oversample)
    _check_stages(coarse, exact)
    _check_certificate(coarse, oversample)
    queries, exact = both_packed(q, exact)
    options = {"metric": metric, "reduction": reduction, "empty": empty, "threads": threads}
    single, queries = queries.single, PackedTensor(queries.contents, queries.begin, queries.end)
    if oversample is not None:
        found = _uncertified(queries, coarse, exact, k, math.ceil(oversample * k), options)
    else:
        found = _certified(queries, coarse, exact, k, options)
    return found._replace(scores=found.scores[0], indices=found.indices[0]) if single else found


# ------------------------------------------------------------------------------------- checks


def _check_counts(k: Any, oversample: Any) -> None:
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise InvalidArgument(f"k: {k!r}, wanted an integer of at least 1")
    if oversample is not None and not (isinstance(oversample, (int, float, np.number)) and 1 <= oversample < math.inf):
        raise InvalidArgument(f"oversample: {oversample!r}, wanted a finite number of at least 1")


def _check_stages(coarse: Any, exact: Any) -> None:
    """Raise unless both are packings of the same documents, the first coded and the second exact."""
    for name, side, advice in (("coarse", coarse, ', precision="int8"'), ("exact", exact, "")):
        if not isinstance(side, PackedTensor):
            raise UnsupportedDtype(
                f"{name}: a {type(side).__name__}, wanted a PackedTensor; pass nk.pack({name}{advice})"
            )
    if coarse.precision == "exact" or exact.precision != "exact":
        raise LayoutMismatch(
            f"coarse: precision {coarse.precision!r}, and exact: {exact.precision!r}; wanted a coded packing and an "
            'exact one; pass nk.pack(documents, precision="int8") and nk.pack(documents)'
        )
    for name, wanted in (("dtype", exact.dtype), ("depth", exact.depth)):
        if getattr(coarse, name) != wanted:
            error = ShapeMismatch if name == "depth" else UnsupportedDtype
            raise error(f"coarse: {name} {getattr(coarse, name)}, and exact: {wanted}; pack both from one array")
    if len(coarse) != len(exact):
        raise ShapeMismatch(f"coarse: {len(coarse)} documents, and exact: {len(exact)}; pack both from one array")
    differ = np.flatnonzero(coarse.lengths != exact.lengths)
    if len(differ):
        at = differ[0]
        raise ShapeMismatch(
            f"coarse: document {at} has {coarse.lengths[at]} tokens, and exact: {exact.lengths[at]}; pack both from "
            "one array"
        )
    if coarse.row is not exact.row:
        raise LayoutMismatch(
            f"coarse: packed by row {coarse.backend!r}, and exact: by row {exact.backend!r}; wanted one row; "
            f"pass coarse.to({exact.backend!r})"
        )


def _check_certificate(coarse: PackedTensor, oversample: float | None) -> None:
    if oversample is None and coarse.precision not in CERTIFYING:
        raise InvalidArgument(
            f"oversample: missing, and bounds of precision {coarse.precision!r} are too wide to rule documents out; "
            f"pass oversample=8 for the best of 8 k candidates, or pack coarse with {' or '.join(CERTIFYING)}"
        )


# ------------------------------------------------------------------------------------- one query


def _exact_scores(
    query: PackedTensor, exact: PackedTensor, indices: np.ndarray, options: dict[str, Any], floor: float = -math.inf
) -> np.ndarray:
    """Scores [1, count] of chosen documents; those that certainly stay below the floor may have the worst."""
    candidates = query.row.read_candidates(indices[None, :], 1, exact)
    read_ahead(exact.contents, candidates[0])
    floors = np.array([_sign(options) * floor])
    return score_packed(query, exact, candidates, None, **options, floors=floors)


def _sign(options: dict[str, Any]) -> int:
    return -1 if options["metric"] == "angular" else 1


def _floor(values: np.ndarray, k: int) -> float:
    """What the best k reach, once there are k; what float32 scores round to an infinity ties with it."""
    least = float(values.min()) if len(values) == k else -math.inf
    return min(least, FLOAT32_MAX) if least >= -FLOAT32_MAX else -math.inf


def _refine(
    query: PackedTensor, exact: PackedTensor, left: _Left, k: int, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, int] | None:
    """The best k of what is left and how many of it were scored; None if that would be too many.

    A batch takes the documents that promise most, and looks them up in the order in which a file holds them.
    """
    order = np.argsort(-left.upper, kind="stable")
    indices, upper, floor = left.indices[order], left.upper[order], _floor(left.lowers, k)
    best = np.zeros((1, 0), score_dtype(exact)), np.zeros((1, 0), np.int64)
    done = 0
    while done < len(upper) and upper[done] >= floor:
        batch = np.sort(indices[done : done + k][upper[done : done + k] >= floor])
        found = _exact_scores(query, exact, batch, options, floor), batch[None, :]
        best = keep_best(*(np.concatenate(pair, axis=1) for pair in zip(best, found)), k, _sign(options) > 0)
        done += len(batch)
        floor = max(floor, _floor(_sign(options) * best[0][0], k))
        if np.count_nonzero(upper[done:] >= floor) > MOST_REFINED * len(exact):
            return None
    return *best, done


# ------------------------------------------------------------------------------------- all queries


def _block(queries: PackedTensor) -> int:
    """Documents to score at a time."""
    return max(1, BLOCK // max(1, len(queries)))


def _limits(
    queries: PackedTensor, coarse: PackedTensor, options: dict[str, Any], chosen: np.ndarray | None = None
) -> _Limits:
    """What the exact scores of all documents, or of chosen ones, can be.

    A bound of a coarse score has room for the rounding of the exact one (docs/numerics.md). A score that is not finite
    says nothing, except that of an empty document.
    """
    candidates = None if chosen is None else np.tile(coarse.begin + chosen, (len(queries), 1))
    found = score_packed(queries, coarse, candidates, None, return_bounds=True, **options)
    scores = _sign(options) * found.scores.astype(np.float64)
    if options["empty"] is not None:  # as it is: the coarse scores round it to float32
        lengths = coarse.lengths if chosen is None else coarse.lengths[chosen]
        scores[np.ix_(queries.lengths > 0, lengths == 0)] = _sign(options) * options["empty"]
    unknown = np.isnan(scores) | np.isinf(found.bounds)
    with np.errstate(invalid="ignore"):
        upper, lower = scores + found.bounds, scores - found.bounds
    return _Limits(np.where(unknown, math.inf, upper), np.where(unknown, -math.inf, lower))


def _are_promising(queries: PackedTensor, coarse: PackedTensor, k: int, options: dict[str, Any]) -> np.ndarray:
    """Whether bounds seem to rule out enough, bool [queries]: judged by a sample of the documents, evenly spread."""
    sample = np.unique(np.linspace(0, len(coarse) - 1, SAMPLE).astype(np.int64))
    limits = _limits(queries, coarse, options, sample)
    best = min(len(sample), math.ceil(k * len(sample) / len(coarse)))  # as many of the sample are among the best k
    floors = np.partition(limits.lower, len(sample) - best, axis=1)[:, len(sample) - best]
    return np.mean(limits.upper >= floors[:, None], axis=1) <= MOST_REFINED


def _add(left: _Left, start: int, upper: np.ndarray, lower: np.ndarray, k: int) -> _Left:
    """What is left when a block of documents is added, the first of them number `start`."""
    lowers = np.concatenate([left.lowers, lower])
    lowers = np.partition(lowers, len(lowers) - k)[-k:] if len(lowers) > k else lowers
    floor = _floor(lowers, k)
    kept, new = left.upper >= floor, np.flatnonzero(upper >= floor)
    return _Left(
        np.concatenate([left.indices[kept], start + new]), np.concatenate([left.upper[kept], upper[new]]), lowers
    )


def _coarse_pass(queries: PackedTensor, coarse: PackedTensor, k: int, options: dict[str, Any]) -> list[_Left]:
    """What every query's bounds leave over, block by block."""
    lefts = [_Left(np.zeros(0, np.int64), np.zeros(0), np.zeros(0))] * len(queries)
    for start in range(0, len(coarse), _block(queries)):
        limits = _limits(queries, coarse[start : start + _block(queries)], options)
        lefts = [_add(left, start, *rows, k) for left, *rows in zip(lefts, *limits)]
    return lefts


def _certified(
    queries: PackedTensor, coarse: PackedTensor, exact: PackedTensor, k: int, options: dict[str, Any]
) -> TwoStageResult:
    """Two stages for the queries that they serve, and the exact packing in full for the others."""
    result = _unfilled(queries, exact, k, certified=True)
    in_full = np.ones(len(queries), bool)
    chosen = np.flatnonzero(_are_promising(queries, coarse, k, options)) if len(coarse) else []
    for query, left in zip(chosen, _coarse_pass(_some(queries, chosen), coarse, k, options)):
        found = _refine(queries[int(query)], exact, left, k, options)
        if found is not None:
            in_full[query] = False
            _put(result, query, *found, k, options)
    if in_full.any():
        others = np.flatnonzero(in_full)
        result.scores[others], result.indices[others] = topk(_some(queries, others), exact, k, **options)
        result.refined[others] = len(exact)
    return result


def _uncertified(
    queries: PackedTensor, coarse: PackedTensor, exact: PackedTensor, k: int, count: int, options: dict[str, Any]
) -> TwoStageResult:
    """The best k of the best `count` coarse scores."""
    result = _unfilled(queries, exact, k, certified=False)
    _, candidates = topk(queries, coarse, min(count, max(1, len(coarse))), block=_block(queries), **options)
    for query, chosen in enumerate(candidates):
        indices = np.sort(chosen[chosen >= 0])
        scores = _exact_scores(queries[query], exact, indices, options)
        _put(result, query, *keep_best(scores, indices[None, :], k, _sign(options) > 0), len(indices), k, options)
    return result


def _some(queries: PackedTensor, chosen: np.ndarray) -> PackedTensor:
    return queries if len(chosen) == len(queries) else queries[chosen]


def _unfilled(queries: PackedTensor, exact: PackedTensor, k: int, certified: bool) -> TwoStageResult:
    shape = len(queries), k
    scores, indices = np.empty(shape, score_dtype(exact)), np.empty(shape, np.int64)
    return TwoStageResult(scores, indices, np.zeros(len(queries), np.int64), certified)


def _put(
    result: TwoStageResult,
    query: int,
    scores: np.ndarray,
    indices: np.ndarray,
    refined: int,
    k: int,
    options: dict[str, Any],
) -> None:
    worst = -_sign(options) * math.inf
    result.scores[query], result.indices[query] = (rows[0] for rows in fill_up(scores, indices, k, worst))
    result.refined[query] = refined
