"""What an approximate packing loses: its scores against the exact ones of the vectors that it was packed from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arrays import Collection, read_numbers
from .corpus.writer import slice_documents
from .cpu import METRICS
from .errors import DeviceMismatch, InvalidArgument, ShapeMismatch, UnsupportedDtype
from .ops import REDUCTIONS, keep_best, maxsim, pack_pair, read_pair
from .packed import PackedTensor

__all__ = ["ErrorReport", "error_report", "table"]

BLOCK_TOKENS = 1 << 16  # document tokens packed and scored at a time
BLOCK_WINNERS = 1 << 22  # positions of best tokens held at a time


@dataclass(frozen=True)
class ErrorReport:
    """How far the scores of an approximate packing are from the exact ones.

    Means over queries and documents, but for the largest of each kind; only pairs whose exact score is finite count.
    `str` shows it as a table.

    Attributes
    ----------
    precision : str
        Of the packing, as `pack` took it.
    metric, reduction : str
    queries, documents, k : int
    bytes_per_token : float
        Of the packing.
    max_error, mean_error : float
        Absolute difference of a score from the exact one.
    max_bound, mean_bound : float
        What the packing itself states, see ``return_bounds`` of `maxsim`.
    max_error_of_bound : float
        Largest error as a share of its own bound: at most 1.
    argmax_agreement : float
        Share of query tokens that are best matched by the same document token.
    topk_overlap : float
        Share of the exact best k that are among the best k.
    spearman : float
        Rank correlation of a query's scores with the exact ones (Spearman, 1904), ties averaged.
    ndcg, exact_ndcg : float or None
        Normalised discounted cumulative gain of the best k (Järvelin and Kekäläinen, TOIS 2002, equation 3 with base 2
        logarithms), of queries with a relevant document; and of the exact scores. None without relevance.
    scores, exact_scores, bounds : array
        float64 ``[queries, documents]``: what all of this is made from.
    """

    precision: str
    metric: str
    reduction: str
    queries: int
    documents: int
    k: int
    bytes_per_token: float
    max_error: float
    mean_error: float
    max_bound: float
    mean_bound: float
    max_error_of_bound: float
    argmax_agreement: float
    topk_overlap: float
    spearman: float
    ndcg: float | None
    exact_ndcg: float | None
    scores: np.ndarray = field(repr=False, compare=False)
    exact_scores: np.ndarray = field(repr=False, compare=False)
    bounds: np.ndarray = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """All numbers by name, without the arrays."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, np.ndarray)}

    def __str__(self) -> str:
        return table(self.as_dict())


def table(facts: dict[str, Any]) -> str:
    """What `ErrorReport.as_dict` gives, to be read."""
    rows = {
        "score error": "{max_error:.3g} at most, {mean_error:.3g} in the mean",
        "stated bound": "{max_bound:.3g} at most, {mean_bound:.3g} in the mean",
        "error / bound": "{max_error_of_bound:.1%} at most",
        "same best token": "{argmax_agreement:.2%} of query tokens",
        "top-{k} overlap": "{topk_overlap:.2%}",
        "Spearman": "{spearman:.6f}",
    }
    if facts["ndcg"] is not None:
        rows["nDCG@{k}"] = "{ndcg:.4f}, exact {exact_ndcg:.4f}"
    what = "{precision}, {bytes_per_token:.1f} bytes a token"
    over = "{queries} queries x {documents} documents, {metric}, {reduction}"
    lines = [f"{what}: {over}", *(f"  {name:<15}  {text}" for name, text in rows.items())]
    return "\n".join(lines).format(**facts)


def error_report(
    packed: PackedTensor,
    x: Any,
    queries: Any,
    *,
    k: int = 20,
    metric: str = "dot",
    reduction: str = "sum",
    relevance: Any = None,
    threads: int | None = None,
) -> ErrorReport:
    """Measure what a packing of any precision loses for given queries.

    Documents are compared block by block: beside the inputs, memory holds three numbers for a query and a document.

    Parameters
    ----------
    packed : PackedTensor
        Made by `pack` from `x`.
    x : array, list of arrays, Collection or PackedTensor
        The exact vectors; with offsets, lengths or a mask as `collection`.
    queries : array, list of arrays, Collection or PackedTensor
        Exact ones.
    k : int
        Depth of `topk_overlap` and `ndcg`.
    metric, reduction, threads
        As for `maxsim`.
    relevance : array, optional
        ``[queries, documents]`` gains of at least 0, for `ndcg`.

    Returns
    -------
    ErrorReport

    Raises
    ------
    ShapeMismatch, UnsupportedDtype, DeviceMismatch, InvalidArgument
        The documents are not those of the packing, or an option has no such value. Others as for `maxsim`.

    Examples
    --------
    >>> from numkong_py import pack
    >>> documents = np.random.default_rng(0).standard_normal((50, 8, 16), dtype=np.float32)
    >>> report = error_report(pack(documents, precision="int8"), documents, documents[:3], k=5)
    >>> report.max_error <= report.max_bound, report.topk_overlap
    (True, 1.0)
    """
    _check_options(k, metric, reduction)
    asked, exact = _read_sides(packed, x, queries)
    gains = None if relevance is None else _read_relevance(relevance, (len(asked), len(packed)))
    compared = _compare(asked, packed, exact, {"metric": metric, "reduction": reduction, "threads": threads})
    k, descending = min(k, max(1, len(packed))), metric != "angular"
    best, exact_best = (_best(scores, k, descending) for scores in (compared.scores, compared.exact_scores))
    return ErrorReport(
        precision=packed.precision,
        metric=metric,
        reduction=reduction,
        queries=len(asked),
        documents=len(packed),
        k=k,
        bytes_per_token=_bytes(packed) / max(1, packed.tokens),
        **_errors(compared),
        argmax_agreement=compared.agreeing / max(1, compared.winners),
        topk_overlap=_mean(len(np.intersect1d(*rows)) / max(1, len(rows[0])) for rows in zip(best, exact_best)),
        spearman=_mean(map(_spearman, compared.scores, compared.exact_scores)),
        ndcg=None if gains is None else _ndcg(gains, best),
        exact_ndcg=None if gains is None else _ndcg(gains, exact_best),
        scores=compared.scores,
        exact_scores=compared.exact_scores,
        bounds=compared.bounds,
    )


# ------------------------------------------------------------------------------------- both sides


def _check_options(k: Any, metric: str, reduction: str) -> None:
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise InvalidArgument(f"k: {k!r}, wanted an integer of at least 1")
    for name, value, known in (("metric", metric, METRICS), ("reduction", reduction, REDUCTIONS)):
        if value not in known:
            raise InvalidArgument(f"{name}: {value!r}, wanted one of {', '.join(known)}")


def _read_sides(packed: Any, x: Any, queries: Any) -> tuple[PackedTensor, Collection | PackedTensor]:
    """The queries, packed by the row of `packed`, and the exact documents."""
    if not isinstance(packed, PackedTensor):
        raise UnsupportedDtype(f"packed: a {type(packed).__name__}, wanted a PackedTensor; pass nk.pack(x, precision=)")
    if packed.device != "cpu":
        raise DeviceMismatch(f'packed: on {packed.device}, wanted host memory; pass packed.to("cpu")')
    asked, exact = read_pair(queries, x, ("queries", "x"))
    for name, side in (("x", exact), ("queries", asked)):
        if isinstance(side, PackedTensor) and side.precision != "exact":
            raise InvalidArgument(
                f"{name}: packed with precision {side.precision!r}, wanted the exact vectors; pass those"
            )
    asked, _ = pack_pair(*read_pair(asked, packed, ("queries", "packed")))
    if len(exact) != len(packed):
        raise ShapeMismatch(f"x: {len(exact)} documents, and packed: {len(packed)}; pass what it was packed from")
    differ = np.flatnonzero(exact.lengths != packed.lengths)
    if len(differ):
        at = differ[0]
        raise ShapeMismatch(
            f"x: document {at} has {exact.lengths[at]} tokens, and in packed {packed.lengths[at]}; pass what it was "
            "packed from"
        )
    return PackedTensor(asked.contents, asked.begin, asked.end), exact


def _read_relevance(relevance: Any, shape: tuple[int, int]) -> np.ndarray:
    gains = np.atleast_2d(read_numbers(relevance, "relevance"))
    if gains.shape != shape:
        raise ShapeMismatch(f"relevance: shape {gains.shape}, wanted {shape}, a gain for every query and document")
    if not (gains >= 0).all() or not gains.any():
        raise InvalidArgument("relevance: wanted gains of at least 0, and not all of them 0")
    return gains


def _bytes(packed: PackedTensor) -> int:
    """Of the documents by themselves: a range of a collection holds on to all of it."""
    return packed.row.pack_size(len(packed), packed.tokens, packed.depth, packed.dtype, packed.contents.coding)


# ------------------------------------------------------------------------------------- scores


@dataclass
class _Compared:
    """Scores of all pairs, and how many query tokens agree on their best token."""

    scores: np.ndarray
    exact_scores: np.ndarray
    bounds: np.ndarray
    winners: int = 0
    agreeing: int = 0


def _blocks(packed: PackedTensor, most: int) -> Iterator[slice]:
    """Ranges of so many documents at most, and of BLOCK_TOKENS tokens unless one document has more."""
    offsets, start = packed.offsets, 0
    while start < len(packed):
        last = int(np.searchsorted(offsets, offsets[start] + BLOCK_TOKENS, side="right")) - 1
        stop = min(max(last, start + 1), start + most)
        yield slice(start, stop)
        start = stop


def _compare(
    queries: PackedTensor, packed: PackedTensor, exact: Collection | PackedTensor, options: dict[str, Any]
) -> _Compared:
    compared = _Compared(*(np.empty((len(queries), len(packed))) for _ in range(3)))
    most = max(1, BLOCK_WINNERS // max(1, len(queries) * queries.longest))
    for block in _blocks(packed, most):
        part = exact[block] if isinstance(exact, PackedTensor) else slice_documents(exact, block.start, block.stop)
        found = maxsim(queries, packed[block], return_argmax=True, return_bounds=True, **options)
        wanted = maxsim(queries, part, return_argmax=True, **options)
        compared.scores[:, block], compared.bounds[:, block] = found.scores, found.bounds
        compared.exact_scores[:, block] = wanted.scores
        winners = wanted.argmax >= 0
        compared.winners += int(np.count_nonzero(winners))
        compared.agreeing += int(np.count_nonzero((found.argmax == wanted.argmax) & winners))
    return compared


# ------------------------------------------------------------------------------------- measures


def _mean(values: Any) -> float:
    """Of those that are defined; NaN without any."""
    defined = [value for value in values if value == value]
    return float(np.mean(defined)) if defined else math.nan


def _errors(compared: _Compared) -> dict[str, float]:
    counted = np.isfinite(compared.exact_scores)
    errors = np.abs(compared.scores[counted] - compared.exact_scores[counted])
    bounds = compared.bounds[counted]
    shares = np.divide(errors, bounds, out=np.where(errors > 0, np.inf, 0.0), where=bounds > 0)
    return {
        "max_error": float(errors.max(initial=0)),
        "mean_error": _mean(errors),
        "max_bound": float(bounds.max(initial=0)),
        "mean_bound": _mean(bounds),
        "max_error_of_bound": float(shares.max(initial=0)),
    }


def _best(scores: np.ndarray, k: int, descending: bool) -> np.ndarray:
    """The best k documents of every query, [queries, k]."""
    indices = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return keep_best(scores, indices, k, descending)[1]


def _ranks(values: np.ndarray) -> np.ndarray:
    """From 1 for the least value; equal ones share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def _spearman(scores: np.ndarray, exact_scores: np.ndarray) -> float:
    """Correlation of ranks over one query's documents; NaN where it is not defined."""
    counted = np.isfinite(exact_scores)
    ranks, exact_ranks = _ranks(scores[counted]), _ranks(exact_scores[counted])
    if len(ranks) == 0 or np.ptp(exact_ranks) == 0:
        return math.nan
    return float(np.corrcoef(ranks, exact_ranks)[0, 1]) if np.ptp(ranks) else 0.0


def _ndcg(gains: np.ndarray, best: np.ndarray) -> float:
    """Mean over the queries with a relevant document of DCG over that of the best order."""
    discounts = 1 / np.log2(np.arange(best.shape[1]) + 2)
    ideal = np.sort(gains, axis=1)[:, ::-1][:, : best.shape[1]] @ discounts
    found = np.take_along_axis(gains, best, axis=1) @ discounts
    return float(np.mean(found[ideal > 0] / ideal[ideal > 0]))
