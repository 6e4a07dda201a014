"""Files of packed collections: a safetensors container, written aside and renamed, checked and mapped when opened.

The container's tensors lie side by side and together are the packed buffer, byte for byte; docs/storage.md describes
them. This module knows bytes and headers; `packed` makes a `PackedTensor` of what `read` returns.
"""

from __future__ import annotations

import contextlib
import json
import mmap as memory_map
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .arrays import Collection, collection
from .cpu import DTYPE_NAMES, cpu_rows, open_packed
from .dtypes import NUMPY_DTYPES, SCORED
from .errors import BackendUnavailable, CorruptFile, InvalidArgument, LayoutMismatch
from .layout import ALIGNMENT, HEADER, Contents, Header, aligned_bytes, read_header

__all__ = ["VERIFY", "RepackWarning", "Stored", "is_packed", "read", "write", "write_aside"]

MARK = "numkong_py"  # the metadata key that tells these files from other safetensors; its value is the format version
VERSION = "1"
VERIFY = {"header": ("header", "offsets"), "full": ("header", "offsets", "derived", "originals")}  # tensors hashed
HASH = "xxh3_64."  # before a tensor's name: the metadata key of its hash
HEAD_LIMIT = 1 << 16  # bytes that the JSON header stays under; it needs less than 2 KiB
FIRST = {"dtype": "U8", "shape": [HEADER.itemsize], "data_offsets": [0, HEADER.itemsize]}  # the tensor `header`
MOVED = "so it is damaged, or another program wrote it anew; pass its originals and offsets to nk.pack, and save that"
PIECE = 1 << 22  # bytes hashed, read or written at a time: few enough to stay in a cache in between


class RepackWarning(UserWarning):
    """A file was packed by a row that cannot run here, and its tokens were packed again in memory."""


class Stored(NamedTuple):
    """What a checked file holds, in host memory or mapped; the last two are views of the buffer."""

    row: str  # name of the row that packed it
    contents: Contents | None  # for that row, or None where this build does not have it
    dtype: str
    single: bool
    buffer: np.ndarray  # uint8, the packed buffer
    offsets: np.ndarray  # int64 [documents + 1]
    originals: np.ndarray  # [tokens, depth], the vectors as they were given

    @property
    def unavailable(self) -> str | None:
        """Why the row that packed it cannot run here, or None."""
        return self.contents.row.reason if self.contents else "this build does not have it"

    def collection(self) -> Collection:
        """The stored tokens as they were given, without a copy."""
        return collection(self.originals, offsets=None if self.single else self.offsets)


# ------------------------------------------------------------------------------------- the container's header


def _table(header: Header, dtype: str) -> dict[str, dict[str, Any]]:
    """The container's tensors: consecutive pieces of the packed buffer, which leave no byte out.

    The originals are the last region of a packed buffer, so they end where it ends.
    """
    documents, tokens, depth, total = header.documents, header.tokens, header.depth, header.total_bytes
    offsets_at = HEADER.itemsize
    derived_at = offsets_at + 8 * (documents + 1)
    originals_at = total - tokens * depth * NUMPY_DTYPES[dtype].itemsize
    return {
        "header": FIRST,
        "offsets": {"dtype": "I64", "shape": [documents + 1], "data_offsets": [offsets_at, derived_at]},
        "derived": {"dtype": "U8", "shape": [originals_at - derived_at], "data_offsets": [derived_at, originals_at]},
        "originals": {"dtype": dtype.upper(), "shape": [tokens, depth], "data_offsets": [originals_at, total]},
    }


def _metadata(header: Header, dtype: str, row: str, single: bool) -> dict[str, str]:
    """The container's metadata, less the hashes; safetensors has strings only."""
    return {
        MARK: VERSION,
        "row": row,
        "layout": str(header.layout),
        "precision": "exact",
        "dtype": dtype,
        "depth": str(header.depth),
        "documents": str(header.documents),
        "tokens": str(header.tokens),
        "single": "true" if single else "false",
    }


def _encode(metadata: dict[str, str], table: dict[str, dict[str, Any]]) -> bytes:
    """Length and JSON, padded with spaces so that the tensors after it start on a multiple of 64 bytes."""
    text = json.dumps({"__metadata__": metadata, **table}).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _decode(file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Metadata, table of tensors, and where the tensors start."""
    start = 8 + int.from_bytes(file.read(8), "little")
    if size < 8 or start > min(size, HEAD_LIMIT):
        raise CorruptFile("it has no header of a packed collection, or ends within it")
    try:
        table = json.loads(file.read(start - 8).decode())
        metadata = table.pop("__metadata__", {})
        version = metadata.get(MARK)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"its safetensors header cannot be read ({error})") from error
    if version is None:
        raise CorruptFile("it is a safetensors file that PackedTensor.save did not write; pass its arrays to nk.pack")
    if version != VERSION:
        raise CorruptFile(f"its format version is {version!r}, and this version of numkong_py reads {VERSION!r}")
    return metadata, table, start


# ------------------------------------------------------------------------------------- hashes


def _digest(pieces: Iterable[Any]) -> str:
    from xxhash import xxh3_64  # here: scoring needs no hash

    digest = xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _write_pieces(file: BinaryIO, data: memoryview) -> Iterator[memoryview]:
    for begin in range(0, len(data), PIECE):
        piece = data[begin : begin + PIECE]
        file.write(piece)
        yield piece


def _read_pieces(file: BinaryIO, count: int, target: np.ndarray | None = None) -> Iterator[memoryview]:
    """The next `count` bytes, in one buffer used again and again or one after another in a target."""
    room = memoryview(np.empty(min(count, PIECE), np.uint8) if target is None else target)
    done = 0
    while done < count:
        begin = 0 if target is None else done
        got = file.readinto(room[begin : begin + min(PIECE, count - done)])
        if not got:
            raise CorruptFile("it became shorter while it was read")
        done += got
        yield room[begin : begin + got]


# ------------------------------------------------------------------------------------- writing


def _sync_folder(folder: Path, path: str) -> None:
    """Make a rename last; only POSIX systems ask for that, and can do it."""
    if os.name != "posix":
        return
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        reason = (
            f"{error.strerror}; written, but its folder could not be flushed: a power cut may bring the old file back"
        )
        raise OSError(error.errno, reason, path) from error


def write_aside(path: str | os.PathLike[str], write: Callable[[BinaryIO], Any]) -> None:
    """Write a file beside the target, flush it to the disk, and rename it: readers see the old file or the new one.

    Whoever has the old file open or mapped keeps it. A link is followed, and what it points to is replaced.

    Raises
    ------
    OSError
        Of the kind that the system reports (disk full, read-only, no such folder), naming the path. Nothing is left
        behind, and a file that was there is as it was.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_aside(Path(folder, "x"), lambda file: file.write(b"new"))
    ...     os.listdir(folder), Path(folder, "x").read_bytes()
    (['x'], b'new')
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(target) and not os.path.isfile(target):
        raise InvalidArgument(f"path: {path} is a folder or a device, wanted the name of a file")
    aside = target.with_name(f".{MARK}-{secrets.token_hex(8)}.part")
    try:
        with aside.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except OSError as error:
        reason = f"{error.strerror or error}; not written, and a file that was there is unchanged"
        raise OSError(error.errno, reason, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
    _sync_folder(target.parent, str(path))


def write(path: str | os.PathLike[str], contents: Contents, *, single: bool) -> None:
    """Write a packed buffer in host memory to a file; each byte is read once, to be hashed and written."""
    header = read_header(contents.buffer)
    table = _table(header, contents.dtype)
    metadata = _metadata(header, contents.dtype, contents.row.name, single)
    data = memoryview(contents.buffer)

    def write_all(file: BinaryIO) -> None:
        unknown = {HASH + name: "0" * 16 for name in table}
        file.seek(len(_encode({**metadata, **unknown}, table)))
        hashes = {}
        for name, tensor in table.items():
            begin, end = tensor["data_offsets"]
            hashes[HASH + name] = _digest(_write_pieces(file, data[begin:end]))
        file.seek(0)
        file.write(_encode({**metadata, **hashes}, table))

    write_aside(path, write_all)


# ------------------------------------------------------------------------------------- reading


def is_packed(path: str | os.PathLike[str]) -> bool:
    """Whether a file looks like one that `write` made: it starts with the mark. Nothing is checked.

    Examples
    --------
    >>> is_packed(__file__)
    False
    """
    start = json.dumps({"__metadata__": {MARK: ""}}).encode().partition(b'""')[0]
    with open(path, "rb") as file:
        return file.read(8 + len(start))[8:] == start


def read(
    path: str | os.PathLike[str],
    *,
    mmap: bool = True,
    verify: str = "header",
    progress: Callable[[int], Any] | None = None,
) -> Stored:
    """Check a file and map it read-only, or read it.

    Whatever the row, nothing of it is looked at before the packed header's hash, the sizes and the offsets are right.

    Parameters
    ----------
    path : path
    mmap : bool
        False reads the file into memory.
    verify : {"header", "full"}
        ``"full"`` reads the whole file and checks every hash.
    progress : callable, optional
        Gets numbers of bytes that were hashed.

    Raises
    ------
    CorruptFile
        It is no such file, or is damaged.
    InvalidArgument, OSError
    """
    if verify not in VERIFY:
        raise InvalidArgument(f"verify: {verify!r}, wanted one of {', '.join(map(repr, VERIFY))}")
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            return _read(file, size, mmap, VERIFY[verify], progress or (lambda count: None))
        except CorruptFile as error:
            raise CorruptFile(f"{path}: {size} bytes are no intact packed collection: {error}") from error


def _read(file: BinaryIO, size: int, mmap: bool, hashed: tuple[str, ...], progress: Callable[[int], Any]) -> Stored:
    metadata, table, start = _decode(file, size)
    if start % ALIGNMENT or table.get("header") != FIRST:
        raise CorruptFile(f"its tensors are not where they were written, {MOVED}")
    header, dtype = _check_head(file.read(HEADER.itemsize), metadata, table)
    if start + header.total_bytes != size:
        raise CorruptFile(f"its header says {start + header.total_bytes}: truncated, or something was added")
    for name in hashed:
        begin, end = table[name]["data_offsets"]
        file.seek(start + begin)
        _check_hash(name, metadata, _counted(_read_pieces(file, end - begin), progress))

    buffer = _map(file, start) if mmap else _load(file, start, header.total_bytes)
    pieces = {name: buffer[slice(*tensor["data_offsets"])] for name, tensor in table.items()}
    offsets = pieces["offsets"].view(np.int64)
    _check_offsets(offsets, header.tokens)
    originals = pieces["originals"].view(NUMPY_DTYPES[dtype]).reshape(header.tokens, header.depth)
    contents = _open(buffer, header.layout)
    return Stored(metadata["row"], contents, dtype, metadata["single"] == "true", buffer, offsets, originals)


def _open(buffer: np.ndarray, layout: int) -> Contents | None:
    if layout not in {row.layout for row in cpu_rows()}:
        return None
    try:
        return open_packed(buffer)
    except BackendUnavailable:
        return None
    except LayoutMismatch as error:
        raise CorruptFile(str(error)) from error


def _check_head(head: bytes, metadata: dict[str, Any], table: dict[str, Any]) -> tuple[Header, str]:
    """The packed header and the type that it names, once everything in the container's header agrees with them."""
    if len(head) < HEADER.itemsize:
        raise CorruptFile("it ends within its packed header")
    _check_hash("header", metadata, [head])
    header = read_header(np.frombuffer(head, np.uint8))
    dtype = DTYPE_NAMES.get(header.dtype)
    if dtype not in SCORED:
        raise CorruptFile(f"its packed header has element type {header.dtype}, which is not scored")
    expected = _metadata(header, dtype, metadata.get("row", ""), metadata.get("single") == "true")
    wrong = [key for key, value in expected.items() if metadata.get(key) != value]
    if wrong:
        raise CorruptFile(f"{', '.join(wrong)} in its metadata and in its packed header differ")
    wanted = _table(header, dtype)
    edges = [edge for tensor in wanted.values() for edge in tensor["data_offsets"]]
    if table != wanted or edges != sorted(edges):
        raise CorruptFile(f"its table of tensors differs from what its packed header wants, {MOVED}")
    return header, dtype


def _check_hash(name: str, metadata: dict[str, Any], pieces: Iterable[Any]) -> None:
    wanted, found = metadata.get(HASH + name), _digest(pieces)
    if found != wanted:
        raise CorruptFile(f"the hash of {name} is {found}, and its header says {wanted}: damaged")


def _counted(pieces: Iterable[memoryview], progress: Callable[[int], Any]) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        progress(len(piece))


def _check_offsets(offsets: np.ndarray, tokens: int) -> None:
    if offsets[0] != 0 or offsets[-1] != tokens or not (offsets[1:] >= offsets[:-1]).all():
        raise CorruptFile("its document offsets fall or leave the tokens")


def _map(file: BinaryIO, start: int) -> np.ndarray:
    return np.frombuffer(memory_map.mmap(file.fileno(), 0, access=memory_map.ACCESS_READ), np.uint8, offset=start)


def _load(file: BinaryIO, start: int, count: int) -> np.ndarray:
    buffer = aligned_bytes(count)
    file.seek(start)
    for _ in _read_pieces(file, count, buffer):
        pass
    buffer.flags.writeable = False
    return buffer
