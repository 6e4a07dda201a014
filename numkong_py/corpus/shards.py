"""Shard files of a snapshot: pinned when the corpus is opened, checked and mapped when they are first needed."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..cpu import open_packed
from ..errors import CorruptFile, LayoutMismatch
from ..packed import PackedTensor, from_stored
from ..storage import Stored, digest, read
from .columns import Ids, empty_ids, hashes_of, read_column
from .manifest import Manifest, ShardEntry, TombstonesEntry
from .reading import READERS, Room, start_reading

__all__ = ["Shard", "ShardFile", "Snapshot", "open_snapshot", "read_ahead", "read_tombstones"]

PIN = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
READ_LIMIT = 1 << 29  # bytes of a shard that may be read into memory; larger ones are mapped, whatever that costs
SAMPLE = 32  # places of a file that are asked for, to see whether it is in memory
REPACKED_LIMIT = 1 << 30  # bytes of shards packed again in memory (their row cannot run here) that are kept


class ShardFile:
    """A shard file. While it is pinned, its contents stay readable even if its name goes away."""

    def __init__(self, path: Path, entry: ShardEntry) -> None:
        self.path = path
        self.entry = entry
        self._lock = threading.Lock()
        self._stored: Stored | None = None
        self._packed: PackedTensor | None = None
        self._handle: int | None = None
        self._release: Callable[[], Any] = lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardFile, (self.path, self.entry)

    def pin(self) -> None:
        """Hold on to the file.

        Raises
        ------
        CorruptFile
            It has another size than the manifest says.
        OSError
        """
        try:
            handle = os.open(self.path, PIN)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            reason = (
                f"{error.strerror}: a corpus holds one file for each shard; raise the limit (`ulimit -n`), or make it "
                "with fewer shards (shard_bytes= of nk.Corpus.create)"
            )
            raise OSError(error.errno, reason, str(self.path)) from error
        size = os.fstat(handle).st_size
        if size != self.entry.bytes:
            os.close(handle)
            raise CorruptFile(
                f"{self.path}: {size} bytes, and the manifest says {self.entry.bytes}: truncated, or changed by others"
            )
        self._handle = handle
        self._release = weakref.finalize(self, os.close, handle)

    def stored(self) -> Stored:
        """What the file holds, mapped; its headers, sizes and offsets are checked the first time."""
        with self._lock:
            if self._stored is None:
                self._stored = self._read(verify="header")
            return self._stored

    def verify(self, progress: Callable[[int], Any] | None = None) -> None:
        """Read all of the file and check all hashes."""
        with self._lock:
            self._stored = self._read(verify="full", progress=progress)

    def _read(self, **options: Any) -> Stored:
        if self._handle is None:
            self.pin()
        file = os.fdopen(os.dup(self._handle), "rb")
        file.seek(0)
        stored = read(self.path, file=file, **options)
        if stored.head != self.entry.head or len(stored.offsets) - 1 != self.entry.documents:
            raise CorruptFile(f"{self.path}: an intact file, but not the one that the manifest names")
        self._release()  # the map holds the file from here on
        self._handle = None
        return stored

    def packed(self, keep: bool) -> PackedTensor:
        """The documents, as they lie or packed again; what was packed again is kept in memory if asked for."""
        stored = self.stored()
        with self._lock:
            if self._packed is not None:
                return self._packed
            packed = from_stored(stored)
            if keep or not stored.unavailable:
                self._packed = packed
            return packed

    def is_cold(self) -> bool:
        """Whether most of the file has to come from the disk, as far as the system tells.

        Asked of a sample, with reads that the system refuses where it would have to wait (Linux has those).
        """
        if not hasattr(os, "RWF_NOWAIT") or self.entry.bytes > READ_LIMIT or self.stored().unavailable:
            return False
        room = [bytearray(1)]
        places = np.linspace(0, self.entry.bytes - 1, SAMPLE).astype(int).tolist()
        absent = 0
        with contextlib.suppress(OSError), open(self.path, "rb", buffering=0) as file:  # gone, or no such reads here
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else each of them starts reading ahead
            for place in places:
                try:
                    os.preadv(file.fileno(), room, place, os.RWF_NOWAIT)
                except BlockingIOError:
                    absent += 1
        return 2 * absent > SAMPLE

    def start_reading(self, readers: Executor, room: Room, *, direct: bool) -> Callable[[], PackedTensor | None]:
        """Start to read the documents from the disk instead of mapping them; what is returned waits for them.

        It gives None if the file has lost its name. `direct`: see `reading.start_reading`.
        """
        stored = self.stored()
        finish = start_reading(readers, self.path, stored.start, stored.buffer.nbytes, room, direct=direct)

        def documents() -> PackedTensor | None:
            try:
                return PackedTensor(open_packed(finish()))
            except FileNotFoundError:
                return None
            except LayoutMismatch as error:
                raise CorruptFile(f"{self.path}: {error}") from error

        return documents


def read_ahead(
    shards: Iterable[Shard], whole: Callable[[Shard], bool], *, direct: bool
) -> Iterator[tuple[Shard, PackedTensor | None]]:
    """Shards, each with its documents in memory if they had to come from the disk and are wanted whole.

    While one is in use the next one is read, in large pieces: a mapped file comes page by page, when it is needed, and
    the processor waits. So the disk and the processor are both busy, in the memory of two shards. What is handed out is
    overwritten after the next one was asked for. `direct`: see `reading.start_reading`.
    """
    rooms = Room(), Room()
    readers = ThreadPoolExecutor(READERS, thread_name_prefix="numkong_py-read")
    try:
        before: tuple[Shard, Callable[[], PackedTensor | None] | None] | None = None
        for number, shard in enumerate(shards):
            cold = whole(shard) and shard.file.is_cold()
            now = shard, shard.file.start_reading(readers, rooms[number % 2], direct=direct) if cold else None
            if before is not None:
                yield before[0], before[1] and before[1]()
            before = now
        if before is not None:
            yield before[0], before[1] and before[1]()
    finally:
        readers.shutdown(cancel_futures=True)


class Shard:
    """Documents of one file in a snapshot of a corpus; nothing about it changes.

    Attributes
    ----------
    path : Path
    begin : int
        Place of its first document among all documents of the snapshot, deleted ones included.
    count : int
        Documents in the file, deleted ones included.
    tokens : int
    row : str
        Name of the row that packed it.
    tombstones : array
        Places in the file of deleted documents, int64, rising.
    """

    def __init__(self, file: ShardFile, begin: int, tombstones: np.ndarray, kind: str, keep: bool = True) -> None:
        self.file = file
        self.path = file.path
        self.begin = begin
        self.count, self.tokens, self.row = file.entry.documents, file.entry.tokens, file.entry.row
        self.tombstones = tombstones
        self._kind = kind
        self._keep = keep

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.file, self.begin, self.tombstones, self._kind, self._keep)

    def with_file(self, file: ShardFile) -> Shard:
        """The same documents, from a copy of the file."""
        return Shard(file, self.begin, self.tombstones, self._kind, self._keep)

    def __len__(self) -> int:
        return self.count - len(self.tombstones)

    def __repr__(self) -> str:
        return f"<numkong_py shard {self.path.name}: {len(self)} of {self.count} documents, {self.tokens} tokens>"

    @property
    def end(self) -> int:
        """Place behind its last document."""
        return self.begin + self.count

    @property
    def live(self) -> np.ndarray:
        """Places in the file of documents that are not deleted, int64."""
        return np.delete(np.arange(self.count), self.tombstones)

    def open(self) -> PackedTensor:
        """All documents of the file, deleted ones included, memory-mapped.

        Raises
        ------
        CorruptFile, OSError
        """
        return self.file.packed(self._keep)

    @property
    def ids(self) -> np.ndarray:
        """Ids of all documents of the file, deleted ones included."""
        return self._ids.all()

    @cached_property
    def _ids(self) -> Ids:
        return Ids(self.file.stored().extras, self.count)

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Ids of documents by their place in the file."""
        return self._ids.at(positions)

    def find(self, ids: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        """Places in the file of documents that are not deleted by ids and their `hashes_of`, -1 where there is none."""
        entry = self.file.entry
        if entry.least_id is not None and ids.dtype != object:
            possible = np.flatnonzero((ids >= entry.least_id) & (ids <= entry.most_id))
        else:
            possible = np.arange(len(ids))
        found = np.full(len(ids), -1)
        if len(possible):
            positions = self._ids.find(ids[possible], hashes[possible])
            found[possible] = np.where(np.isin(positions, self.tombstones), -1, positions)
        return found

    def column(self, name: str, kind: str, positions: np.ndarray) -> np.ndarray:
        """Values of a metadata column by place in the file."""
        return read_column(self.file.stored().extras, name, kind, positions, self.count)


class Snapshot:
    """A manifest and the files that it names, as they were when it was read."""

    def __init__(self, folder: Path, manifest: Manifest, files: Sequence[ShardFile], tombstones: np.ndarray) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tombstones = tombstones  # places among all documents, rising
        begins = np.cumsum([0, *(entry.documents for entry in manifest.shards)])
        cuts = np.searchsorted(tombstones, begins)
        keep = sum(entry.bytes for entry in manifest.shards) <= REPACKED_LIMIT
        self.count = int(begins[-1])  # documents, deleted ones included
        self.shards = tuple(
            Shard(file, begin, tombstones[first:last] - begin, manifest.ids or "int", keep)
            for file, begin, first, last in zip(files, begins.tolist(), cuts[:-1], cuts[1:])
        )
        self.begins = begins[:-1]

    def __len__(self) -> int:
        return self.count - len(self.tombstones)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Places of documents among all documents by their ids, int64, -1 where there is none."""
        found, hashes = np.full(len(ids), -1), hashes_of(ids)
        for shard in self.shards:
            missing = np.flatnonzero(found < 0)
            if len(missing) == 0:
                break
            positions = shard.find(ids[missing], hashes[missing])
            found[missing] = np.where(positions < 0, -1, positions + shard.begin)
        return found

    def locate(self, position: int) -> tuple[Shard, int]:
        """The shard that has a document, and its place in there."""
        shard = self.shards[int(np.searchsorted(self.begins, position, side="right")) - 1]
        return shard, position - shard.begin

    def gather(
        self, positions: np.ndarray, of_shard: Callable[[Shard, np.ndarray], np.ndarray], empty: Any
    ) -> np.ndarray:
        """Values of documents anywhere by place, asked of each shard once; `empty` where the place is -1."""
        found = np.full(positions.shape, empty, object)
        owners = np.where(positions < 0, -1, np.searchsorted(self.begins, positions, side="right") - 1)
        for number in np.unique(owners[owners >= 0]):
            shard = self.shards[number]
            found[owners == number] = of_shard(shard, positions[owners == number] - shard.begin)
        return found

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Ids of documents by place: int64 with -1 for none, or str with None for none."""
        if self.manifest.ids == "str":
            return self.gather(positions, Shard.ids_at, None)
        return self.gather(positions, Shard.ids_at, -1).astype(np.int64)

    def live_ids(self) -> np.ndarray:
        """Ids of all documents that are not deleted, in order."""
        parts = [np.delete(shard.ids, shard.tombstones) for shard in self.shards]
        return np.concatenate([empty_ids(self.manifest.ids), *parts])


def open_snapshot(folder: Path, manifest: Manifest, known: dict[str, ShardFile] | None = None) -> Snapshot:
    """Pin the files of a manifest; those that are known are pinned or mapped already.

    Raises
    ------
    CorruptFile
        A file has the wrong size or, of the tombstones, the wrong contents.
    FileNotFoundError
        A file is missing.
    """
    tombstones = read_tombstones(folder, manifest.tombstones, sum(entry.documents for entry in manifest.shards))
    files = []
    for entry in manifest.shards:
        file = (known or {}).get(entry.file)
        if file is None:
            file = ShardFile(folder / entry.file, entry)
            file.pin()
        files.append(file)
    return Snapshot(folder, manifest, files, tombstones)


def read_tombstones(folder: Path, entry: TombstonesEntry | None, documents: int) -> np.ndarray:
    """Places of deleted documents, rising, from the file that a manifest names.

    Raises
    ------
    CorruptFile, OSError
    """
    if entry is None:
        return np.zeros(0, np.int64)
    path = folder / entry.file
    data = path.read_bytes()
    if len(data) != entry.bytes or digest([data]) != entry.hash or len(data) != 8 * entry.documents:
        raise CorruptFile(f"{path}: {len(data)} bytes that are not those that the manifest names: damaged")
    positions = np.frombuffer(data, "<i8")
    rising = (positions[1:] > positions[:-1]).all()
    if len(positions) and not (rising and positions[0] >= 0 and positions[-1] < documents):
        raise CorruptFile(f"{path}: places of deleted documents fall or leave the corpus")
    return positions
