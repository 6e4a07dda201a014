"""Files of packed collections: a safetensors container, written aside and renamed, checked and mapped when opened.

The container's first four tensors lie side by side and together are the packed buffer, byte for byte; extras (ids and
columns of a corpus) may follow. docs/storage.md describes them. This module knows bytes and headers; `packed` makes a
`PackedTensor` of what `read` returns.
"""

from __future__ import annotations

import contextlib
import json
import mmap as memory_map
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .arrays import Collection, collection
from .cpu import DTYPE_NAMES, PRECISION_NAMES, coding_of, cpu_rows, open_packed
from .dtypes import NUMPY_DTYPES, SCORED
from .errors import BackendUnavailable, CorruptFile, InvalidArgument, LayoutMismatch
from .layout import ALIGNMENT, EXACT, HEADER, Coding, Contents, Header, aligned_bytes, read_header

__all__ = [
    "HEAD_LIMIT",
    "VERIFY",
    "RepackWarning",
    "Stored",
    "digest",
    "extras_of",
    "is_packed",
    "is_part",
    "originals_of",
    "read",
    "read_ahead",
    "read_extra",
    "read_head",
    "sync_folder",
    "write",
    "write_aside",
]

MARK = "numkong_py"  # the metadata key that tells these files from other safetensors; its value is the format version
VERSION = "1"
VERIFY = ("header", "full")
TRUSTED = ("header", "offsets")  # tensors whose hashes are always checked
PACKED = (*TRUSTED, "derived", "originals")  # tensors that are the packed buffer
HASH = "xxh3_64."  # before a tensor's name: the metadata key of its hash
HEAD_LIMIT = 1 << 16  # bytes that the JSON header stays under; it needs less than 2 KiB
FIRST = {"dtype": "U8", "shape": [HEADER.itemsize], "data_offsets": [0, HEADER.itemsize]}  # the tensor `header`
EXTRA_DTYPES = {"I64": np.int64, "U64": np.uint64, "F64": np.float64, "U8": np.uint8, "BOOL": np.bool_}
EXTRA_NAMES = {np.dtype(dtype): name for name, dtype in EXTRA_DTYPES.items()}
NO_EXTRAS: Mapping[str, np.ndarray] = MappingProxyType({})
MOVED = "so it is damaged, or another program wrote it anew; pass its originals and offsets to nk.pack, and save that"
PIECE = 1 << 22  # bytes hashed, read or written at a time: few enough to stay in a cache in between


class RepackWarning(UserWarning):
    """A file was packed by a row that cannot run here, and its tokens were packed again in memory."""


class Stored(NamedTuple):
    """What a checked file holds, in host memory or mapped; offsets and originals are views of the buffer."""

    row: str  # name of the row that packed it
    contents: Contents | None  # for that row, or None where this build does not have it
    dtype: str
    single: bool
    buffer: np.ndarray  # uint8, the packed buffer
    offsets: np.ndarray  # int64 [documents + 1]
    originals: np.ndarray  # [tokens, depth], the vectors as they were given; [0, depth] of coded ones
    extras: dict[str, np.ndarray]  # tensors after the packed buffer, one dimension each
    head: str  # hash of the container's header, which holds the hashes of all tensors
    start: int  # where in the file the packed buffer lies
    coding: Coding = EXACT

    @property
    def unavailable(self) -> str | None:
        """Why the row that packed it cannot run here, or None."""
        return self.contents.row.reason if self.contents else "this build does not have it"

    def collection(self) -> Collection:
        """The stored tokens as they were given, without a copy.

        Raises
        ------
        InvalidArgument
            Their codes were stored alone.
        """
        if self.coding != EXACT:
            raise InvalidArgument(
                f"a packed file of precision {self.coding.precision!r} keeps no vectors; pass those that it was made of"
            )
        return collection(self.originals, offsets=None if self.single else self.offsets)


# ------------------------------------------------------------------------------------- the container's header


def originals_of(contents: Contents) -> np.ndarray:
    """View of the vectors in a packed buffer in host memory, [tokens, depth]: they are its last region.

    Examples
    --------
    >>> from numkong_py import pack
    >>> originals_of(pack(np.float32([[1, 2]])).contents)
    array([[1., 2.]], dtype=float32)
    """
    start = read_header(contents.buffer).originals_at
    return contents.buffer[start:].view(NUMPY_DTYPES[contents.dtype]).reshape(-1, contents.depth)


def _table(header: Header, dtype: str) -> dict[str, dict[str, Any]]:
    """The container's first tensors: consecutive pieces of the packed buffer, which leave no byte out.

    The originals are the last region of a packed buffer, so they end where it ends.
    """
    documents, tokens, depth, total = header.documents, header.tokens, header.depth, header.total_bytes
    tokens = 0 if header.flags else tokens  # coded ones have no originals
    offsets_at = HEADER.itemsize
    derived_at = offsets_at + 8 * (documents + 1)
    originals_at = total - tokens * depth * NUMPY_DTYPES[dtype].itemsize
    return {
        "header": FIRST,
        "offsets": {"dtype": "I64", "shape": [documents + 1], "data_offsets": [offsets_at, derived_at]},
        "derived": {"dtype": "U8", "shape": [originals_at - derived_at], "data_offsets": [derived_at, originals_at]},
        "originals": {"dtype": dtype.upper(), "shape": [tokens, depth], "data_offsets": [originals_at, total]},
    }


def _aligned_extras(extras: Mapping[str, np.ndarray], total: int) -> dict[str, np.ndarray]:
    """Extras in the order of the file, widest elements first behind a padding, so that each is aligned."""
    if not extras:
        return {}
    padding = {"padding": np.zeros(-total % ALIGNMENT, np.uint8)}
    return padding | dict(sorted(extras.items(), key=lambda item: -item[1].itemsize))


def _extra_table(extras: dict[str, np.ndarray], begin: int) -> dict[str, dict[str, Any]]:
    table = {}
    for name, array in extras.items():
        end = begin + array.nbytes
        table[name] = {"dtype": EXTRA_NAMES[array.dtype], "shape": [len(array)], "data_offsets": [begin, end]}
        begin = end
    return table


def _check_extras(table: dict[str, Any], begin: int) -> int:
    """Where the tensors after the packed buffer end, once each begins where the last one ends."""
    for name, tensor in table.items():
        try:
            itemsize = np.dtype(EXTRA_DTYPES[tensor["dtype"]]).itemsize
            (count,) = tensor["shape"]
            end = begin + int(count) * itemsize
            right = tensor == {"dtype": tensor["dtype"], "shape": [int(count)], "data_offsets": [begin, end]}
        except (KeyError, TypeError, ValueError, OverflowError):
            right = False
        if not right or end < begin or begin % itemsize:
            raise CorruptFile(f"its tensor {name!r} is not where it was written, {MOVED}")
        begin = end
    return begin


def _metadata(header: Header, dtype: str, row: str, single: bool) -> dict[str, str]:
    """The container's metadata, less the hashes; safetensors has strings only."""
    return {
        MARK: VERSION,
        "row": row,
        "layout": str(header.layout),
        "precision": coding_of(header).precision,
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


def read_head(file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Metadata, table of tensors, and the bytes before the tensors; nothing else is checked.

    Raises
    ------
    CorruptFile
    """
    head = file.read(8)
    start = 8 + int.from_bytes(head, "little")
    if size < 8 or start > min(size, HEAD_LIMIT):
        raise CorruptFile("it has no header of a packed collection, or ends within it")
    head += file.read(start - 8)
    try:
        table = json.loads(head[8:].decode())
        metadata = table.pop("__metadata__", {})
        version = metadata.get(MARK)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFile(f"its safetensors header cannot be read ({error})") from error
    if version is None:
        raise CorruptFile("it is a safetensors file that PackedTensor.save did not write; pass its arrays to nk.pack")
    if version != VERSION:
        raise CorruptFile(f"its format version is {version!r}, and this version of numkong_py reads {VERSION!r}")
    return metadata, table, head


# ------------------------------------------------------------------------------------- hashes


def digest(pieces: Iterable[Any]) -> str:
    """XXH3 of bytes that come in pieces, 16 hexadecimal digits.

    Examples
    --------
    >>> digest([b"a", b"b"]) == digest([b"ab"])
    True
    """
    from xxhash import xxh3_64  # here: scoring needs no hash

    state = xxh3_64()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


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


def sync_folder(folder: Path, path: str) -> None:
    """Make a name in a folder last; only POSIX systems ask for that, and can do it."""
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


def is_part(name: str) -> bool:
    """Whether a file has the name of one that `write_aside` did not finish.

    Examples
    --------
    >>> is_part(".numkong_py-0123456789abcdef.part"), is_part("corpus.safetensors")
    (True, False)
    """
    return name.startswith(f".{MARK}-") and name.endswith(".part")


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
    sync_folder(target.parent, str(path))


def write(
    path: str | os.PathLike[str],
    contents: Contents,
    *,
    single: bool,
    extras: Mapping[str, np.ndarray] = NO_EXTRAS,
) -> str:
    """Write a packed buffer in host memory to a file; each byte is read once, to be hashed and written.

    Parameters
    ----------
    path : path
    contents : Contents
    single : bool
    extras : mapping of arrays, optional
        One-dimensional int64, uint64, float64, uint8 or bool arrays to keep beside it, by name.

    Returns
    -------
    str
        The hash of the container's header, as in `Stored`.

    Raises
    ------
    InvalidArgument
        The extras have too many or too long names. OSError as for `write_aside`.
    """
    header = read_header(contents.buffer)
    extras = _aligned_extras(extras, header.total_bytes)
    table = _table(header, contents.dtype)
    buffer = memoryview(contents.buffer)
    data = {name: buffer[slice(*tensor["data_offsets"])] for name, tensor in table.items()}
    data |= {name: memoryview(np.ascontiguousarray(array).view(np.uint8)) for name, array in extras.items()}
    table |= _extra_table(extras, header.total_bytes)
    metadata = _metadata(header, contents.dtype, contents.row.name, single)
    room = len(_encode({**metadata, **{HASH + name: "0" * 16 for name in table}}, table))
    if room > HEAD_LIMIT:
        raise InvalidArgument(f"extras: their names and places take {room} bytes, wanted at most {HEAD_LIMIT}")
    heads = []

    def write_all(file: BinaryIO) -> None:
        file.seek(room)
        hashes = {HASH + name: digest(_write_pieces(file, piece)) for name, piece in data.items()}
        file.seek(0)
        heads.append(_encode({**metadata, **hashes}, table))
        file.write(heads[0])

    write_aside(path, write_all)
    return digest(heads)


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
    file: BinaryIO | None = None,
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
    file : binary file, optional
        The file, open already: the path may belong to another one by now. It is closed.

    Raises
    ------
    CorruptFile
        It is no such file, or is damaged.
    InvalidArgument, OSError
    """
    if verify not in VERIFY:
        raise InvalidArgument(f"verify: {verify!r}, wanted one of {', '.join(map(repr, VERIFY))}")
    with file or open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            return _read(file, size, mmap, verify == "full", progress or (lambda count: None))
        except CorruptFile as error:
            raise CorruptFile(f"{path}: {size} bytes are no intact packed collection: {error}") from error


def _read(file: BinaryIO, size: int, mmap: bool, full: bool, progress: Callable[[int], Any]) -> Stored:
    metadata, table, head = read_head(file, size)
    start = len(head)
    if start % ALIGNMENT or table.get("header") != FIRST:
        raise CorruptFile(f"its tensors are not where they were written, {MOVED}")
    header, dtype = _check_head(file.read(HEADER.itemsize), metadata, table)
    extras = extras_of(table)
    end = start + _check_extras(extras, header.total_bytes)
    if end != size:
        raise CorruptFile(f"its header says {end}: truncated, or something was added")
    for name in table if full else TRUSTED:
        begin, end = table[name]["data_offsets"]
        file.seek(start + begin)
        _check_hash(name, metadata, _counted(_read_pieces(file, end - begin), progress))

    data = _map(file, start) if mmap else _load(file, start, size - start)
    pieces = {name: data[slice(*tensor["data_offsets"])] for name, tensor in table.items()}
    buffer = data[: header.total_bytes]
    offsets = pieces["offsets"].view(np.int64)
    _check_offsets(offsets, header.tokens)
    originals = pieces["originals"].view(NUMPY_DTYPES[dtype]).reshape(-1, header.depth)
    contents = _open(buffer, header.layout)
    arrays = {name: pieces[name].view(EXTRA_DTYPES[tensor["dtype"]]) for name, tensor in extras.items()}
    single = metadata["single"] == "true"
    pieces = (buffer, offsets, originals, arrays, digest([head]), start, coding_of(header))
    return Stored(metadata["row"], contents, dtype, single, *pieces)


def extras_of(table: dict[str, Any]) -> dict[str, Any]:
    """The part of a table that describes extras."""
    return {name: tensor for name, tensor in table.items() if name not in PACKED}


def read_extra(
    name: str, metadata: dict[str, Any], table: dict[str, Any], head: bytes, fetch: Callable[[int, int], bytes]
) -> np.ndarray:
    """One of the extras of a file of which only the head was read, checked; `fetch` gets bytes from begin to end.

    Raises
    ------
    CorruptFile
    """
    _check_extras(extras_of(table), table["originals"]["data_offsets"][1])
    begin, end = (len(head) + edge for edge in table[name]["data_offsets"])
    data = fetch(begin, end) if begin < end else b""
    _check_hash(name, metadata, [data])
    return np.frombuffer(data, EXTRA_DTYPES[table[name]["dtype"]])


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
    if header.flags & 0xFF not in PRECISION_NAMES:
        raise CorruptFile(f"its packed header has precision {header.flags & 0xFF}, which this version does not know")
    expected = _metadata(header, dtype, metadata.get("row", ""), metadata.get("single") == "true")
    wrong = [key for key, value in expected.items() if metadata.get(key) != value]
    if wrong:
        raise CorruptFile(f"{', '.join(wrong)} in its metadata and in its packed header differ")
    wanted = _table(header, dtype)
    edges = [edge for tensor in wanted.values() for edge in tensor["data_offsets"]]
    if {name: table.get(name) for name in PACKED} != wanted or edges != sorted(edges):
        raise CorruptFile(f"its table of tensors differs from what its packed header wants, {MOVED}")
    return header, dtype


def _check_hash(name: str, metadata: dict[str, Any], pieces: Iterable[Any]) -> None:
    wanted, found = metadata.get(HASH + name), digest(pieces)
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


def read_ahead(contents: Contents, sets: np.ndarray) -> None:
    """Have the system read the codes and vectors of chosen sets of a mapped packing, all at once: only a hint.

    Without it, every page that scoring touches waits for the disk by itself: the best 100 of 10,000 documents took five
    times as long from a cold file (Zen 3, virtual disk).
    """
    mapped: Any = contents.buffer
    while isinstance(mapped, np.ndarray):
        mapped = mapped.base
    mapped = getattr(mapped, "obj", mapped)
    if not isinstance(mapped, memory_map.mmap) or not hasattr(mapped, "madvise"):
        return
    header, offsets = read_header(contents.buffer), contents.offsets
    sets = sets[offsets[sets] < offsets[sets + 1]]
    start = contents.buffer.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    for begin, end in ((header.screen_at, header.originals_at), (header.originals_at, header.total_bytes)):
        per_token = (end - begin) / max(1, header.tokens)
        first = (
            (start + begin + per_token * offsets[sets]).astype(np.int64) // memory_map.PAGESIZE * memory_map.PAGESIZE
        )
        last = (start + begin + per_token * offsets[sets + 1]).astype(np.int64)
        for at, count in zip(first.tolist(), (last - first).tolist()):
            mapped.madvise(memory_map.MADV_WILLNEED, at, count)


def _load(file: BinaryIO, start: int, count: int) -> np.ndarray:
    buffer = aligned_bytes(count)
    file.seek(start)
    for _ in _read_pieces(file, count, buffer):
        pass
    buffer.flags.writeable = False
    return buffer
