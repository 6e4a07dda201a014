"""`pack` as a Dask job: workers write shard files that nobody names yet, and the client names them all at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import dask
import numpy as np
from dask.delayed import Delayed
from distributed import Client, as_completed

from ..arrays import Collection, read_indices
from ..corpus.columns import empty_ids, first_repeated
from ..corpus.corpus import Corpus, _advancing
from ..corpus.manifest import Manifest, ShardEntry, read_manifest
from ..corpus.shards import Snapshot
from ..corpus.writer import Additions, ShardStream, as_collection, clean, discarding, locked
from ..dtypes import NUMPY_DTYPES
from ..errors import DuplicateId, InvalidArgument, ShapeMismatch, UnsupportedDtype
from .search import threads_of_workers

__all__ = ["pack"]

RAGGED = ("offsets", "lengths", "mask")
KEYS = ("x", "ids", "metadata", *RAGGED)  # of a part that is a mapping: the arguments of `Corpus.append`


def pack(
    client: Client,
    parts: Any,
    corpus: Corpus | str | os.PathLike[str],
    *,
    offsets: Any = None,
    lengths: Any = None,
    mask: Any = None,
    normalize: bool = False,
    progress: Any = None,
) -> np.ndarray:
    """Append a collection to a corpus on a Dask cluster: all of it or, after an error or a crash, nothing.

    Workers compute a part, pack it, and write it beside the corpus's files, in shards of the corpus's size. When all
    are written, the client names them in the manifest, in the order of the parts. A part that is done twice, because a
    worker died, leaves a file that nobody names and the next writer removes.

    Parameters
    ----------
    client : distributed.Client
        Synchronous. Its workers need numkong_py, and see the corpus's folder under the same path.
    parts : dask.bag.Bag, dask.array.Array or sequence
        A bag: elements are ``[tokens, depth]`` arrays, pairs (id, array), or mappings with ``x`` and, if wanted, ``id``
        and ``metadata`` (a mapping). A Dask array: padded ``[count, longest, depth]``, alone or with `lengths` or
        `mask`, or ``[total, depth]`` with `offsets`. A sequence, of Delayed or Future objects or data: each is a part,
        and gives what `Corpus.append` takes for x, or a mapping of its arguments (x, ids, metadata, offsets, lengths,
        mask).
    corpus : Corpus or path
        On a file system that all share. A `Corpus` object shows the new documents afterwards.
    offsets, lengths, mask : array, optional
        For a Dask array.
    normalize : bool
        As for `pack`.
    progress : bool or callable, optional
        None shows a bar on a terminal; a callable gets numbers of documents.

    Returns
    -------
    array
        The ids of the documents, in order. Without ids they are integers that count on from the largest.

    Raises
    ------
    DuplicateId, CorpusLocked, UnsupportedDtype, ShapeMismatch, InvalidArgument, BackendUnavailable, OSError

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> corpus = Corpus.create(f"{folder.name}/passages", depth=2, dtype="f32")
    >>> parts = [[np.float32([[2, 3]])], [np.float32([[4, 5]]), np.float32([[1, 1]])]]
    >>> with Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=":0") as client:
    ...     pack(client, parts, corpus)
    array([0, 1, 2])
    >>> corpus.topk(np.float32([[1, 0]]), 1)
    (array([4.]), array([1]))
    >>> folder.cleanup()
    """
    threads_of_workers(client)
    corpus = corpus if isinstance(corpus, Corpus) else Corpus.open(corpus)
    ragged = {name: value for name, value in zip(RAGGED, (offsets, lengths, mask)) if value is not None}
    found = _parts(parts, ragged, corpus)
    with locked(corpus.path, corpus._wait), _advancing(progress, None, "packing") as advance:
        before = corpus._for_writing()
        futures = client.compute(_written(found, before, normalize))
        try:
            done = {}
            for future in as_completed(futures):
                done[future.key] = future.result()
                advance(len(done[future.key].ids))
            added = _joined(before, [done[future.key] for future in futures])
            if added.entries:
                corpus._publish(before, added.manifest(before.manifest))
        except BaseException:
            client.cancel(futures)
            clean(corpus.path, read_manifest(corpus.path))  # which may name the new files by now
            raise
    return added.ids


# ------------------------------------------------------------------------------------- parts


def _parts(parts: Any, ragged: dict[str, Any], corpus: Corpus) -> list[Delayed]:
    """Every part as a Delayed mapping of arguments of `Corpus.append`."""
    if not dask.is_dask_collection(parts) and isinstance(parts, Iterable):
        if ragged:
            raise InvalidArgument(
                f"{next(iter(ragged))}: parts are a sequence, whose items have their own; wanted None"
            )
        return [dask.delayed(_of_item)(item) for item in parts]
    if hasattr(parts, "chunks"):
        return _of_array(parts, ragged, corpus)
    if ragged or not hasattr(parts, "npartitions") or not hasattr(parts, "to_delayed"):
        wanted = "a dask.bag.Bag without offsets, lengths and mask, a dask.array.Array, or a sequence"
        raise InvalidArgument(f"parts: a {type(parts).__name__} with {', '.join(ragged) or 'nothing'}, wanted {wanted}")
    return [dask.delayed(_of_partition)(partition) for partition in parts.to_delayed()]


def _of_item(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        return {"x": item}
    unknown = set(item) - set(KEYS)
    if unknown or "x" not in item:
        raise InvalidArgument(
            f"parts: a mapping with {', '.join(map(repr, item))}, wanted x and any of {', '.join(KEYS)}"
        )
    return dict(item)


def _of_partition(elements: Iterable[Any]) -> dict[str, Any]:
    """Elements of a bag: arrays, pairs (id, array) or mappings, all alike."""
    rows = [_of_element(element) for element in elements]
    part: dict[str, Any] = {"x": [row["x"] for row in rows]}
    for name, plural in (("id", "ids"), ("metadata", "metadata")):
        given = [row[name] for row in rows if name in row]
        if given and len(given) < len(rows):
            raise ShapeMismatch(f"parts: {len(given)} of {len(rows)} elements have {name}, wanted all or none")
        if given:
            part[plural] = given
    return part


def _of_element(element: Any) -> Mapping[str, Any]:
    if isinstance(element, Mapping):
        return element
    return {"id": element[0], "x": element[1]} if isinstance(element, tuple) and len(element) == 2 else {"x": element}


def _of_array(x: Any, ragged: dict[str, Any], corpus: Corpus) -> list[Delayed]:
    """Parts of a Dask array: its chunks of padded sets, or about a shard of documents of its tokens."""
    if x.ndim == 3 and "offsets" not in ragged:
        x = x.rechunk({1: -1, 2: -1})
        edges = np.cumsum([0, *x.chunks[0]])
        if not np.isfinite(edges).all():
            raise ShapeMismatch("parts: chunks of unknown size; pass parts.compute_chunk_sizes()")
        cuts = [(begin, end, {name: each[begin:end] for name, each in ragged.items()}) for begin, end in _pairs(edges)]
    elif x.ndim == 2 and set(ragged) == {"offsets"}:
        offsets = read_indices(ragged["offsets"], "offsets")
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != x.shape[0]:
            raise ShapeMismatch(f"offsets: wanted from 0 to {x.shape[0]}, the tokens of parts")
        step = max(1, corpus.info()["shard_bytes"] // (x.shape[1] * NUMPY_DTYPES[corpus.dtype].itemsize))
        inner = np.searchsorted(offsets, np.arange(step, offsets[-1], step))
        edges = np.unique([0, *inner.tolist(), len(offsets) - 1])
        cuts = [
            (offsets[begin], offsets[end], {"offsets": offsets[begin : end + 1] - offsets[begin]})
            for begin, end in _pairs(edges)
        ]
    else:
        raise ShapeMismatch(
            f"parts: a Dask array of shape {x.shape} with {', '.join(ragged) or 'nothing'}; wanted [total, depth] with "
            "offsets, or [count, longest, depth], alone or with lengths or mask"
        )
    return [dask.delayed(_of_slice)(x[begin:end], given) for begin, end, given in cuts]


def _pairs(edges: np.ndarray) -> Iterable[tuple[int, int]]:
    return pairwise(edges.tolist())


def _of_slice(x: np.ndarray, ragged: dict[str, Any]) -> dict[str, Any]:
    return {"x": x, **ragged}


# ------------------------------------------------------------------------------------- tasks


class Written(NamedTuple):
    """What a part has become, or all of them."""

    entries: tuple[ShardEntry, ...]
    ids: np.ndarray
    kind: str | None  # of the ids
    next_id: int
    columns: dict[str, str]

    def manifest(self, before: Manifest) -> Manifest:
        """The corpus with these shards at its end."""
        shards = (*before.shards, *self.entries)
        return before.next(ids=self.kind, next_id=self.next_id, columns=self.columns, shards=shards)


def _written(parts: list[Delayed], before: Snapshot, normalize: bool) -> list[Delayed]:
    """Tasks that write the parts. Each learns its first id from how many documents the parts before it have."""
    corpus, first, written = dask.delayed(Opaque(before, normalize)), before.manifest.next_id, []
    for part in parts:
        written.append(dask.delayed(_write)(corpus, part, first))
        first = dask.delayed(_count)(corpus, part, first)
    return written


class Opaque:
    """The corpus as tasks need it; a class of its own, so that Dask does not look into it."""

    def __init__(self, before: Snapshot, normalize: bool) -> None:
        self.before = before
        self.normalize = normalize

    def collection(self, part: dict[str, Any]) -> Collection:
        ragged = {name: part[name] for name in RAGGED if name in part}
        return as_collection(part["x"], self.before.manifest.depth, self.before.manifest.dtype, **ragged)


def _count(corpus: Opaque, part: dict[str, Any], first: int) -> int:
    """The id after those that a part gets."""
    return first + len(corpus.collection(part))


def _write(corpus: Opaque, part: dict[str, Any], first: int) -> Written:
    """Write a part to shard files, whose names nobody else uses, this task done again included."""
    before = corpus.before
    manifest = replace(before.manifest, next_id=first)
    numbered = Snapshot(before.folder, manifest, [shard.file for shard in before.shards], before.tombstones)
    additions = Additions(numbered, part.get("ids"), part.get("metadata"))
    shards = ShardStream(before.folder, manifest, normalize=corpus.normalize)
    with discarding(shards):
        batch = additions.next(corpus.collection(part))
        additions.finish()
        shards.add(batch, stable=True)
        shards.flush()
    after = additions.manifest(())
    return Written(tuple(shards.entries), additions.ids, after.ids, after.next_id, after.columns)


def _joined(before: Snapshot, parts: list[Written]) -> Written:
    """All parts together, which do not know of one another.

    Raises
    ------
    DuplicateId, UnsupportedDtype
    """
    kind, next_id, columns = before.manifest.ids, before.manifest.next_id, dict(before.manifest.columns)
    for number, part in enumerate(parts):
        if None not in (kind, part.kind) and kind != part.kind:
            raise UnsupportedDtype(f"ids: of kind {part.kind!r} in part {number}, and {kind!r} before; wanted one kind")
        for name, found in part.columns.items():
            if columns.setdefault(name, found) != found:
                raise UnsupportedDtype(
                    f"metadata[{name!r}]: of kind {found!r} in part {number}, and {columns[name]!r} before; "
                    "pass columns= to nk.Corpus.create to say which"
                )
        kind, next_id = kind or part.kind, max(next_id, part.next_id)
    ids = np.concatenate([empty_ids(kind), *(part.ids for part in parts if len(part.ids))])
    twice = first_repeated(ids)
    if twice is not None:
        raise DuplicateId(f"ids: {twice!r} is given twice, wanted every id once")
    return Written(tuple(entry for part in parts for entry in part.entries), ids, kind, next_id, columns)
