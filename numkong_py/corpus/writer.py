"""Writing to a corpus: the lock, documents into shard files, tombstones, and removal of what nobody names.

Whatever is written is a new file that nobody looks at until a manifest names it. So a crash, a full disk or an error
leaves the corpus as it was, plus files that the next writer removes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..arrays import Collection, TokenRuns, collection, read_collection
from ..backends import BACKENDS, select
from ..errors import CorpusLocked, DeviceMismatch, DuplicateId, InvalidArgument, ShapeMismatch, UnsupportedDtype
from ..packed import PackedTensor, pack_collection
from ..storage import digest, is_part, originals_of, write, write_aside
from .columns import column_tensors, empty_ids, first_repeated, id_tensors, kind_of_ids, read_columns, read_ids
from .manifest import Manifest, ShardEntry, TombstonesEntry, read_manifest
from .shards import Shard, Snapshot, open_snapshot

__all__ = [
    "Additions",
    "ShardStream",
    "as_collection",
    "clean",
    "compacted",
    "discarding",
    "locked",
    "may_lie_in_new",
    "retire",
    "settled",
    "write_tombstones",
]

LOCK = "writer.lock"
HOLDER = "writer.json"  # who holds the lock, for the error message of others
FAN = 8  # shards at the end of a corpus that an append merges, so that many small appends leave few files
MOST_ID = (1 << 63) - 1
SHARD, TOMBSTONES = "shard-{}.safetensors", "deleted-{}.i64"  # names of files, with 16 random digits
OURS = re.compile("|".join(name.replace(".", r"\.").format("[0-9a-f]{16}") for name in (SHARD, TOMBSTONES)))


# ------------------------------------------------------------------------------------- one writer


@contextlib.contextmanager
def locked(folder: Path, wait: float) -> Iterator[None]:
    """Hold the writer's lock; the system lets go of it when the process ends, however it ends.

    Raises
    ------
    CorpusLocked
        Another writer holds it for longer than `wait` seconds; the message names it.
    OSError
        The folder cannot be written.
    """
    from filelock import FileLock, Timeout  # here: readers need no lock

    if not folder.is_dir():  # the lock would make it
        raise FileNotFoundError(
            errno.ENOENT, "no corpus is here any more; nk.Corpus.open opens it elsewhere", str(folder)
        )
    lock = FileLock(folder / LOCK, timeout=wait)
    try:
        lock.acquire()
    except Timeout as error:
        raise CorpusLocked(
            f"{folder}: {_holder(folder)} is writing to it; try again when it is done, or open it with wait=<seconds>"
        ) from error
    except (OSError, NotImplementedError) as error:
        number = getattr(error, "errno", None)
        reason = getattr(error, "strerror", None) or str(error)
        raise OSError(number, f"{reason}; the corpus cannot be written, and is unchanged", str(folder)) from error
    try:
        who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # it only serves a message
            (folder / HOLDER).write_text(json.dumps(who))
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(folder: Path) -> str:
    try:
        who = json.loads((folder / HOLDER).read_text())
        return f"process {who['pid']} on {who['host']} (since {who['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def may_lie_in_new(name: str) -> bool:
    """Whether a file may be in a folder where a corpus is created: the lock, and what a killed `create` left."""
    return name in (LOCK, HOLDER) or is_part(name)


def clean(folder: Path, manifest: Manifest) -> None:
    """Remove files that a writer left and the manifest does not name; the caller holds the lock.

    Readers that have them open keep them. Windows refuses that; then the next writer tries again.
    """
    kept = manifest.files
    oldest = time.time() - manifest.grace
    for path in list(folder.iterdir()):
        ours = OURS.fullmatch(path.name) and path.name not in kept
        with contextlib.suppress(OSError):
            if is_part(path.name) or (ours and path.stat().st_mtime <= oldest):
                path.unlink()


def retire(folder: Path, before: Manifest, after: Manifest) -> None:
    """Remove what the older manifest named and the newer one does not, at once or when its grace is over."""
    for name in before.files - after.files:
        with contextlib.suppress(OSError):
            os.utime(folder / name)
    clean(folder, after)


def write_tombstones(folder: Path, positions: np.ndarray) -> TombstonesEntry | None:
    """Write places of deleted documents, rising; None if there are none."""
    if len(positions) == 0:
        return None
    data = positions.astype("<i8").tobytes()
    name = TOMBSTONES.format(secrets.token_hex(8))
    write_aside(folder / name, lambda file: file.write(data))
    return TombstonesEntry(name, digest([data]), len(data), len(positions))


# ------------------------------------------------------------------------------------- documents


class Batch(NamedTuple):
    """Some documents with what belongs to them."""

    documents: Collection
    ids: np.ndarray
    columns: dict[str, tuple[str, list[Any]]]  # kind and values of every column

    def part(self, documents: Collection, begin: int, end: int) -> Batch:
        """Documents begin .. end, which are given."""
        columns = {name: (kind, values[begin:end]) for name, (kind, values) in self.columns.items()}
        return Batch(documents, self.ids[begin:end], columns)


def as_collection(x: Any, depth: int, dtype: str, **ragged: Any) -> Collection:
    """Anything that `pack` takes, or a packed tensor, as a collection of the corpus's depth and type in host memory.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, DeviceMismatch
    """
    if isinstance(x, PackedTensor):
        found = _unpacked(x)
    else:
        found = read_collection(x, "x", depth=depth, dtype=dtype, **ragged)
    if found.dtype != dtype:
        raise UnsupportedDtype(f"x: {found.dtype}, and the corpus has {dtype}; nothing is converted silently")
    if found.depth != depth:
        raise ShapeMismatch(f"x: depth {found.depth}, and the corpus has {depth}")
    if found.device != "cpu":
        raise DeviceMismatch(f"x: on {found.device}, and a corpus is packed in host memory; pass a copy on the host")
    return found


def _unpacked(packed: PackedTensor) -> Collection:
    """The tokens of a packed tensor as they were given, in host memory without a copy."""
    if packed.precision != "exact":
        raise InvalidArgument(
            f"x: packed with precision {packed.precision!r}, and a corpus keeps exact vectors; pass the vectors"
        )
    if packed.device != "cpu":
        packed = packed.to("cpu")
    first = int(packed.contents.offsets[packed.begin])
    tokens = originals_of(packed.contents)[first : first + packed.tokens]
    return collection(tokens, offsets=packed.offsets)


def slice_documents(documents: Collection, begin: int, end: int) -> Collection:
    """Documents begin .. end of a collection in host memory, without a copy."""
    if begin == 0 and end == len(documents):
        return documents
    runs, offsets = documents.runs, documents.offsets
    first, last = int(offsets[begin]), int(offsets[end])
    ends = np.cumsum(runs.counts.astype(np.int64))
    starts = ends - runs.counts.astype(np.int64)
    chosen = slice(int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(starts, last, side="left")))
    skipped = np.maximum(first - starts[chosen], 0)
    counts = np.minimum(ends[chosen], last) - starts[chosen] - skipped
    pointers = runs.pointers[chosen].astype(np.int64) + skipped * runs.row_strides[chosen]
    parts = TokenRuns(
        pointers.astype(np.uint64), counts.astype(np.uint64), runs.row_strides[chosen], runs.element_strides[chosen]
    )
    return Collection(
        documents.source,
        documents.owners,
        documents.depth,
        documents.dtype,
        "cpu",
        offsets=offsets[begin : end + 1] - first,
        runs=parts,
    )


def join(parts: Sequence[Collection]) -> Collection:
    """Collections of one depth and type in host memory as one, without a copy."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    lengths = np.concatenate([part.lengths for part in parts])
    runs = TokenRuns(*(np.concatenate(arrays) for arrays in zip(*(part.runs for part in parts))))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    owners = tuple(owner for part in parts for owner in part.owners)
    return Collection(owners, owners, first.depth, first.dtype, "cpu", offsets=offsets, runs=runs)


def live_documents(shard: Shard) -> Collection:
    """Documents of a shard that are not deleted, as they were given, without a copy: one run per stretch of them."""
    stored = shard.file.stored()
    whole = collection(stored.originals, offsets=stored.offsets)
    if len(shard.tombstones) == 0:
        return whole
    edges = [-1, *shard.tombstones.tolist(), shard.count]
    stretches = [(left + 1, right) for left, right in pairwise(edges) if left + 1 < right]
    return join([slice_documents(whole, *stretch) for stretch in stretches] or [slice_documents(whole, 0, 0)])


def split(batch: Batch, room: int, cost: Callable[[np.ndarray], np.ndarray]) -> Iterator[Batch]:
    """Parts of a batch that cost at most `room` each, or are one document."""
    begin, count = 0, len(batch.documents)
    spent = np.concatenate([[0], np.cumsum(cost(batch.documents.lengths))])
    while begin < count:
        end = max(begin + 1, int(np.searchsorted(spent, spent[begin] + room, side="right")) - 1)
        yield batch.part(slice_documents(batch.documents, begin, end), begin, end)
        begin = end


class ShardStream:
    """Documents in, shard files out: each about as large as asked for, and at most that plus one document.

    Attributes
    ----------
    entries : list of ShardEntry
        What was written.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, normalize: bool = False) -> None:
        self.folder = folder
        self.limit = manifest.shard_bytes
        self.row = select(manifest.dtype)
        self.normalize = normalize
        self.entries: list[ShardEntry] = []
        self._pending: list[Batch] = []
        self._spent = self._taken = 0
        one = 1 << 16
        self._per_token = -(-self.row.pack_size(1, one, manifest.depth, manifest.dtype) // one)

    def cost(self, lengths: np.ndarray) -> np.ndarray:
        """Bytes that documents of so many tokens take, about."""
        return lengths * self._per_token + 64

    def add(self, batch: Batch, *, stable: bool = False, done: Callable[[int], Any] = lambda count: None) -> None:
        """Take documents; unless their memory is stable they are copied before this returns."""
        for part in split(batch, self.limit, self.cost):
            spent = int(self.cost(part.documents.lengths).sum())
            if self._spent + spent > self.limit:
                self.flush()
            self._spent += spent
            full = 2 * self._spent >= self.limit
            as_is = (full or stable) and not self.normalize
            self._pending.append(part if as_is else part._replace(documents=self._copied(part.documents)))
            if full:
                self.flush()
            done(len(part.documents))

    def _copied(self, documents: Collection) -> Collection:
        contents = self.row.pack(documents, self.normalize)
        tokens = np.array(originals_of(contents))
        return collection(tokens, offsets=contents.offsets)

    def flush(self) -> None:
        """Write what is pending to a file."""
        if not self._pending:
            return
        documents = join([batch.documents for batch in self._pending])
        ids = np.concatenate([batch.ids for batch in self._pending])
        packed = pack_collection(documents, self.row)
        tensors = {**id_tensors(ids), **self._columns()}
        name = SHARD.format(secrets.token_hex(8))
        head = write(self.folder / name, packed.contents, single=False, extras=tensors)
        size = (self.folder / name).stat().st_size
        least, most = (None, None) if ids.dtype == object else (int(ids.min()), int(ids.max()))
        entry = ShardEntry(name, head, size, len(ids), packed.tokens, self.row.name, least, most)
        self.entries.append(entry)
        self._pending, self._spent = [], 0

    def _columns(self) -> dict[str, np.ndarray]:
        kinds = {name: kind for batch in self._pending for name, (kind, _) in batch.columns.items()}
        tensors = {}
        for name, kind in kinds.items():
            values: list[Any] = []
            for batch in self._pending:
                values += batch.columns[name][1] if name in batch.columns else [None] * len(batch.ids)
            tensors |= column_tensors(name, kind, values)
        return tensors

    def take_entries(self) -> list[ShardEntry]:
        """What was written since the last call, which is pending no longer."""
        self.flush()
        taken = self.entries[self._taken :]
        self._taken = len(self.entries)
        return taken


@contextlib.contextmanager
def discarding(shards: ShardStream) -> Iterator[None]:
    """Remove what was written if an error stops the writer, unless the manifest names it by then."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            kept = read_manifest(shards.folder).files
            for entry in shards.entries:
                if entry.file not in kept:
                    (shards.folder / entry.file).unlink(missing_ok=True)
        raise


# ------------------------------------------------------------------------------------- what an append brings


class Feed:
    """Values that belong to documents one by one, taken batch by batch from a sequence, an iterator or columns."""

    def __init__(self, values: Any, argument: str) -> None:
        self._argument = argument
        self._columns = None
        self._at, self._total = 0, None
        if isinstance(values, Mapping):
            self._columns = {name: Feed(column, f"{argument}[{name!r}]") for name, column in values.items()}
        elif hasattr(values, "__len__") and hasattr(values, "__getitem__"):
            self._total = len(values)
        else:
            values = iter(values)
        self._values = values

    def take(self, count: int) -> Any:
        """The next so many."""
        if self._columns is not None:
            return {name: column.take(count) for name, column in self._columns.items()}
        if self._total is None:
            taken = list(islice(self._values, count))
        else:
            taken = self._values[self._at : self._at + count]
        self._at += count
        if len(taken) != count:
            raise ShapeMismatch(
                f"{self._argument}: {self._at - count + len(taken)} for {self._at} documents or more; "
                "wanted one for every document"
            )
        return taken

    def finish(self) -> None:
        """Raise if some are left over."""
        for column in (self._columns or {}).values():
            column.finish()
        if self._columns is not None:
            return
        left = self._total != self._at if self._total is not None else next(self._values, self) is not self
        if left:
            raise ShapeMismatch(f"{self._argument}: more than {self._at}, and as many documents; wanted as many")


class Additions:
    """Documents of an append with ids that no document has yet, and metadata; it becomes the next manifest."""

    def __init__(self, before: Snapshot, ids: Any, metadata: Any) -> None:
        self._before = before
        self._kind = before.manifest.ids
        self._next = before.manifest.next_id
        self._columns = dict(before.manifest.columns)
        self._feeds = {
            name: Feed(values, name) for name, values in (("ids", ids), ("metadata", metadata)) if values is not None
        }
        self._parts: list[np.ndarray] = []

    @property
    def ids(self) -> np.ndarray:
        """Ids of all documents so far."""
        return np.concatenate(self._parts) if self._parts else empty_ids(self._kind)

    def next(self, documents: Collection) -> Batch:
        """Documents with their ids and metadata.

        Raises
        ------
        DuplicateId, ShapeMismatch, UnsupportedDtype, InvalidArgument
        """
        count = len(documents)
        ids = self._next_ids(count)
        columns = {}
        if "metadata" in self._feeds:
            columns = read_columns(self._feeds["metadata"].take(count), count, self._columns)
        self._columns |= {name: kind for name, (kind, _) in columns.items()}
        self._parts.append(ids)
        return Batch(documents, ids, columns)

    def _next_ids(self, count: int) -> np.ndarray:
        if "ids" in self._feeds:
            ids = read_ids(self._feeds["ids"].take(count), "ids", self._kind)
            _refuse_repeated(ids)
            self._refuse_known(ids)
        elif self._kind == "str":
            raise InvalidArgument("ids: None, and this corpus has 'str' ids; pass one for every document")
        elif count and self._next + count > MOST_ID:
            raise InvalidArgument(f"ids: None, and the largest id is {self._next - 1}; pass ids")
        else:
            ids = np.arange(self._next, self._next + count)
        if count:
            self._kind = kind_of_ids(ids)
        if count and self._kind == "int":
            self._next = max(self._next, int(ids.max()) + 1)
        return ids

    def _refuse_known(self, ids: np.ndarray) -> None:
        known = np.flatnonzero(self._before.find(ids) >= 0) if self._before.manifest.ids else ()
        if len(known):
            raise DuplicateId(f"ids: {ids.tolist()[known[0]]!r} belongs to a document of the corpus; delete that first")

    def finish(self) -> None:
        """Raise if an id came in two batches, or ids or metadata are left over."""
        for feed in self._feeds.values():
            feed.finish()
        if len(self._parts) > 1 and "ids" in self._feeds:
            _refuse_repeated(self.ids)

    def manifest(self, entries: Sequence[ShardEntry]) -> Manifest:
        """The corpus with these shards at its end."""
        before = self._before.manifest
        shards = (*before.shards, *entries)
        return before.next(ids=self._kind, next_id=self._next, columns=self._columns, shards=shards)


def _refuse_repeated(ids: np.ndarray) -> None:
    twice = first_repeated(ids)
    if twice is not None:
        raise DuplicateId(f"ids: {twice!r} is given twice, wanted every id once")


# ------------------------------------------------------------------------------------- merging shards


def _rewrite(shard: Shard, columns: Mapping[str, str], target: ShardStream) -> None:
    """Documents of a shard that are not deleted, into other files."""
    places = shard.live
    values = {name: (kind, shard.column(name, kind, places).tolist()) for name, kind in columns.items()}
    present = {name: column for name, column in values.items() if any(value is not None for value in column[1])}
    target.add(Batch(live_documents(shard), shard.ids_at(places), present), stable=True)


def settled(before: Snapshot, after: Manifest) -> Manifest:
    """The manifest after an append, its last shards merged if they have become many.

    A run of shards at the end in which none is larger than all behind it together is merged when it has `FAN` members.
    So sizes grow at least twofold from the end to the front but for fewer than that, a corpus of any number of small
    appends has few files, and a document is rewritten about log2(shard_bytes / bytes of an append) times.
    """
    sizes = [entry.bytes for entry in after.shards]
    start, behind = len(sizes), 0
    while start and (behind == 0 or sizes[start - 1] <= behind) and behind + sizes[start - 1] <= after.shard_bytes:
        start -= 1
        behind += sizes[start]
    if len(sizes) - start < FAN:
        return after
    snapshot = open_snapshot(before.folder, after, {shard.path.name: shard.file for shard in before.shards})
    target = ShardStream(before.folder, after)
    with discarding(target):
        for shard in snapshot.shards[start:]:
            _rewrite(shard, after.columns, target)
        target.flush()
        left = snapshot.tombstones[snapshot.tombstones < snapshot.shards[start].begin]
        tombstones = after.tombstones
        if len(left) != len(snapshot.tombstones):
            tombstones = write_tombstones(before.folder, left)
        return replace(after, shards=(*after.shards[:start], *target.entries), tombstones=tombstones)


def compacted(before: Snapshot, advance: Callable[[int], Any]) -> Manifest | None:
    """The manifest after a compaction, or None if there is nothing to do."""
    manifest = before.manifest
    target = ShardStream(before.folder, manifest)
    entries: list[ShardEntry] = []
    with discarding(target):
        for shard, stays in zip(before.shards, _that_stay(before)):
            if stays:
                entries += [*target.take_entries(), shard.file.entry]
            else:
                _rewrite(shard, manifest.columns, target)
            advance(len(shard))
        entries += target.take_entries()
    if tuple(entries) == manifest.shards:
        return None
    return manifest.next(shards=tuple(entries), tombstones=None)


def _that_stay(before: Snapshot) -> list[bool]:
    """Which shards a compaction leaves alone: none deleted, of a row that runs here, and nothing to merge it with."""
    running = {row.name for row in BACKENDS if row.available}
    clean = [len(shard.tombstones) == 0 and shard.row in running for shard in before.shards]
    large = [2 * entry.bytes >= before.manifest.shard_bytes for entry in before.manifest.shards]
    moves = [False, *(not (fine and big) for fine, big in zip(clean, large)), False]
    alone = [not left and not right for left, right in zip(moves, moves[2:])]
    return [fine and (big or lonely) for fine, big, lonely in zip(clean, large, alone)]
