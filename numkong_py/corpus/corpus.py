"""`Corpus`: a folder of immutable shard files and a manifest, with one writer and any number of readers."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..backends import BACKENDS
from ..dtypes import name_of
from ..errors import CorruptFile, InvalidArgument, NumKongError, ShapeMismatch, UnknownId
from ..ops import maxsim
from ..packed import PackedTensor
from ..storage import VERIFY, RepackWarning, sync_folder
from .columns import KINDS, check_column_name, read_ids
from .manifest import MANIFEST, Manifest, read_manifest, write_manifest
from .search import (
    Hits,
    Queries,
    Selection,
    check_options,
    fill,
    read_candidates,
    shards_topk,
    threshold,
)
from .shards import Shard, Snapshot, open_snapshot
from .writer import (
    Additions,
    ShardStream,
    as_collection,
    clean,
    compacted,
    discarding,
    locked,
    may_lie_in_new,
    retire,
    settled,
    write_tombstones,
)

__all__ = ["Alignment", "Corpus", "Explanation"]

SHARD_BYTES = 256 << 20  # of a shard file: few files for a big corpus, and little to rewrite when it is compacted
MOST = 1 << 62  # of a count that is added to others in 64 bits
MISSING = ("raise", "ignore")


class Alignment(NamedTuple):
    """Which token of a document each query token matched, and how well."""

    argmax: np.ndarray  # int32 [query tokens], the place among the document's valid tokens; -1 for an empty document
    token_scores: np.ndarray  # [query tokens], the similarity with it


class Explanation(NamedTuple):
    """What a document's score for a query is made of."""

    id: Any
    score: float
    mean_score: float
    bound: float  # |score - exact| is at most this
    metric: str
    document_tokens: int
    argmax: np.ndarray
    token_scores: np.ndarray
    metadata: dict[str, Any]

    def __str__(self) -> str:
        lines = [
            f"document {self.id!r}: {self.metric} {self.score:.6g} (mean {self.mean_score:.6g}, exact to "
            f"{self.bound:.1g}) from {len(self.argmax)} query tokens against {self.document_tokens}",
        ]
        lines += [f"  {name}: {value}" for name, value in self.metadata.items()]
        pairs = zip(self.argmax.tolist(), self.token_scores.tolist())
        lines += [f"  query token {i:>3} -> {place:>5}  {score:.6g}" for i, (place, score) in enumerate(pairs)]
        return "\n".join(lines)


class Metadata(Mapping[str, np.ndarray]):
    """Metadata of a snapshot's documents: columns by name, rows by id. Columns are read when they are asked for."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __len__(self) -> int:
        return len(self._snapshot.manifest.columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self._snapshot.manifest.columns)

    def __repr__(self) -> str:
        return f"<numkong_py metadata: {dict(self._snapshot.manifest.columns)}>"

    def __getitem__(self, name: str) -> np.ndarray:
        """A column over all documents, in the order of `Corpus.ids`; None where a document has no value."""
        kind = self._snapshot.manifest.columns[name]
        parts = [shard.column(name, kind, shard.live) for shard in self._snapshot.shards]
        return np.concatenate([np.zeros(0, KINDS[kind]), *parts]) if parts else np.zeros(0, KINDS[kind])

    def rows(self, ids: Any) -> list[dict[str, Any]]:
        """What is known of each document, in the order of the ids.

        Raises
        ------
        UnknownId
        """
        positions = _positions(self._snapshot, ids, "ids", None)
        columns = {name: self._at(name, kind, positions) for name, kind in self._snapshot.manifest.columns.items()}
        return [dict(zip(columns, row)) for row in zip(*columns.values())] or [{} for _ in positions]

    def _at(self, name: str, kind: str, positions: np.ndarray) -> list[Any]:
        return self._snapshot.gather(positions, lambda shard, places: shard.column(name, kind, places), None).tolist()


def _positions(snapshot: Snapshot, ids: Any, argument: str, missing: str | None) -> np.ndarray:
    """Places of documents by id; with missing="ignore" -1 where there is none; None where the caller has no choice."""
    found = read_ids(ids, argument, snapshot.manifest.ids)
    positions = snapshot.find(found)
    unknown = np.flatnonzero(positions < 0)
    if len(unknown) and missing != "ignore":
        more = f" and {len(unknown) - 1} others" if len(unknown) > 1 else ""
        choice = '; pass missing="ignore"' if missing else ""
        raise UnknownId(f"{argument}: no document {found.tolist()[unknown[0]]!r}{more} in the corpus{choice}")
    return positions


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidArgument(f"{name}: {value!r}, wanted one of {', '.join(map(repr, choices))}")


def _check_wait(wait: Any) -> None:
    if not isinstance(wait, Real) or not wait >= 0:
        raise InvalidArgument(f"wait: {wait!r}, wanted seconds, at least 0")


@contextlib.contextmanager
def _advancing(progress: Any, total: int | None, what: str, unit: str = "doc") -> Iterator[Callable[[int], Any]]:
    """What advances a bar: a callable as it is; True shows a bar, None on a terminal only."""
    if callable(progress) or progress is False:
        yield progress or (lambda count: None)
        return
    from tqdm.auto import tqdm

    shown = {"delay": 0.5, "disable": None} if progress is None else {"disable": False}  # no bar for what is quick
    with tqdm(total=total, unit=unit, unit_scale=unit == "B", desc=what, **shown) as bar:
        yield bar.update


class Corpus:
    """A searchable collection of documents in a folder: made by `create`, opened by `open`.

    A corpus object shows the corpus as it was when it was opened, refreshed or written to by this object, whatever
    others write. Threads may share it for reading.

    Attributes
    ----------
    path : Path
    depth : int
    dtype : str
    shards : tuple of Shard
        The files of this snapshot.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> corpus = Corpus.create(f"{folder.name}/passages", depth=2, dtype="f32")
    >>> corpus.append([np.float32([[2, 3]]), np.float32([[4, 5]])], metadata={"title": ["one", "two"]})
    array([0, 1])
    >>> corpus.delete([0])
    1
    >>> Corpus.open(f"{folder.name}/passages").topk(np.float32([[1, 0]]), 2)
    (array([  4., -inf]), array([ 1, -1]))
    >>> folder.cleanup()
    """

    def __init__(self, path: Path, snapshot: Snapshot, wait: float) -> None:
        self.path = path
        self._snapshot = snapshot
        self._wait = wait

    # --------------------------------------------------------------------------------- open and create

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        depth: int,
        dtype: Any,
        *,
        columns: Mapping[str, str] | None = None,
        shard_bytes: int = SHARD_BYTES,
        grace: float = 0.0,
        wait: float = 0.0,
    ) -> Corpus:
        """Make an empty corpus in a folder that does not exist or is empty.

        Parameters
        ----------
        path : path
        depth : int
            Elements of a token vector.
        dtype : str or dtype
            ``"bf16"``, ``"f16"`` or ``"f32"``.
        columns : mapping, optional
            Kinds of metadata columns by name: ``"int"``, ``"float"``, ``"bool"``, ``"str"``. Others are added, of the
            kind of their first values, by `append`.
        shard_bytes : int
            Size that shard files are kept to.
        grace : float
            Seconds that replaced files stay, for readers on other machines that open them by name.
        wait : float
            Seconds that writes of this object wait for another writer.

        Raises
        ------
        InvalidArgument, UnsupportedDtype, OSError
        """
        folder = Path(path)
        for name, value in (("depth", depth), ("shard_bytes", shard_bytes)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= MOST:
                raise InvalidArgument(f"{name}: {value!r}, wanted an integer from 1 to 2^62")
        if not isinstance(grace, Real) or not 0 <= grace < math.inf:
            raise InvalidArgument(f"grace: {grace!r}, wanted seconds, at least 0 and finite")
        _check_wait(wait)
        for name, kind in (columns or {}).items():
            check_column_name(name, "columns")
            _check_choice(f"columns[{name!r}]", kind, tuple(KINDS))
        manifest = Manifest(int(depth), name_of(dtype), int(shard_bytes), float(grace), columns=dict(columns or {}))
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, wait):
            if (folder / MANIFEST).exists():
                raise InvalidArgument(f"path: {folder} has a corpus already; nk.Corpus.open opens it")
            other = next((name for name in os.listdir(folder) if not may_lie_in_new(name)), None)
            if other is not None:
                raise InvalidArgument(f"path: {folder} has {other!r} in it, wanted an empty or a new folder")
            write_manifest(folder, manifest)
        sync_folder(folder.absolute().parent, str(folder))
        return cls(folder, open_snapshot(folder, manifest), wait)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        verify: str = "header",
        wait: float = 0.0,
        progress: Any = None,
    ) -> Corpus:
        """Open a corpus as it is now. The manifest is read; shards are mapped when they are needed.

        Parameters
        ----------
        path : path
        verify : {"header", "full"}
            ``"header"`` checks the manifest, the deleted documents and the sizes of all files now, and a shard's
            headers and document offsets when it is first used; ``"full"`` reads everything and checks all hashes.
        wait : float
            Seconds that writes of this object wait for another writer.
        progress : bool or callable, optional
            For ``verify="full"``: None shows a bar on a terminal, a callable gets numbers of bytes.

        Raises
        ------
        CorruptFile
            A file is missing, truncated or damaged.
        FileNotFoundError
            There is no corpus.
        InvalidArgument, OSError
        """
        _check_choice("verify", verify, VERIFY)
        _check_wait(wait)
        folder = Path(path)
        snapshot = _newest(folder, None)
        _warn_of_rows(snapshot)
        if verify == "full":
            total = sum(entry.bytes for entry in snapshot.manifest.shards)
            with _advancing(progress, total, "verifying", "B") as advance:
                for shard in snapshot.shards:
                    shard.file.verify(advance)
        return cls(folder, snapshot, wait)

    def refresh(self) -> Corpus:
        """Move on to the corpus as it is now, and return itself."""
        self._snapshot = _newest(self.path, self._snapshot)
        return self

    # --------------------------------------------------------------------------------- what there is

    def __len__(self) -> int:
        return len(self._snapshot)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.ids.tolist())

    def __repr__(self) -> str:
        return (
            f"<numkong_py.Corpus {str(self.path)!r}: {len(self)} documents x [tokens, {self.depth}] {self.dtype}, "
            f"{len(self.shards)} shards, generation {self._snapshot.manifest.generation}>"
        )

    def __contains__(self, id: Any) -> bool:
        try:
            return bool(self._snapshot.find(read_ids([id], "id", self._snapshot.manifest.ids))[0] >= 0)
        except NumKongError:
            return False

    @property
    def depth(self) -> int:
        """Elements of a token vector."""
        return self._snapshot.manifest.depth

    @property
    def dtype(self) -> str:
        """Element type: ``"bf16"``, ``"f16"`` or ``"f32"``."""
        return self._snapshot.manifest.dtype

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shard files of this snapshot, in the order of their documents."""
        return self._snapshot.shards

    @property
    def ids(self) -> np.ndarray:
        """Ids of all documents in the order in which they were appended: int64, or str in an object array."""
        return self._snapshot.live_ids()

    @property
    def metadata(self) -> Metadata:
        """Metadata columns by name, and rows by id: ``corpus.metadata["year"]``, ``corpus.metadata.rows(ids)``."""
        return Metadata(self._snapshot)

    def info(self) -> dict[str, Any]:
        """Facts from the manifest; no shard is read."""
        manifest = self._snapshot.manifest
        return {
            "path": str(self.path),
            "generation": manifest.generation,
            "documents": len(self),
            "deleted": len(self._snapshot.tombstones),
            "tokens": sum(entry.tokens for entry in manifest.shards),
            "depth": manifest.depth,
            "dtype": manifest.dtype,
            "precision": "exact",
            "ids": manifest.ids,
            "columns": dict(manifest.columns),
            "shards": len(manifest.shards),
            "shard_bytes": manifest.shard_bytes,
            "bytes": sum(entry.bytes for entry in manifest.shards),
            "backends": sorted({entry.row for entry in manifest.shards}),
        }

    def __getitem__(self, id: Any) -> PackedTensor:
        """One document by its id, mapped.

        Raises
        ------
        UnknownId
        """
        return self._document(id)[0]

    def _document(self, id: Any) -> tuple[PackedTensor, Snapshot]:
        snapshot = self._snapshot
        position = int(_positions(snapshot, [id], "id", None)[0])
        shard, place = snapshot.locate(position)
        return shard.open()[place], snapshot

    # --------------------------------------------------------------------------------- writing

    def append(
        self,
        x: Any,
        ids: Any = None,
        metadata: Any = None,
        *,
        offsets: Any = None,
        lengths: Any = None,
        mask: Any = None,
        normalize: bool = False,
        progress: Any = None,
    ) -> np.ndarray:
        """Add documents at the end: all of them or, after an error or a crash, none. When it returns they are kept.

        Parameters
        ----------
        x : array, list of arrays, Collection, PackedTensor or iterator of any of these
            An iterator (of batches, which may be larger than memory together) is read once, and each of its items may
            be overwritten after it was taken; one 2-D array is one document.
        ids : sequence or iterator of int or str, optional
            One for every document, each once. Default: integers that count on from the largest.
        metadata : mapping of columns, or sequence or iterator of mappings, optional
            Values of columns, int, float, bool, str or None, one for every document.
        offsets, lengths, mask : array, optional
            As for `pack`, unless x is an iterator.
        normalize : bool
            As for `pack`.
        progress : bool or callable, optional
            None shows a bar on a terminal; a callable gets numbers of documents.

        Returns
        -------
        array
            The ids of the documents.

        Raises
        ------
        DuplicateId
            An id is given twice, or belongs to a document of the corpus. A deleted document's id is free again.
        CorpusLocked
            Another writer is at work.
        UnsupportedDtype, ShapeMismatch, DeviceMismatch, InvalidArgument, OSError
        """
        ragged = {"offsets": offsets, "lengths": lengths, "mask": mask}
        stream = isinstance(x, Iterator)
        if stream and any(value is not None for value in ragged.values()):
            raise InvalidArgument(
                "offsets, lengths, mask: x is an iterator, whose batches are collections; wanted None"
            )
        read = partial(as_collection, depth=self.depth, dtype=self.dtype)
        batches = map(read, x) if stream else [read(x, **ragged)]
        total = None if stream else len(batches[0])
        with locked(self.path, self._wait), _advancing(progress, total, "appending") as advance:
            before = self._for_writing()
            additions = Additions(before, ids, metadata)
            shards = ShardStream(self.path, before.manifest, normalize=normalize)
            with discarding(shards):
                for batch in map(additions.next, batches):
                    if not stream:
                        additions.finish()
                    shards.add(batch, done=advance)
                additions.finish()
                shards.flush()
                if shards.entries:
                    self._publish(before, settled(before, additions.manifest(shards.entries)))
        return additions.ids

    def delete(self, ids: Any, *, missing: str = "raise") -> int:
        """Remove documents; others keep their ids, order and scores. The space comes back with `compact`.

        Parameters
        ----------
        ids : sequence of int or str
        missing : {"raise", "ignore"}
            What to do about ids that no document has.

        Returns
        -------
        int
            How many documents were removed.

        Raises
        ------
        UnknownId, CorpusLocked, UnsupportedDtype, InvalidArgument, OSError
        """
        _check_choice("missing", missing, MISSING)
        with locked(self.path, self._wait):
            before = self._for_writing()
            positions = _positions(before, ids, "ids", missing)
            gone = np.unique(positions[positions >= 0])
            if len(gone) == 0:
                return 0
            tombstones = np.union1d(before.tombstones, gone)
            after = before.manifest.next(tombstones=write_tombstones(self.path, tombstones))
            self._publish(before, after)
        return len(gone)

    def compact(self, *, progress: Any = None) -> int:
        """Rewrite shards that have deleted documents, are small, or are of a row that cannot run here.

        Documents keep their ids and order, and scores their bits. Readers that have the corpus open keep their files.

        Parameters
        ----------
        progress : bool or callable, optional
            None shows a bar on a terminal; a callable gets numbers of documents.

        Returns
        -------
        int
            By how many bytes the corpus is smaller.

        Raises
        ------
        CorpusLocked, CorruptFile, OSError
        """
        with locked(self.path, self._wait), _advancing(progress, len(self), "compacting") as advance:
            before = self._for_writing()
            after = compacted(before, advance)
            if after is not None:
                self._publish(before, after)
        return sum(e.bytes for e in before.manifest.shards) - sum(e.bytes for e in self._snapshot.manifest.shards)

    def _for_writing(self) -> Snapshot:
        """The newest snapshot, with the leftovers of a writer that did not finish removed; the lock is held."""
        self.refresh()
        clean(self.path, self._snapshot.manifest)
        return self._snapshot

    def _publish(self, before: Snapshot, after: Manifest) -> None:
        """Make a manifest the corpus: before this readers see all of the old one, after it all of the new one."""
        known = {shard.path.name: shard.file for shard in before.shards}
        snapshot = open_snapshot(self.path, after, known)
        write_manifest(self.path, after)
        self._snapshot = snapshot
        retire(self.path, before.manifest, after)

    # --------------------------------------------------------------------------------- search

    def topk(
        self,
        queries: Any,
        k: int,
        *,
        include: Any = None,
        exclude: Any = None,
        candidates: Any = None,
        missing: str = "raise",
        min_mean_score: float | None = None,
        block: int | None = None,
        screen: str = "auto",
        metric: str = "dot",
        reduction: str = "sum",
        empty: float | None = None,
        threads: int | None = None,
        progress: Any = False,
        score: Callable[..., Hits] = shards_topk,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the best k documents of every query, exactly: the scores that `numkong_py.topk` would give.

        Parameters
        ----------
        queries : array, list of arrays, Collection or PackedTensor
            On the host, or on a CUDA device, where the documents are then moved block by block.
        k : int
        include, exclude : sequence of ids, optional
            Look only among these; leave these out. Excluded ids that no document has exclude nothing.
        candidates : table or lists of ids, optional
            ``[queries, count]`` or one list for every query (one list for one query): look only among these, as found
            by another index. -1 and None are none; a repeated id counts once.
        missing : {"raise", "ignore"}
            What to do about included and candidate ids that no document has.
        min_mean_score : float, optional
            Hits with a smaller mean score per valid query token are none. For angular: with a larger one.
        block : int, optional
            Score this many documents at a time; default a shard.
        screen, metric, reduction, empty, threads
            As for `numkong_py.topk`.
        progress : bool or callable
            True shows a bar, None on a terminal only; a callable gets numbers of documents.
        score : callable, optional
            Who scores the shards: `numkong_py.distributed` puts itself here.

        Returns
        -------
        scores, ids : arrays
            ``[queries, k]``, ``[k]`` for one 2-D query, in host memory. Best first, ties in the order in which the
            documents were appended, NaN last. Where there are fewer than k hits: id -1 (None for str ids) and the
            score -inf (+inf for angular).

        Raises
        ------
        UnknownId, InvalidArgument, ShapeMismatch, UnsupportedDtype, DeviceMismatch, CorruptFile
        """
        check_options(metric, reduction, k, block, screen, threads, min_mean_score)
        _check_choice("missing", missing, MISSING)
        snapshot = self._snapshot
        found = Queries(queries, self.depth, self.dtype)
        descending, mean = metric != "angular", reduction == "mean"
        selection = _select(snapshot, len(found), include, exclude, candidates, missing)
        options = {"metric": metric, "reduction": reduction, "empty": empty, "screen": screen, "threads": threads}
        with _advancing(progress, snapshot.count, "searching") as advance:
            best = score(snapshot.shards, found, k, selection, block=block, progress=advance, **options)
        scores, places = best
        if min_mean_score is not None:
            kept = threshold(best, found.lengths, min_mean_score, mean=mean, descending=descending)
            places = np.where(kept, places, -1)
        scores, places = fill((scores, places), k, descending=descending)
        ids = snapshot.ids_at(places)
        return (scores[0], ids[0]) if found.single else (scores, ids)

    def alignment(self, query: Any, id: Any, *, metric: str = "dot") -> Alignment:
        """Which token of a document each token of a query matched.

        Parameters
        ----------
        query : array or PackedTensor
            One query, ``[tokens, depth]``.
        id : int or str
        metric : {"dot", "cosine", "angular"}

        Raises
        ------
        UnknownId, ShapeMismatch, UnsupportedDtype
        """
        explained = self.explain(query, id, metric=metric)
        return Alignment(explained.argmax, explained.token_scores)

    def explain(self, query: Any, id: Any, *, metric: str = "dot") -> Explanation:
        """What a document's score for a query is made of; ``print`` shows it.

        Parameters
        ----------
        query : array or PackedTensor
            One query, ``[tokens, depth]``.
        id : int or str
        metric : {"dot", "cosine", "angular"}

        Raises
        ------
        UnknownId, ShapeMismatch, UnsupportedDtype
        """
        document, snapshot = self._document(id)
        queries = Queries(query, self.depth, self.dtype)
        if len(queries) != 1:
            raise ShapeMismatch(f"query: {len(queries)} queries, wanted one; pass one of them")
        packed = queries.packed_for(document)
        whole = maxsim(
            packed, document, metric=metric, return_argmax=True, return_token_scores=True, return_bounds=True
        )
        scores, argmax, token_scores, bounds = (np.asarray(array).reshape(-1) for array in whole)
        count = int(queries.lengths[0])
        (metadata,) = Metadata(snapshot).rows([id])
        score = float(scores[0])
        mean = score / count if count else score
        bound = float(bounds[0])
        return Explanation(
            id, score, mean, bound, metric, document.tokens, argmax[:count], token_scores[:count], metadata
        )


# ------------------------------------------------------------------------------------- reading


def _newest(folder: Path, known: Snapshot | None) -> Snapshot:
    """The snapshot of the newest manifest; one that a writer replaces while its files are opened is read again."""
    files = {shard.path.name: shard.file for shard in known.shards} if known else {}
    while True:
        manifest = read_manifest(folder)
        if known is not None and manifest == known.manifest:
            return known
        try:
            return open_snapshot(folder, manifest, files)
        except FileNotFoundError as error:
            if read_manifest(folder).generation == manifest.generation:
                raise CorruptFile(f"{error.filename}: named by the manifest, and missing") from error


def _warn_of_rows(snapshot: Snapshot) -> None:
    """Say aloud that shards will be packed again whenever they are searched."""
    reasons = {row.name: row.reason for row in BACKENDS}
    for name in sorted({shard.row for shard in snapshot.shards}):
        reason = reasons.get(name, "this build does not have it")
        if reason is not None:
            warnings.warn(
                f"{snapshot.folder}: has shards packed by row {name!r}, which cannot run here ({reason}): they are "
                "packed again in memory to be searched; compact() rewrites them",
                RepackWarning,
                stacklevel=3,
            )


def _select(
    snapshot: Snapshot, count: int, include: Any, exclude: Any, candidates: Any, missing: str
) -> Selection | None:
    if include is None and exclude is None and candidates is None:
        return None
    nothing = np.zeros(0, np.int64)
    included = None if include is None else np.unique(_positions(snapshot, include, "include", missing))
    excluded = nothing if exclude is None else np.unique(_positions(snapshot, exclude, "exclude", "ignore"))
    table = None if candidates is None else _candidate_places(snapshot, candidates, count, missing)
    return Selection(None if included is None else included[included >= 0], excluded[excluded >= 0], table)


def _candidate_places(snapshot: Snapshot, candidates: Any, count: int, missing: str) -> np.ndarray:
    """Places [queries, count] of candidates, -1 for none."""
    lists = [[each for each in ids if each is not None] for ids in read_candidates(candidates, count)]
    lists = [[each for each in ids if isinstance(each, str) or each != -1] for ids in lists]
    found = _positions(snapshot, [each for ids in lists for each in ids], "candidates", missing)
    table = np.full((count, max(map(len, lists), default=0)), -1)
    edges = np.cumsum([0, *map(len, lists)])
    for row, (begin, end) in zip(table, pairwise(edges.tolist())):
        row[: end - begin] = found[begin:end]
    return table
