"""Scoring: arrays, collections and packed tensors in, scores out. The packed documents' row does the work."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .arrays import Collection, read_collection
from .backends import Row
from .cpu import METRICS, score_dtype
from .errors import DeviceMismatch, InvalidArgument, LayoutMismatch, ShapeMismatch, UnsupportedDtype
from .packed import PackedTensor, pack_collection, select
from .reference import MaxSimResult

__all__ = [
    "both_packed",
    "fill_up",
    "keep_best",
    "maxsim",
    "maxsim_candidates",
    "maxsim_packed",
    "maxsim_pairs",
    "pack_pair",
    "read_pair",
    "score_packed",
    "topk",
]

REDUCTIONS = {"sum": False, "mean": True}
SCREENS = ("auto", "never")


# ------------------------------------------------------------------------------------- both sides, packed


def _check_pair(q: Any, docs: Any, names: tuple[str, str] = ("q", "docs")) -> None:
    """Raise unless two packed tensors or collections agree in type, depth and device."""
    first, second = names
    if q.dtype != docs.dtype:
        raise UnsupportedDtype(
            f"{first}: {q.dtype}, and {second}: {docs.dtype}; wanted one type; convert one of them and pack it again"
        )
    if q.depth != docs.depth:
        raise ShapeMismatch(f"{first}: depth {q.depth}, and {second}: depth {docs.depth}; wanted one depth")
    if q.device != docs.device:
        raise DeviceMismatch(
            f"{first}: on {q.device}, and {second}: on {docs.device}; nothing is moved silently; "
            f"pass nk.pack({first}, device={docs.device!r}) or {second}.to({q.device!r})"
        )


def _check_precisions(q: PackedTensor, docs: PackedTensor) -> None:
    if q.precision != "exact" and docs.precision == "exact":
        raise LayoutMismatch(
            f"q: packed with precision {q.precision!r}, and docs: exact; coded queries are scored against coded "
            f'documents; pass nk.pack(q) of the vectors, or nk.pack(docs, precision="int8")'
        )


def _check_packed_pair(q: PackedTensor, docs: PackedTensor) -> None:
    _check_pair(q, docs)
    _check_precisions(q, docs)
    if q.row is not docs.row:
        raise LayoutMismatch(
            f"q: packed by row {q.backend!r}, and docs: by row {docs.backend!r}; wanted one row; "
            f"pass q.to({docs.backend!r}) or docs.to({q.backend!r})"
        )
    q.require()


def _read(x: Any, argument: str, other: Any) -> Collection:
    """Read one side; an empty list takes its depth and type from the other side."""
    if isinstance(x, (list, tuple)) and len(x) == 0 and other is not None:
        return read_collection(x, argument, depth=other.depth, dtype=other.dtype)
    return read_collection(x, argument)


def read_pair(
    q: Any, docs: Any, names: tuple[str, str] = ("q", "docs")
) -> tuple[Collection | PackedTensor, Collection | PackedTensor]:
    """Read both sides, packed or not, and check that they agree; nothing is packed."""
    first, second = names
    if isinstance(q, PackedTensor):
        queries = q
        documents = docs if isinstance(docs, PackedTensor) else _read(docs, second, q)
    elif isinstance(docs, (list, tuple)) and len(docs) == 0:
        queries = _read(q, first, None)
        documents = _read(docs, second, queries)
    else:
        documents = docs if isinstance(docs, PackedTensor) else _read(docs, second, None)
        queries = _read(q, first, documents)
    _check_pair(queries, documents, names)
    packed = [side for side in (queries, documents) if isinstance(side, PackedTensor)]
    if len(packed) == 2:
        _check_packed_pair(*packed)
    for side in packed:
        side.require()
    return queries, documents


def pack_pair(
    queries: Collection | PackedTensor, documents: Collection | PackedTensor, in_place: bool = False
) -> tuple[PackedTensor, Any]:
    """Pack what is not packed, with the row of the side that is; documents `in_place` only where a row has to."""
    rows = [side.row for side in (documents, queries) if isinstance(side, PackedTensor)]
    row = rows[0] if rows else select(documents.dtype, documents.device)
    if not isinstance(documents, PackedTensor):
        lent = row.in_place(documents) if in_place and hasattr(row, "in_place") else None
        documents = pack_collection(documents, row) if lent is None else lent
    if not isinstance(queries, PackedTensor):
        queries = _pack_queries(queries, row)
    _check_precisions(queries, documents)
    return queries, documents


def _pack_queries(queries: Collection, row: Row) -> PackedTensor:
    """Pack queries for one call; a row may take them where they lie."""
    adopt = getattr(row, "adopt", None)
    return pack_collection(queries, row) if adopt is None else PackedTensor(adopt(queries), single=queries.single)


def both_packed(q: Any, docs: Any, in_place: bool = False) -> tuple[PackedTensor, Any]:
    """Read, check and pack both sides; documents that are scored once may stay `in_place`."""
    if isinstance(q, PackedTensor) and isinstance(docs, PackedTensor):
        if q.row is not docs.row or q.dtype != docs.dtype or q.depth != docs.depth or not q.runnable:
            _check_packed_pair(q, docs)
        _check_precisions(q, docs)
        return q, docs
    return pack_pair(*read_pair(q, docs), in_place)


# ------------------------------------------------------------------------------------- one way to score


def score_packed(
    queries: PackedTensor,
    documents: PackedTensor,
    candidates: Any,
    axis: int | None,
    *,
    metric: str = "dot",
    reduction: str = "sum",
    empty: float | None = None,
    threads: int | None = None,
    out: Any = None,
    return_argmax: bool = False,
    return_token_scores: bool = False,
    return_bounds: bool = False,
    **row_options: Any,
) -> Any:
    """Score with the options of `maxsim` and of the row, and drop an axis of length one from the results."""
    if metric not in METRICS:
        raise InvalidArgument(f"metric: {metric!r}, wanted one of {', '.join(METRICS)}")
    if reduction not in REDUCTIONS:
        raise InvalidArgument(f"reduction: {reduction!r}, wanted one of {', '.join(REDUCTIONS)}")
    row = documents.row
    target = None
    if out is not None:
        full = (len(queries), len(documents) if candidates is None else candidates.shape[1])
        shape = full if axis is None else full[1 - axis : 2 - axis]
        out = row.check_output(out, shape, score_dtype(documents))
        target = out.reshape(full) if out.flags.c_contiguous else None
    result = row.score(
        queries,
        documents,
        metric=METRICS[metric],
        mean=REDUCTIONS[reduction],
        empty=empty,
        candidates=candidates,
        out=target,
        return_argmax=return_argmax,
        return_token_scores=return_token_scores,
        return_bounds=return_bounds,
        threads=threads,
        **row_options,
    )
    scores = _drop(result.scores, axis)
    if out is not None:
        if target is None:
            out[...] = scores
        scores = out
    if not (return_argmax or return_token_scores or return_bounds):
        return scores
    return MaxSimResult(scores, *(None if array is None else _drop(array, axis) for array in result[1:]))


def _drop(array: Any, axis: int | None) -> Any:
    if axis is None:
        return array
    return array[0] if axis == 0 else array[:, 0]


def maxsim(
    q: Any,
    docs: Any,
    *,
    metric: str = "dot",
    reduction: str = "sum",
    empty: float | None = None,
    threads: int | None = None,
    out: Any = None,
    return_argmax: bool = False,
    return_token_scores: bool = False,
    return_bounds: bool = False,
) -> Any:
    """Score every query against every document: the sum over query tokens of the best similarity.

    ``score = sum_i max_j <q_i, d_j>`` (Khattab and Zaharia, ColBERT, SIGIR 2020, equation 3).

    Parameters
    ----------
    q : array, list of arrays, Collection or PackedTensor
        One 2-D array ``[tokens, depth]`` is one query; anything else is a collection of queries.
    docs : array, list of arrays, Collection or PackedTensor
        One 2-D array is a collection of one document.
    metric : {"dot", "cosine", "angular"}
        ``"cosine"`` normalises; ``"angular"`` is ``sum_i min_j max(0, 1 - cosine)``, and lower is better.
    reduction : {"sum", "mean"}
        ``"mean"`` divides by the number of query tokens.
    empty : float, optional
        Score of a document without tokens; default -inf, for angular +inf.
    threads : int, optional
        Threads to use; the bits do not depend on it. Default: as many as the work is worth.
    out : array, optional
        Where to write the scores.
    return_argmax, return_token_scores, return_bounds : bool
        Ask for a `MaxSimResult` with the position of the best token (int32, -1 past a query's end and for empty
        documents), its similarity, and a bound on every score's error. The scores keep their bits.

    Returns
    -------
    array or MaxSimResult
        Scores ``[queries, documents]``, ``[documents]`` for one 2-D query: float64 for f32, float32 for bf16, f16 and
        coded documents. An empty query scores 0; a NaN makes that query's or that document's scores NaN.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, DeviceMismatch, LayoutMismatch, MissingKernel, BackendUnavailable, InvalidArgument

    Examples
    --------
    >>> query = np.float32([[1, 0], [0, 1]])
    >>> documents = [np.float32([[2, 0], [0, 3]]), np.float32([[1, 1]]), np.zeros((0, 2), np.float32)]
    >>> maxsim(query, documents)
    array([  5.,   2., -inf])
    >>> maxsim(query, documents, return_argmax=True).argmax
    array([[ 0,  1],
           [ 0,  0],
           [-1, -1]], dtype=int32)
    """
    queries, documents = both_packed(q, docs, in_place=True)
    return score_packed(
        queries,
        documents,
        None,
        0 if queries.single else None,
        metric=metric,
        reduction=reduction,
        empty=empty,
        threads=threads,
        out=out,
        return_argmax=return_argmax,
        return_token_scores=return_token_scores,
        return_bounds=return_bounds,
    )


def maxsim_packed(q_packed: PackedTensor, d_packed: PackedTensor, **options: Any) -> Any:
    """Score packed queries against packed documents; never packs and never copies.

    Parameters
    ----------
    q_packed, d_packed : PackedTensor
        Of one row, type and depth.
    **options
        As for `maxsim`.

    Raises
    ------
    LayoutMismatch, UnsupportedDtype, ShapeMismatch, DeviceMismatch, BackendUnavailable, InvalidArgument

    Examples
    --------
    >>> from numkong_py import pack
    >>> maxsim_packed(pack(np.float32([[1, 0]])), pack([np.float32([[2, 3]])]))
    array([2.])
    """
    for name, side in (("q_packed", q_packed), ("d_packed", d_packed)):
        if not isinstance(side, PackedTensor):
            raise UnsupportedDtype(f"{name}: a {type(side).__name__}, wanted a PackedTensor; pass nk.pack({name})")
    queries, documents = both_packed(q_packed, d_packed)
    return score_packed(queries, documents, None, 0 if queries.single else None, **options)


def maxsim_pairs(q: Any, docs: Any, **options: Any) -> Any:
    """Score the i-th query against the i-th document.

    Parameters
    ----------
    q, docs : list of arrays, array, Collection or PackedTensor
        As many queries as documents.
    **options
        As for `maxsim`; results lose the query axis.

    Raises
    ------
    ShapeMismatch
        The counts differ. Others as for `maxsim`.

    Examples
    --------
    >>> queries, documents = np.float32([[[1, 0]], [[0, 1]]]), np.float32([[[2, 3]], [[4, 5]]])
    >>> maxsim_pairs(queries, documents)
    array([2., 5.])
    """
    queries, documents = both_packed(q, docs)
    if len(queries) != len(documents):
        raise ShapeMismatch(f"q: {len(queries)} queries, and docs: {len(documents)} documents; wanted as many")
    indices = np.arange(len(queries))[:, None]
    candidates = queries.row.read_candidates(indices, len(queries), documents)
    return score_packed(queries, documents, candidates, 1, **options)


def maxsim_candidates(q: Any, docs: Any, candidates: Any, **options: Any) -> Any:
    """Score every query against its own list of documents, as in reranking and distillation.

    Parameters
    ----------
    q, docs : list of arrays, array, Collection or PackedTensor
    candidates : int array
        ``[queries, count]`` indices of documents (``[count]`` for one query); -1 is none and scores like an empty
        document.
    **options
        As for `maxsim`.

    Returns
    -------
    array or MaxSimResult
        Scores ``[queries, count]``, ``[count]`` for one 2-D query.

    Raises
    ------
    IndexOutOfRange
        Before anything is written. Others as for `maxsim`.

    Examples
    --------
    >>> maxsim_candidates(np.float32([[1, 0]]), [np.float32([[2, 3]]), np.float32([[4, 5]])], [1, -1, 0])
    array([  4., -inf,   2.])
    """
    queries, documents = both_packed(q, docs)
    indices = queries.row.read_candidates(candidates, len(queries), documents)
    return score_packed(queries, documents, indices, 0 if queries.single else None, **options)


# ------------------------------------------------------------------------------------- top-k


def _select_best(scores: np.ndarray, indices: np.ndarray, k: int, descending: bool) -> np.ndarray:
    """Positions of the best k of one query: by score, then index; NaN last."""
    keys = -scores if descending else scores
    if k < len(keys):
        last = np.partition(keys, k - 1)[k - 1]  # NumPy sorts NaN last
        kept = np.flatnonzero(keys <= last) if last == last else np.arange(len(keys))
    else:
        kept = np.arange(len(keys))
    return kept[np.lexsort((indices[kept], keys[kept]))[:k]]


def keep_best(scores: np.ndarray, indices: np.ndarray, k: int, descending: bool) -> tuple[np.ndarray, np.ndarray]:
    """The best k of every query, best first: [queries, count] scores and their documents."""
    if len(scores) == 0:
        return scores[:, :k], indices[:, :k]
    order = np.stack([_select_best(*row, k, descending) for row in zip(scores, indices)])
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(indices, order, axis=1)


def fill_up(scores: np.ndarray, indices: np.ndarray, k: int, worst: float) -> tuple[np.ndarray, np.ndarray]:
    """Widen to k columns where there are fewer documents: index -1, the score of nothing."""
    if scores.shape[1] == k:
        return scores, indices
    missing = ((0, 0), (0, k - scores.shape[1]))
    return np.pad(scores, missing, constant_values=worst), np.pad(indices, missing, constant_values=-1)


def _progress(progress: Any, total: int) -> Callable[[int], Any]:
    if not progress:
        return lambda count: None
    if callable(progress):
        return progress
    from tqdm.auto import tqdm

    return tqdm(total=total, unit="doc").update


def topk(
    q: Any,
    docs: Any,
    k: int,
    *,
    candidates: Any = None,
    screen: str = "auto",
    block: int | None = None,
    progress: Any = None,
    metric: str = "dot",
    reduction: str = "sum",
    empty: float | None = None,
    threads: int | None = None,
) -> tuple[Any, Any]:
    """Find the best k documents of every query, exactly.

    Parameters
    ----------
    q, docs : array, list of arrays, Collection or PackedTensor
    k : int
    candidates : int array, optional
        ``[queries, count]``: look only among these documents; -1 is none.
    screen : {"auto", "never"}
        Whether bounds may spare documents their exact score; the result is the same. The rows that screen do so for
        queries of at most 32 tokens: what cannot reach the k-th best score so far is left out.
    block : int, optional
        Score this many documents at a time, which bounds the memory for scores.
    progress : bool or callable, optional
        True shows a bar; a callable gets the number of documents done, block by block.
    metric, reduction, empty, threads
        As for `maxsim`.

    Returns
    -------
    scores, indices : arrays
        ``[queries, k]``, int64 indices; ``[k]`` for one 2-D query. Best first (for angular: lowest first), ties by
        index, then empty documents, NaN last; index -1 where there are fewer than k documents.

    Raises
    ------
    InvalidArgument
        k or block is not a count. Others as for `maxsim`.

    Examples
    --------
    >>> topk(np.float32([[1, 0]]), [np.float32([[2, 3]]), np.float32([[4, 5]]), np.float32([[4, 6]])], 2)
    (array([4., 4.]), array([1, 2]))
    """
    for name, value, least in (("k", k, 1), ("block", 1 if block is None else block, 1)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
            raise InvalidArgument(f"{name}: {value!r}, wanted an integer of at least {least}")
    if screen not in SCREENS:
        raise InvalidArgument(f"screen: {screen!r}, wanted one of {', '.join(map(repr, SCREENS))}")
    queries, documents = both_packed(q, docs)
    options = {"metric": metric, "reduction": reduction, "empty": empty, "threads": threads}
    descending = metric != "angular"
    own = getattr(documents.row, "topk", None)
    if own is not None:
        return own(queries, documents, k, candidates=candidates, block=block, progress=progress, **options)
    if candidates is not None:
        indices = queries.row.read_candidates(candidates, len(queries), documents)
        scores = score_packed(queries, documents, indices, None, **options)
        best = keep_best(scores, np.where(indices < 0, -1, indices - documents.begin), k, descending)
    else:
        floored = documents.precision == "exact" and queries.longest <= getattr(documents.row, "floor_tokens", 0)
        leave_out = screen == "auto" and floored
        best = _scan(queries, documents, k, block, progress, leave_out, options)
    scores, indices = fill_up(*best, k, -math.inf if descending else math.inf)
    return (scores[0], indices[0]) if queries.single else (scores, indices)


FIRST_BLOCK = 1 << 14  # document tokens scored before there is a floor: a pass over them takes about a millisecond


def _blocks(documents: PackedTensor, block: int | None, leave_out: bool) -> Iterator[tuple[int, int]]:
    """Ranges of documents to score one after the other.

    They grow fourfold where the floor should rise soon: with twofold growth, and so more calls, the best 10 of a
    thousand random documents took 1.10 times as long as all scores, and not 1.07 (Zen 3).
    """
    count = len(documents)
    growing = leave_out and block is None
    size = max(1, count * FIRST_BLOCK // max(1, documents.tokens)) if growing else block or max(1, count)
    start = 0
    while start < count:
        yield start, min(start + size, count)
        start += size
        size *= 4 if growing else 1


def _floors(best_scores: np.ndarray, k: int) -> np.ndarray | None:
    """What a document must reach to be among the best k of each query, once k are known."""
    return np.ascontiguousarray(best_scores[:, k - 1], np.float64) if best_scores.shape[1] == k else None


def _scan(
    queries: PackedTensor,
    documents: PackedTensor,
    k: int,
    block: int | None,
    progress: Any,
    leave_out: bool,
    options: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray]:
    """Score block by block and keep the best k; the k-th best so far is the floor of the blocks that follow."""
    descending = options["metric"] != "angular"
    advance = _progress(progress, len(documents))
    best_scores = np.zeros((len(queries), 0), score_dtype(documents))
    best_indices = np.zeros((len(queries), 0), np.int64)
    for start, stop in _blocks(documents, block, leave_out):
        part = documents[start:stop]
        floors = {"floors": _floors(best_scores, k)} if leave_out else {}
        scores = score_packed(queries, part, None, None, **options, **floors)
        indices = np.broadcast_to(np.arange(start, stop), scores.shape)
        if start:
            scores = np.concatenate([best_scores, scores], axis=1)
            indices = np.concatenate([best_indices, indices], axis=1)
        best_scores, best_indices = keep_best(scores, indices, k, descending)
        advance(len(part))
    return best_scores, best_indices
