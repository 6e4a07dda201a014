"""Token vectors in the files of other programs: read from .npy, .npz and .safetensors, written to the last two."""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .arrays import Collection, collection, read_indices
from .backends import select
from .codebook import BLOCK, Codebook, Encoded, fill, unpack_buckets
from .dtypes import NUMPY_DTYPES, name_of
from .errors import (
    CorruptFile,
    DeviceMismatch,
    IndexOutOfRange,
    InvalidArgument,
    NumKongError,
    ShapeMismatch,
    UnsupportedDtype,
)
from .layout import ALIGNMENT
from .packed import PackedTensor
from .storage import write_aside

__all__ = ["SUFFIXES", "Tokens", "from_plaid", "read_tokens", "write_tokens"]

SUFFIXES = (".npy", ".npz", ".safetensors")
GROUPING = ("offsets", "lengths", "mask")  # names of the arrays in a file that say how the tokens are grouped
DTYPE, IDS = "dtype", "ids"  # and of those that say what 16-bit elements mean, and what the sets are called
NAMELESS = re.compile(r"arr_\d+")  # what np.savez calls the arrays of a list
PIECE = 1 << 26  # bytes of tokens that are unpacked at a time
READABLE = {
    IDS: "ids.astype(str)",
    None: "np.savez(path, *arrays), one [tokens, depth] array a set, or np.savez(path, tokens=..., offsets=...)",
}


class Tokens(NamedTuple):
    """What a file holds: the token sets, and their ids if it names them."""

    sets: Collection
    ids: list[Any] | None


# ------------------------------------------------------------------------------------- reading


def read_tokens(
    path: str | os.PathLike[str], *, dtype: str | None = None, progress: Callable[[int], Any] | None = None
) -> Tokens:
    """Read token sets that another program saved.

    Three contents are understood: one array (``[tokens, depth]`` a set, ``[count, longest, depth]`` padded sets); one
    array beside ``offsets``, ``lengths`` or ``mask``, which mean what they mean for `collection`; or one
    ``[tokens, depth]`` array a set. An array ``ids`` names the sets, and ``dtype`` (a string) says that 16-bit integers
    are ``"bf16"``.

    Parameters
    ----------
    path : path
        ``.npy`` (memory-mapped), ``.npz`` or ``.safetensors`` (which needs the library of that name).
    dtype : str, optional
        ``"bf16"`` reads 16-bit integers, and the nameless 2-byte elements that NumPy makes of bfloat16, as bfloat16.
    progress : callable, optional
        Gets the number of arrays that were read.

    Returns
    -------
    Tokens
        ``(sets, ids)``. Without an array ``ids``, sets that are arrays of their own have the arrays' names for ids;
        None if those are ``arr_0``, ``arr_1``, ... Arrays come in the order of a .npz; a .safetensors file has none of
        its own, so there they come by name, numbers in names by value.

    Raises
    ------
    UnsupportedDtype
        The elements are not bf16, f16 or f32; object arrays, which NumPy can only unpickle, are refused.
    ShapeMismatch, InvalidArgument, CorruptFile, OSError

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/x.npz", np.ones((2, 4), np.float32), np.ones((3, 4), np.float32))
    ...     read_tokens(f"{folder}/x.npz").sets.lengths
    array([2, 3])
    """
    path = Path(path)
    try:
        arrays = _load_arrays(path, progress or (lambda count: None))
    except NumKongError:
        raise
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptFile(f"{path}: {error}") from error
    grouping = {name: arrays.pop(name) for name in GROUPING if name in arrays}
    said = arrays.pop(DTYPE) if DTYPE in arrays and arrays[DTYPE].ndim == 0 else None
    ids = arrays.pop(IDS) if IDS in arrays and arrays[IDS].ndim == 1 else None
    if grouping and len(arrays) != 1:
        raise InvalidArgument(f"{path}: {next(iter(grouping))} beside {len(arrays)} arrays, wanted one array of tokens")
    dtype = dtype or (None if said is None else name_of(str(said), f"{path}: dtype"))
    names = sorted(arrays, key=_by_number) if path.suffix == ".safetensors" else list(arrays)
    found = [_bits(arrays[name], dtype) for name in names]
    try:
        sets = collection(found[0] if len(found) == 1 else found, **grouping, dtype=dtype)
    except NumKongError as error:
        raise type(error)(f"{path}: {error}") from error
    return Tokens(sets, _ids(ids, names, sets, path))


def _load_arrays(path: Path, progress: Callable[[int], Any]) -> dict[str, np.ndarray]:
    """The arrays of a file by name, in the file's order."""
    if path.suffix == ".npy":
        with path.open("rb") as file:
            _refuse_objects(file, f"{path}")
        return {"x": np.load(path, mmap_mode="r", allow_pickle=False)}
    if path.suffix == ".npz":
        return _load_npz(path, progress)
    if path.suffix == ".safetensors":
        return _load_safetensors(path)
    wanted = ", ".join(SUFFIXES)
    raise InvalidArgument(f"{path}: unknown kind of file; wanted {wanted}, or a file that PackedTensor.save wrote")


def _load_npz(path: Path, progress: Callable[[int], Any]) -> dict[str, np.ndarray]:
    arrays = {}
    with np.load(path, allow_pickle=False) as file:
        for name in file.files:
            member = name if name in file.zip.NameToInfo else f"{name}.npy"
            with file.zip.open(member) as content:
                _refuse_objects(content, f"{path}: {name}", name)
            arrays[name] = file[name]
            progress(1)
    return arrays


def _refuse_objects(file: Any, where: str, name: str | None = None) -> None:
    """Raise if a .npy stream holds pickled objects; anything else that is wrong with it is np.load's to say."""
    try:
        version = np.lib.format.read_magic(file)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(file)
    except ValueError:
        return
    if dtype.hasobject:
        raise UnsupportedDtype(
            f"{where}: an object array of shape {shape}: its elements are pickled Python objects, which have no "
            "one type and can run any code when they are loaded; where it was made, save "
            f"{READABLE.get(name, READABLE[None])}"
        )


def _load_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        from safetensors.numpy import load_file
    except ImportError as error:
        raise InvalidArgument(f"{path}: needs safetensors; pip install 'numkong-py[safetensors]'") from error
    try:
        return load_file(path)
    except OSError:
        raise
    except Exception as error:  # its own exception derives from nothing narrower
        raise CorruptFile(f"{path}: {error}") from error


def _bits(array: np.ndarray, dtype: str | None) -> np.ndarray:
    """NumPy saves bfloat16 as nameless 2-byte elements; `dtype` says what they are."""
    return array.view(np.uint16) if dtype is not None and array.dtype == np.dtype("V2") else array


def _by_number(name: str) -> list[Any]:
    """Sorting key that puts arr_2 before arr_10, which writers that sort by name do not."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


def _ids(ids: np.ndarray | None, names: list[str], sets: Collection, path: Path) -> list[Any] | None:
    if ids is not None:
        if ids.shape != (len(sets),):
            raise ShapeMismatch(f"{path}: ids: shape {ids.shape}, wanted ({len(sets)},), one for every set")
        return ids.tolist()
    return None if len(names) == 1 or all(map(NAMELESS.fullmatch, names)) else names


# ------------------------------------------------------------------------------------- writing


def write_tokens(
    packed: PackedTensor,
    path: str | os.PathLike[str],
    *,
    ids: Iterable[Any] | None = None,
    as_list: bool = False,
    progress: Callable[[int], Any] | None = None,
) -> None:
    """Write the vectors of a packed collection, bit for bit, to a file that programs without numkong_py read.

    The file holds ``tokens`` ``[total, depth]`` and ``offsets`` (int64 ``[count + 1]``; none for a single set), so that
    `read_tokens` gives the same collection back. It is written aside and renamed, 64 MiB of tokens at a time. A coded
    packing is written as what its codes stand for, in float32.

    Parameters
    ----------
    packed : PackedTensor
        In host memory, or mapped.
    path : path
        ``.npz`` (bfloat16 as its bits in uint16, beside ``dtype`` = ``"bf16"``) or ``.safetensors``.
    ids : list, optional
        Names of the sets: integers, or in a .npz strings; written as ``ids``, or as the arrays' names with `as_list`.
    as_list : bool
        One array a set, called ``arr_0``, ``arr_1``, ... as by ``np.savez(path, *arrays)``, instead of ``tokens``.
    progress : callable, optional
        Gets numbers of tokens that were written.

    Raises
    ------
    InvalidArgument
        Another kind of file; an id twice, or one that cannot be written; an empty collection `as_list`.
    ShapeMismatch
        Not one id for every set.
    DeviceMismatch
        It is on a device.
    OSError

    Examples
    --------
    >>> import tempfile
    >>> from numkong_py import pack
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_tokens(pack([np.ones((2, 4), np.float32), np.ones((3, 4), np.float32)]), f"{folder}/x.npz")
    ...     np.load(f"{folder}/x.npz")["offsets"]
    array([0, 2, 5])
    """
    suffix = Path(path).suffix
    if suffix not in WRITERS:
        raise InvalidArgument(f"path: {path}, wanted a name that ends in {' or '.join(WRITERS)}")
    if packed.device != "cpu":
        raise DeviceMismatch(
            f'packed: on {packed.device}, and files are written from host memory; pass .to("cpu") of it'
        )
    names = None if ids is None else list(ids)
    if names is not None and len(names) != len(packed):
        raise ShapeMismatch(f"ids: {len(names)}, wanted {len(packed)}, one for every set")
    arrays = _one_array_a_set(packed, names) if as_list else _one_array(packed, names, suffix)
    write_aside(path, lambda file: WRITERS[suffix](file, arrays, _dtype_of(packed), progress or (lambda count: None)))


class _Array(NamedTuple):
    """An array to write: what it is, and its elements piece by piece."""

    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


def _whole(array: np.ndarray) -> _Array:
    return _Array(array.dtype, array.shape, lambda: iter([array]))


def _dtype_of(packed: PackedTensor) -> str:
    """Element type of what it unpacks to."""
    return packed.dtype if packed.precision == "exact" else "f32"


def _tokens(packed: PackedTensor, begin: int, end: int) -> _Array:
    """Tokens `begin` to `end` of the contents, unpacked when they are written."""
    dtype = NUMPY_DTYPES[_dtype_of(packed)]
    step = max(1, PIECE // (packed.depth * dtype.itemsize))

    def pieces() -> Iterator[np.ndarray]:
        for start in range(begin, end, step):
            yield packed.row.unpack(packed.contents, start, min(end, start + step))

    return _Array(dtype, (end - begin, packed.depth), pieces)


def _one_array(packed: PackedTensor, ids: list[Any] | None, suffix: str) -> dict[str, _Array]:
    first = int(packed.contents.offsets[packed.begin])
    arrays = {} if packed.single else {"offsets": _whole(packed.offsets.astype("<i8"))}
    if ids is not None:
        arrays[IDS] = _whole(_id_array(ids, suffix))
    return {**arrays, "tokens": _tokens(packed, first, first + packed.tokens)}


def _id_array(ids: list[Any], suffix: str) -> np.ndarray:
    array = np.array(ids) if ids else np.zeros(0, np.int64)
    kinds = "iuU" if suffix == ".npz" else "iu"
    if array.ndim == 1 and array.dtype.kind in kinds:
        array = array if array.dtype.kind == "U" else array.astype("<i8")
        if array.tolist() == ids:
            return array
    found = ", ".join(sorted({type(name).__name__ for name in ids}))
    raise InvalidArgument(
        f"ids: {found}; wanted all of 64-bit int, or all str in a .npz; pass as_list=True to name arrays"
    )


def _one_array_a_set(packed: PackedTensor, ids: list[Any] | None) -> dict[str, _Array]:
    if len(packed) == 0:
        raise InvalidArgument("packed: no sets, and an empty list of arrays has no depth; pass as_list=False")
    names = [f"arr_{number}" for number in range(len(packed))] if ids is None else [str(name) for name in ids]
    taken = {DTYPE, IDS, *GROUPING} & set(names)
    if len(set(names)) < len(names) or taken:
        wrong = f"the names {', '.join(sorted(taken))} mean something else" if taken else "one of them occurs twice"
        raise InvalidArgument(f"ids: {wrong}; pass as_list=False")
    edges = packed.contents.offsets[packed.begin : packed.end + 1].tolist()
    return {name: _tokens(packed, begin, end) for name, begin, end in zip(names, edges[:-1], edges[1:])}


def _write_npz(file: BinaryIO, arrays: dict[str, _Array], dtype: str, progress: Callable[[int], Any]) -> None:
    """An uncompressed .npz; NumPy reads no bfloat16, so its bits are written and said to be that."""
    if dtype == "bf16":
        arrays = {**arrays, DTYPE: _whole(np.array(dtype))}
    with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
        for name, array in arrays.items():
            stored = np.dtype("<u2") if array.dtype == NUMPY_DTYPES["bf16"] else array.dtype
            header = {"descr": stored.str, "fortran_order": False, "shape": array.shape}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                _write_pieces(member, array, progress)


def _write_safetensors(file: BinaryIO, arrays: dict[str, _Array], dtype: str, progress: Callable[[int], Any]) -> None:
    table, end = {}, 0
    for name, array in arrays.items():
        kind = dtype.upper() if array.dtype == NUMPY_DTYPES[dtype] else "I64"
        table[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(table).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        _write_pieces(file, array, progress)


def _write_pieces(file: Any, array: _Array, progress: Callable[[int], Any]) -> None:
    for piece in array.pieces():
        file.write(np.ascontiguousarray(piece).view(np.uint8).reshape(-1).data if piece.ndim else piece.tobytes())
        progress(len(piece) if piece.ndim == 2 else 0)


WRITERS = {".npz": _write_npz, ".safetensors": _write_safetensors}


# ------------------------------------------------------------------------------------- PLAID


def from_plaid(
    codes: Any,
    residuals: Any,
    codebook: Codebook,
    doclens: Any,
    *,
    dtype: str = "f32",
    backend: str | None = None,
    capabilities: int | None = None,
) -> PackedTensor:
    """Pack the tokens of a PLAID index (Santhanam et al., CIKM 2022) from its arrays, without decoding it as a whole.

    PLAID divides a decoded token by its norm. Here its centroid and weights are rounded to integers that add up to at
    most 127, and the token's scale is the one that brings them nearest to PLAID's unit vector; bounds are about the
    distance from scores of PLAID's vectors (docs/precision.md).

    Parameters
    ----------
    codes : array
        ``[tokens]``, integers: the centroid of every token.
    residuals : array
        uint8 ``[tokens, depth bits / 8]``, in PLAID's order of bits.
    codebook : Codebook
        ``Codebook(centroids, bucket_weights, bucket_cutoffs)`` of the index.
    doclens : array
        ``[documents]``, integers: tokens of every document.
    dtype : {"f32", "f16", "bf16"}
        Of the queries that it will meet.
    backend, capabilities
        As for `pack`.

    Returns
    -------
    PackedTensor

    Raises
    ------
    InvalidArgument, UnsupportedDtype, ShapeMismatch, IndexOutOfRange, MissingKernel, BackendUnavailable

    Examples
    --------
    >>> codebook = Codebook(np.eye(8, dtype=np.float32), np.float32([-0.1, 0.1]))
    >>> packed = from_plaid(np.int32([3, 0, 7]), np.uint8([[255], [0], [16]]), codebook, [2, 1])
    >>> packed.unpack()[1].round(2)
    array([[-0.1 , -0.1 , -0.1 ,  0.1 , -0.1 , -0.1 , -0.1 ,  0.96]],
          dtype=float32)
    """
    if not isinstance(codebook, Codebook):
        raise InvalidArgument(f"codebook: a {type(codebook).__name__}, wanted nk.Codebook(centroids, bucket_weights)")
    ids, lengths, residuals = read_indices(codes, "codes"), read_indices(doclens, "doclens"), np.asarray(residuals)
    for name, array in (("codes", ids), ("doclens", lengths)):
        if array.ndim != 1:
            raise ShapeMismatch(f"{name}: shape {array.shape}, wanted one dimension")
    if residuals.dtype != np.uint8:
        raise UnsupportedDtype(f"residuals: dtype {residuals.dtype}, wanted uint8, the bytes that PLAID stores")
    if codebook.depth * codebook.bits % 8:
        raise ShapeMismatch(
            f"codebook: {codebook.depth} x {codebook.bits} bits are no whole bytes; PLAID has none such"
        )
    if residuals.shape != (len(ids), codebook.depth * codebook.bits // 8):
        wanted = (len(ids), codebook.depth * codebook.bits // 8)
        raise ShapeMismatch(f"residuals: shape {residuals.shape}, wanted {wanted}: codes, depth x bits / 8")
    if (lengths < 0).any() or lengths.sum() != len(ids):
        raise ShapeMismatch(
            f"doclens: their sum is {lengths.sum()}, wanted {len(ids)}, the number of codes, and none < 0"
        )
    outside = np.flatnonzero((ids < 0) | (ids >= len(codebook.centroids)))
    if len(outside):
        raise IndexOutOfRange(
            f"codes[{outside[0]}]: {ids[outside[0]]}, wanted 0 to {len(codebook.centroids) - 1}, a centroid's number"
        )
    row = select(name_of(dtype), "cpu", backend=backend, capabilities=capabilities)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    buffer, target = row.lay_out(offsets, codebook.depth, name_of(dtype), codebook.coding)
    blocks = (slice(begin, begin + BLOCK) for begin in range(0, len(ids), BLOCK))
    fill(target, codebook, (_plaid_block(codebook, ids[block], residuals[block]) for block in blocks))
    return PackedTensor(row.seal(buffer))


def _plaid_block(codebook: Codebook, ids: np.ndarray, residuals: np.ndarray) -> Encoded:
    """Tokens as PLAID decodes them, coded with the centroids and buckets that it gave them."""
    buckets = unpack_buckets(residuals, codebook.bits, codebook.depth)
    tokens = codebook.centroids[ids] + codebook.weights[buckets]
    norms = np.sqrt((tokens.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    units = np.divide(tokens, norms, out=np.zeros(tokens.shape), where=norms > 0).astype(np.float32)
    return codebook.fit(units, np.ones(len(ids), bool), ids, buckets)
