"""Where shards are: packed files and corpora on file systems and object stores, and what a worker makes of them.

A worker scores local files that are mapped. What is elsewhere, or was packed by a row that cannot run there, is copied
once into a folder of the worker under the hash of its contents, and verified before it gets its name.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from ..corpus.corpus import Corpus
from ..corpus.manifest import MANIFEST, Manifest, ShardEntry, read_manifest
from ..corpus.shards import ShardFile, Snapshot, read_tombstones
from ..errors import CorruptFile, InvalidArgument, ShapeMismatch, UnsupportedDtype
from ..packed import PackedTensor, from_stored
from ..storage import HEAD_LIMIT, digest, extras_of, read, read_extra, read_head

__all__ = ["RemoteFile", "file_here", "forget_device_copies", "open_corpus"]

SUFFIX = ".safetensors"  # of the files that count in a folder without a manifest
READERS = 32  # heads of files that are read at a time
OPEN_FILES = 256  # shards that a worker keeps mapped: each map holds a handle, of which a process has 1024 at least


# ------------------------------------------------------------------------------------- seen by the client


def open_corpus(corpus: Any, *, storage_options: dict[str, Any] | None = None) -> Corpus:
    """A corpus to search on a cluster: a `Corpus` as it is, or what a path or URL leads to.

    Parameters
    ----------
    corpus : Corpus, path, URL or list of paths or URLs
        A folder that `Corpus` made; or files that `PackedTensor.save` made: one, a list, a glob pattern, or a folder
        (its ``*.safetensors`` by name). URLs are fsspec's: ``s3://bucket/passages``, ``gs://...``, ``memory://...``. Of
        files on an object store the headers are read here, of a corpus also the ids when they are asked for.
    storage_options : dict, optional
        For the file system: credentials, endpoints.

    Returns
    -------
    Corpus
        Documents of plain files have their place in the files, one after another, for ids. Read-only where it is not a
        local corpus.

    Raises
    ------
    CorruptFile, ShapeMismatch, UnsupportedDtype, InvalidArgument, OSError

    Examples
    --------
    >>> import tempfile
    >>> from numkong_py import pack
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pack([np.ones((2, 4), np.float32)] * 3).save(f"{folder}/a.safetensors")
    ...     len(open_corpus([f"{folder}/a.safetensors"] * 2))
    6
    """
    options = storage_options or {}
    if isinstance(corpus, Corpus):
        return corpus
    if isinstance(corpus, (list, tuple)):
        found = [fsspec.core.url_to_fs(os.fspath(each), **options) for each in corpus]
        return _of_files("a list of files", [(system, path, system.size(path)) for system, path in found])
    text = os.fspath(corpus)
    system, path = fsspec.core.url_to_fs(text, **options)
    if any(mark in path for mark in "*?["):
        listed = system.glob(path, detail=True).values()
    elif system.exists(f"{path}/{MANIFEST}"):
        return Corpus.open(path) if isinstance(system, LocalFileSystem) else _remote_corpus(system, path)
    elif system.isdir(path):
        listed = [each for each in system.ls(path, detail=True) if each["name"].endswith(SUFFIX)]
    else:
        listed = [system.info(path)]
    return _of_files(text, sorted((system, each["name"], each["size"]) for each in listed if each["type"] == "file"))


def _file(system: Any, path: str, entry: ShardEntry) -> ShardFile:
    return ShardFile(Path(path), entry) if isinstance(system, LocalFileSystem) else RemoteFile(system, path, entry)


class _Files(Snapshot):
    """Packed files without a manifest: a document's place is its id."""

    def find(self, ids: np.ndarray) -> np.ndarray:
        return np.where((ids >= 0) & (ids < self.count), ids, -1)

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        return positions

    def live_ids(self) -> np.ndarray:
        return np.arange(self.count)


def _of_files(name: str, places: Sequence[tuple[Any, str, int]]) -> Corpus:
    if not places:
        raise InvalidArgument(
            f"corpus: {name} has no packed files, wanted {MANIFEST} or files that PackedTensor.save made"
        )
    with ThreadPoolExecutor(READERS) as pool:
        heads = list(pool.map(lambda place: _describe(*place), places))
    first = heads[0]
    for (_, path, _), (_, depth, dtype) in zip(places, heads):
        if depth != first[1]:
            raise ShapeMismatch(f"{path}: depth {depth}, and {places[0][1]} has {first[1]}; wanted one depth")
        if dtype != first[2]:
            raise UnsupportedDtype(f"{path}: {dtype}, and {places[0][1]} has {first[2]}; wanted one type")
    entries = tuple(entry for entry, _, _ in heads)
    manifest = Manifest(first[1], first[2], max(entry.bytes for entry in entries), ids="int", shards=entries)
    files = [_file(system, path, entry) for (system, path, _), entry in zip(places, entries)]
    return Corpus(Path(places[0][1]).parent, _Files(Path(), manifest, files, np.zeros(0, np.int64)), 0.0)


def _describe(system: Any, path: str, size: int) -> tuple[ShardEntry, int, str]:
    """What a packed file's header says of it, and its depth and type."""
    metadata, _, head = _read_head(system, path, size)
    try:
        documents, tokens, depth = (int(metadata[name]) for name in ("documents", "tokens", "depth"))
        entry = ShardEntry(Path(path).name, digest([head]), size, documents, tokens, metadata["row"], None, None)
        return entry, depth, metadata["dtype"]
    except (KeyError, ValueError) as error:
        raise CorruptFile(f"{path}: its metadata lacks {error}: damaged") from error


def _read_head(system: Any, path: str, size: int) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    start = io.BytesIO(system.cat_file(path, start=0, end=min(size, HEAD_LIMIT)))
    try:
        return read_head(start, size)
    except CorruptFile as error:
        raise CorruptFile(f"{path}: {size} bytes are no intact packed collection: {error}") from error


def _remote_corpus(system: Any, path: str) -> Corpus:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / MANIFEST).write_bytes(system.cat_file(f"{path}/{MANIFEST}"))
        manifest = read_manifest(folder)
        if manifest.tombstones:
            (folder / manifest.tombstones.file).write_bytes(system.cat_file(f"{path}/{manifest.tombstones.file}"))
        tombstones = read_tombstones(folder, manifest.tombstones, sum(entry.documents for entry in manifest.shards))
    files = [RemoteFile(system, f"{path}/{entry.file}", entry) for entry in manifest.shards]
    return Corpus(Path(path), Snapshot(Path(path), manifest, files, tombstones), 0.0)


class _Extras(Mapping[str, np.ndarray]):
    """Tensors beside the packed buffer of a file on an object store."""

    def __init__(self, system: Any, path: str, head: tuple[dict[str, Any], dict[str, Any], bytes]) -> None:
        self._fetch = partial(system.cat_file, path)
        self._path, self._head = path, head
        self._found: dict[str, np.ndarray] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(extras_of(self._head[1]))

    def __len__(self) -> int:
        return len(extras_of(self._head[1]))

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._found:
            if name not in extras_of(self._head[1]):
                raise KeyError(name)
            try:
                self._found[name] = read_extra(name, *self._head, self._fetch)
            except CorruptFile as error:
                raise CorruptFile(f"{self._path}: {error}") from error
        return self._found[name]


class RemoteFile(ShardFile):
    """A shard file on an object store: its ids and columns are read from there, all else from a worker's copy."""

    def __init__(self, system: Any, path: str, entry: ShardEntry) -> None:
        super().__init__(PurePosixPath(path), entry)
        self.system = system
        self.name = path
        self._extras: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFile, (self.system, self.name, self.entry)

    def stored(self) -> Any:
        """Its ids and columns, read and checked one by one when they are asked for."""
        with self._lock:
            if self._extras is None:
                head = _read_head(self.system, self.name, self.entry.bytes)
                if digest([head[2]]) != self.entry.head:
                    raise CorruptFile(f"{self.name}: not the file that the manifest names")
                self._extras = SimpleNamespace(extras=_Extras(self.system, self.name, head))
            return self._extras

    def copy_to(self, path: Path) -> None:
        """Write its contents to a local file.

        Raises
        ------
        OSError
        """
        with self.system.open(self.name, "rb") as source, path.open("xb") as target:
            shutil.copyfileobj(source, target, 1 << 23)


# ------------------------------------------------------------------------------------- seen by a worker

_files: OrderedDict[tuple[str, str, str], ShardFile] = OrderedDict()  # most recently used last
_making: dict[str, threading.Lock] = {}
_lock = threading.Lock()


def file_here(file: ShardFile, folder: Path, device: str) -> ShardFile:
    """The shard file as this process scores it, mapped for as long as it is among the last that were asked for.

    Parameters
    ----------
    file : ShardFile
    folder : path
        Where copies are kept.
    device : str
        ``"cpu"``, or ``"cuda"`` for a copy in device memory.

    Raises
    ------
    CorruptFile, OSError
    """
    key = str(file.path), file.entry.head, device
    with _lock:
        made = _making.setdefault(repr(key), threading.Lock())
    with made:
        with _lock:
            found = _files.get(key)
        if found is None:
            found = _scored(file, folder) if device == "cpu" else _DeviceFile(file_here(file, folder, "cpu"), device)
        with _lock:
            _files[key] = found
            _files.move_to_end(key)
            while len(_files) > OPEN_FILES:
                _making.pop(repr(_files.popitem(last=False)[0]), None)
    return found


def forget_device_copies() -> None:
    """Let go of all copies in device memory."""
    with _lock:
        for key in [key for key in _files if key[2] != "cpu"]:
            del _files[key]


def _scored(file: ShardFile, folder: Path) -> ShardFile:
    """The file, or a local copy that a row of this machine can score."""
    if isinstance(file, RemoteFile):
        path = _kept(folder / f"{file.entry.head}{SUFFIX}", file, lambda aside: _download(file, aside))
        file = ShardFile(path, file.entry)
    packed = file.packed(keep=False)
    if not file.stored().unavailable:
        return file
    path = _kept(folder / f"{file.entry.head}-{packed.backend}{SUFFIX}", file, packed.save)
    entry, _, _ = _describe(LocalFileSystem(), str(path), path.stat().st_size)
    return ShardFile(path, entry)


def _download(file: RemoteFile, aside: Path) -> None:
    file.copy_to(aside)
    if read(aside, verify="full").head != file.entry.head:
        raise CorruptFile(f"{file.name}: an intact file, but not the one that it was when it was listed")


def _kept(path: Path, file: ShardFile, make: Callable[[Path], Any]) -> Path:
    """The path, made first if it is not there: aside, so that it is whole whoever looks."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        make(aside)
        os.replace(aside, path)
    except OSError as error:
        if isinstance(error, CorruptFile):
            raise CorruptFile(str(error).replace(str(aside), str(file.path))) from error
        reason = f"{error.strerror or error}; no copy of {file.path} ({file.entry.bytes} bytes) was made; pass cache="
        raise OSError(error.errno, reason, str(path.parent)) from error
    finally:
        aside.unlink(missing_ok=True)
    return path


class _DeviceFile(ShardFile):
    """A shard whose documents are in device memory."""

    def __init__(self, file: ShardFile, device: str) -> None:
        super().__init__(file.path, file.entry)
        self._on_host = file
        self._device = device

    def stored(self) -> Any:
        return self._on_host.stored()

    def is_cold(self) -> bool:
        """No: nothing is read from the disk again."""
        return False

    def packed(self, keep: bool) -> PackedTensor:
        with self._lock:
            if self._packed is None:
                self._packed = from_stored(self._on_host.stored()).to(self._device)
            return self._packed
