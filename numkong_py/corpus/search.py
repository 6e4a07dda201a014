"""Exact search over the shards of a snapshot: every shard gives its best, and the best of those are the answer.

A shard's answer depends on nothing but the shard, so shards may be scored anywhere and in any order: `merge` gives the
same bits. Ties go to the document that was appended first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Collection, read_collection
from ..cpu import METRICS, output_dtype
from ..errors import InvalidArgument, ShapeMismatch, UnsupportedDtype
from ..ops import REDUCTIONS, SCREENS, topk
from ..packed import PackedTensor, pack_collection
from ..threads import thread_count
from .reading import cache_limit
from .shards import Shard, read_ahead

__all__ = ["Hits", "Queries", "Selection", "empty_hits", "merge", "shard_topk", "shards_topk", "threshold"]

LIST_LIMIT = 1 << 22  # entries of a table of candidates, [queries, count], that are made at a time

Hits = tuple[np.ndarray, np.ndarray]  # scores and places among all documents, [queries, at most k]; -1 is none


class Queries:
    """Query sets, packed for a row when a shard of that row asks for them."""

    def __init__(self, q: Any, depth: int, dtype: str) -> None:
        if not isinstance(q, PackedTensor):
            q = read_collection(q, "queries", depth=depth, dtype=dtype)
        if q.dtype != dtype:
            raise UnsupportedDtype(f"queries: {q.dtype}, and the corpus has {dtype}; convert them and pass them again")
        if q.depth != depth:
            raise ShapeMismatch(f"queries: depth {q.depth}, and the corpus has {depth}; wanted one depth")
        self.given: PackedTensor | Collection = q
        self.single = q.single
        self.device = q.device
        self._packed: dict[str, PackedTensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Queries, (self.given, self.given.depth, self.given.dtype)

    def __len__(self) -> int:
        return len(self.given)

    @property
    def lengths(self) -> np.ndarray:
        """Valid tokens of every query, int64; those of arrays on a device are known once they are packed."""
        return np.asarray(next(iter(self._packed.values()), self.given).lengths)

    def packed_for(self, documents: PackedTensor) -> PackedTensor:
        """The queries, packed by the row of the documents."""
        row = documents.row
        if row.name not in self._packed:
            given = self.given
            self._packed[row.name] = (
                given.to(row.name) if isinstance(given, PackedTensor) else pack_collection(given, row)
            )
        return self._packed[row.name]


@dataclass(frozen=True)
class Selection:
    """Which documents may be found, by place among all documents of the snapshot.

    Attributes
    ----------
    included : array or None
        int64, rising: only these. None: all.
    excluded : array
        int64, rising: not these.
    candidates : array or None
        int64 ``[queries, count]``: for each query only these; -1 is none.
    """

    included: np.ndarray | None = None
    excluded: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    candidates: np.ndarray | None = None

    def of_shard(self, shard: Shard) -> Selection:
        """The same by place in a shard, its deleted documents excluded."""
        excluded = np.union1d(_within(self.excluded, shard), shard.tombstones)
        included = None if self.included is None else np.setdiff1d(_within(self.included, shard), excluded)
        if self.candidates is None:
            return Selection(included, excluded)
        inside = (self.candidates >= shard.begin) & (self.candidates < shard.end)
        places = np.where(inside, self.candidates - shard.begin, -1)
        refused = np.isin(places, excluded)
        if included is not None:
            refused |= ~np.isin(places, included)
        return Selection(None, excluded, _compact(np.where(refused, -1, places)))


def _within(positions: np.ndarray, shard: Shard) -> np.ndarray:
    first, last = np.searchsorted(positions, [shard.begin, shard.end])
    return positions[first:last] - shard.begin


def _compact(places: np.ndarray) -> np.ndarray:
    """Rows of places with each place once, rising, -1 at the end, no wider than the fullest row."""
    ordered = np.sort(places, axis=1)
    ordered[:, 1:][ordered[:, 1:] == ordered[:, :-1]] = -1
    order = np.argsort(ordered < 0, axis=1, kind="stable")
    width = int((ordered >= 0).sum(axis=1).max(initial=0))
    return np.take_along_axis(ordered, order, axis=1)[:, :width]


# ------------------------------------------------------------------------------------- hits


def empty_hits(count: int, dtype: str) -> Hits:
    """No hits for so many queries."""
    return np.zeros((count, 0), output_dtype(dtype)), np.zeros((count, 0), np.int64)


def merge(parts: Iterable[Hits], k: int, *, descending: bool) -> Hits:
    """The best k of several hits: by score, then by place; NaN after all numbers, none at the end.

    Examples
    --------
    >>> left = np.array([[3.0, 1.0]]), np.array([[0, 1]])
    >>> right = np.array([[3.0, 2.0]]), np.array([[7, 5]])
    >>> merge([right, left], 3, descending=True)
    (array([[3., 3., 2.]]), array([[0, 7, 5]]))
    """
    scores, places = (np.concatenate(arrays, axis=1) for arrays in zip(*parts))
    keys = -scores if descending else scores
    order = np.lexsort((places, keys, places < 0), axis=1)[:, :k]
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(places, order, axis=1)


def threshold(hits: Hits, lengths: np.ndarray, least: float, *, mean: bool, descending: bool) -> np.ndarray:
    """Which hits have a mean score per valid query token that is at least so good, bool [queries, k]."""
    scores, places = hits
    means = scores if mean else scores / np.maximum(lengths, 1)[:, None]
    return (places >= 0) & (means >= least if descending else means <= least)


def check_options(
    metric: str, reduction: str, k: Any, block: Any, screen: str, threads: int | None, min_mean_score: Any
) -> None:
    """Raise on what no shard would be asked about where there is none."""
    thread_count(threads, 1)
    if screen not in SCREENS:
        raise InvalidArgument(f"screen: {screen!r}, wanted one of {', '.join(map(repr, SCREENS))}")
    if min_mean_score is not None and (not isinstance(min_mean_score, Real) or math.isnan(min_mean_score)):
        raise InvalidArgument(f"min_mean_score: {min_mean_score!r}, wanted a number or None")
    if metric not in METRICS:
        raise InvalidArgument(f"metric: {metric!r}, wanted one of {', '.join(METRICS)}")
    if reduction not in REDUCTIONS:
        raise InvalidArgument(f"reduction: {reduction!r}, wanted one of {', '.join(REDUCTIONS)}")
    for name, value in (("k", k), ("block", 1 if block is None else block)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise InvalidArgument(f"{name}: {value!r}, wanted an integer of at least 1")


# ------------------------------------------------------------------------------------- one shard


def shard_topk(
    shard: Shard,
    queries: Queries,
    k: int,
    selection: Selection | None = None,
    *,
    block: int | None = None,
    progress: Callable[[int], Any] | None = None,
    **options: Any,
) -> Hits:
    """The best k documents of one shard for every query, by place among all documents of the snapshot.

    Parameters
    ----------
    shard : Shard
    queries : Queries
    k : int
    selection : Selection, optional
        Which documents may be found; deleted ones never are.
    block : int, optional
        Documents to score, or to move to the queries' device, at a time.
    progress : callable, optional
        Gets numbers of documents done.
    **options
        As for `topk`: metric, reduction, empty, screen, threads.

    Returns
    -------
    scores, places : arrays
        ``[queries, at most k]``, best first; -1 is none.
    """
    return _shard_topk(shard, _plan(shard, selection), queries, k, block=block, progress=progress, **options)


def shards_topk(
    shards: Iterable[Shard],
    queries: Queries,
    k: int,
    selection: Selection | None = None,
    *,
    cached: int | None = None,
    **options: Any,
) -> Hits:
    """The best k documents of several shards, looked at one after another; all else as for `shard_topk`.

    `cached` is the number of bytes that the page cache would have to keep for the next question to find these shards
    there; default all of them. Where that is more than it can, shards are read past it.
    """
    if cached is None:
        shards = list(shards)
        cached = sum(shard.file.entry.bytes for shard in shards)
    plans: deque[_Plan] = deque()  # of shards that were asked for and not handed out yet

    def is_whole(shard: Shard) -> bool:
        plans.append(_plan(shard, selection))
        return plans[-1].whole

    best = empty_hits(len(queries), queries.given.dtype)
    for shard, documents in read_ahead(shards, is_whole, direct=cached > cache_limit()):
        part = _shard_topk(shard, plans.popleft(), queries, k, documents=documents, **options)
        best = merge([best, part], k, descending=options.get("metric") != "angular")
    return best


class _Plan(NamedTuple):
    """Which documents of a shard to look at: each query's own, the same few for all, or all but a few."""

    candidates: np.ndarray | None = None
    listed: np.ndarray | None = None
    refused: np.ndarray | None = None

    @property
    def whole(self) -> bool:
        """Whether most of the shard is looked at."""
        return self.refused is not None


def _plan(shard: Shard, selection: Selection | None) -> _Plan:
    chosen = (selection or Selection()).of_shard(shard)
    if chosen.candidates is not None:
        return _Plan(candidates=chosen.candidates)
    listed, refused = chosen.included, chosen.excluded
    few = 2 * len(refused) > shard.count if listed is None else 2 * len(listed) <= shard.count
    everything = np.arange(shard.count)
    if few:
        return _Plan(listed=np.delete(everything, refused) if listed is None else listed)
    return _Plan(refused=refused if listed is None else np.setdiff1d(everything, listed))


def _shard_topk(
    shard: Shard,
    plan: _Plan,
    queries: Queries,
    k: int,
    *,
    documents: PackedTensor | None = None,
    block: int | None = None,
    progress: Callable[[int], Any] | None = None,
    **options: Any,
) -> Hits:
    """What `shard_topk` returns; the documents are the shard's, if they were read already."""
    advance = progress or (lambda count: None)
    if plan.refused is not None:
        documents = shard.open() if documents is None else documents
        return _of_all(shard, documents, queries, k, plan.refused, block, advance, options)
    if plan.candidates is not None:
        hits = _of_candidates(shard, queries, k, plan.candidates, options)
    else:
        hits = _of_places(shard, queries, k, plan.listed, options)
    advance(shard.count)
    return hits


def _globally(shard: Shard, scores: np.ndarray, places: np.ndarray) -> Hits:
    return scores, np.where(places < 0, -1, places + shard.begin)


def _search(queries: Queries, documents: PackedTensor, k: int, **options: Any) -> Hits:
    """Search documents that are mapped in host memory where the queries are; the hits are in host memory."""
    if queries.device != "cpu":
        documents = documents.to(queries.device)
    found = topk(queries.packed_for(documents), documents, k, **options)
    scores, places = (array.get() if hasattr(array, "get") else array for array in found)
    return np.atleast_2d(scores), np.atleast_2d(places)


def _of_all(
    shard: Shard,
    documents: PackedTensor,
    queries: Queries,
    k: int,
    refused: np.ndarray,
    block: int | None,
    advance: Callable[[int], Any],
    options: dict[str, Any],
) -> Hits:
    """Look at all documents, ask for as many more as are refused, and leave those out."""
    descending = options.get("metric") != "angular"
    size = block or max(1, shard.count)
    best = empty_hits(len(queries), documents.dtype)
    for begin in range(0, shard.count, size):
        part = documents[begin : begin + size]
        out = refused[slice(*np.searchsorted(refused, [begin, begin + len(part)]))] - begin
        scores, places = _search(queries, part, min(len(part), k + len(out)), **options)
        places = np.where(np.isin(places, out), -1, places)
        found = _globally(shard, scores, np.where(places < 0, -1, places + begin))
        best = merge([best, found], k, descending=descending)
        advance(len(part))
    return best


def _of_places(shard: Shard, queries: Queries, k: int, places: np.ndarray, options: dict[str, Any]) -> Hits:
    """Look at some documents, the same ones for every query."""
    size = max(1, LIST_LIMIT // max(1, len(queries)))
    descending = options.get("metric") != "angular"
    best = empty_hits(len(queries), shard.file.stored().dtype)
    for begin in range(0, len(places), size):
        listed = np.broadcast_to(places[begin : begin + size], (len(queries), len(places[begin : begin + size])))
        best = merge([best, _of_candidates(shard, queries, k, listed, options)], k, descending=descending)
    return best


def _of_candidates(shard: Shard, queries: Queries, k: int, candidates: np.ndarray, options: dict[str, Any]) -> Hits:
    """Look at each query's own documents. None scores like an empty document, so as many more are asked for."""
    if candidates.size == 0:
        return empty_hits(len(queries), shard.file.stored().dtype)
    documents = shard.open()
    if queries.device != "cpu":  # only these documents go there
        chosen = np.unique(candidates[candidates >= 0])
        documents = documents[chosen]
        candidates = np.where(candidates < 0, -1, np.searchsorted(chosen, candidates))
    spare = int((candidates < 0).sum(axis=1).max())
    wanted = min(candidates.shape[1], k + spare)
    scores, places = _search(queries, documents, wanted, candidates=candidates, **options)
    if queries.device != "cpu":
        places = np.where(places < 0, -1, chosen[places])
    return merge([_globally(shard, scores, places)], k, descending=options.get("metric") != "angular")


def read_candidates(candidates: Any, count: int) -> list[Sequence[Any]]:
    """Lists of ids, one for every query, from a table, ragged lists, or one list for one query.

    Raises
    ------
    ShapeMismatch
        There are not as many lists as queries.
    """
    lists = candidates.tolist() if isinstance(candidates, np.ndarray) else list(candidates)
    nested = [isinstance(each, (list, tuple, np.ndarray, range)) for each in lists]
    if (
        not any(nested)
        and count == 1
        and not (lists == [] and isinstance(candidates, np.ndarray) and candidates.ndim == 2)
    ):
        lists = [lists]
    elif not all(nested) or len(lists) != count:
        raise ShapeMismatch(f"candidates: {len(lists)} lists of ids, wanted {count}, one for every query")
    return [each.tolist() if isinstance(each, np.ndarray) else list(each) for each in lists]


def fill(hits: Hits, k: int, *, descending: bool) -> Hits:
    """Exactly k columns: none, with the score of nothing, where there are fewer hits."""
    scores, places = hits
    missing = ((0, 0), (0, k - scores.shape[1]))
    places = np.pad(places, missing, constant_values=-1)
    scores = np.pad(scores, missing)
    return np.where(places < 0, scores.dtype.type(-math.inf if descending else math.inf), scores), places
