"""Recognise arrays of any library without importing it, and read any layout as a ragged collection without a copy."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import numpy as np

from .dtypes import NUMPY_DTYPES, conversion, find_name, name_of
from .errors import DeviceMismatch, InvalidArgument, ShapeMismatch, UnsupportedDtype

__all__ = [
    "ArrayView",
    "Collection",
    "TokenRuns",
    "collection",
    "read_collection",
    "read_indices",
    "read_numbers",
    "view",
]

DLPACK_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu"}  # 3 is pinned host memory


class ArrayView(NamedTuple):
    """Where an array's elements lie; `owner` keeps them alive."""

    owner: Any
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: str
    device: str


# ------------------------------------------------------------------------------------- libraries


def _is_instance(x: Any, module: str, type_name: str) -> bool:
    """Whether x is of a class of a library, which is only looked at if the caller has imported it."""
    loaded = sys.modules.get(module)
    return isinstance(x, getattr(loaded, type_name, ())) if loaded is not None else False


def device_of(x: Any, argument: str) -> str:
    """``"cpu"`` or ``"cuda:<index>"``.

    Raises
    ------
    DeviceMismatch
        The array lives on a device that no row reaches.
    """
    if isinstance(x, np.ndarray):
        return "cpu"
    if _is_instance(x, "torch", "Tensor") and x.device.type not in ("cpu", "cuda"):
        raise DeviceMismatch(f"{argument}: lives on {x.device.type!r}, wanted cpu or cuda; pass {argument}.cpu()")
    if hasattr(x, "__dlpack_device__"):
        kind, index = x.__dlpack_device__()
        kind = DLPACK_DEVICES.get(int(kind), f"DLPack device {int(kind)}")
        if kind not in ("cpu", "cuda"):
            raise DeviceMismatch(f"{argument}: lives on {kind}, wanted cpu or cuda; copy it to the host first")
        return "cpu" if kind == "cpu" else f"cuda:{index}"
    return "cuda:0" if hasattr(x, "__cuda_array_interface__") else "cpu"


def _describe(array: np.ndarray) -> str:
    return f"dtype {array.dtype}, shape {array.shape}, strides {array.strides}"


def _from_torch(x: Any) -> np.ndarray:
    """NumPy view of a torch CPU tensor; NumPy has no bfloat16 of torch's, so its bits travel as int16."""
    torch = sys.modules["torch"]
    x = x.detach()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(NUMPY_DTYPES["bf16"])
    return x.numpy()


def _host_array(x: Any, argument: str) -> np.ndarray:
    """NumPy view of a CPU array of any library: never a copy, never a conversion.

    Raises
    ------
    UnsupportedDtype
        x is not an array, or NumPy cannot look at its elements without a copy.
    """
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise UnsupportedDtype(f"{argument}: a masked array; pass {argument}.data and its valid tokens as mask=")
        return x
    try:
        if _is_instance(x, "torch", "Tensor"):
            return _from_torch(x)
        if _is_instance(x, "jax", "Array"):
            return np.asarray(x)
        if hasattr(x, "__dlpack__"):
            return np.from_dlpack(x)
        return np.asarray(memoryview(x))
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise UnsupportedDtype(
            f"{argument}: cannot read a {type(x).__module__}.{type(x).__qualname__} without a copy ({error}); "
            f'pass np.asarray({argument}, np.float32), or its bits as uint16 with dtype="bf16"'
        ) from error


def _device_view(x: Any, argument: str, dtype: str | None) -> ArrayView:
    """View of a CUDA array through its array interface; no CUDA library is touched."""
    device = device_of(x, argument)
    if _is_instance(x, "torch", "Tensor"):
        torch = sys.modules["torch"]
        x = x.detach()
        if x.dtype == torch.bfloat16:
            x, dtype = x.view(torch.int16), "bf16"
    try:
        interface = x.__cuda_array_interface__
    except (AttributeError, RuntimeError, TypeError) as error:
        raise UnsupportedDtype(
            f'{argument}: its element type has no CUDA array interface; pass its bits as uint16 with dtype="bf16"'
        ) from error
    numpy_dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides") or _contiguous_strides(shape, numpy_dtype.itemsize)
    found = _element_name(numpy_dtype, argument, dtype, shape, f"on {device}")
    return ArrayView(x, interface["data"][0], shape, tuple(strides), found, device)


def _contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))


def _element_name(found: np.dtype, argument: str, dtype: str | None, shape: tuple[int, ...], where: str) -> str:
    """Short name of an array's element type; `dtype` may give 16-bit integers a meaning, and nothing is converted."""
    name = find_name(found)
    if name is None and dtype in ("bf16", "f16") and found.itemsize == 2 and found.kind in "ui" and found.isnative:
        return dtype
    if name is None:
        raise UnsupportedDtype(
            f"{argument}: dtype {found}, shape {shape}, {where}; wanted bf16, f16 or f32 in native byte order; "
            f"pass {conversion(found, argument)}"
        )
    if dtype is not None and name != dtype:
        raise UnsupportedDtype(
            f"{argument}: dtype {found}, shape {shape}, {where}; dtype={dtype!r} was asked for, and nothing is "
            "converted silently; "
            f"pass {argument}.astype({_numpy_name(dtype)})"
        )
    return name


def _numpy_name(dtype: str) -> str:
    return "ml_dtypes.bfloat16" if dtype == "bf16" else f"np.{NUMPY_DTYPES[dtype]}"


def view(x: Any, argument: str = "x", dtype: str | None = None) -> ArrayView:
    """Look at an array of any library.

    Parameters
    ----------
    x : array
        NumPy, CuPy, JAX, torch, or anything with DLPack or the buffer protocol, of any strides.
    argument : str
        Its name in error messages.
    dtype : str, optional
        ``"bf16"`` or ``"f16"`` says what the bits of a 16-bit integer array mean.

    Raises
    ------
    UnsupportedDtype
        The elements are not bf16, f16 or f32 of native byte order, or x is not an array.
    DeviceMismatch
        The array lives on a device that no row reaches.

    Examples
    --------
    >>> view(np.zeros((2, 3), np.float32)[::-1]).strides
    (-12, 4)
    """
    if device_of(x, argument) != "cpu":
        return _device_view(x, argument, dtype)
    array = _host_array(x, argument)
    name = _element_name(array.dtype, argument, dtype, array.shape, "on the host")
    return ArrayView(array, array.__array_interface__["data"][0], array.shape, array.strides, name, "cpu")


# ------------------------------------------------------------------------------------- index arrays


def read_indices(values: Any, argument: str) -> np.ndarray:
    """Host array of integers, as int64, from an array or a list.

    Raises
    ------
    UnsupportedDtype
        The elements are not integers.

    Examples
    --------
    >>> read_indices([2, 0], "lengths")
    array([2, 0])
    """
    array = np.asarray(values) if isinstance(values, (list, tuple, range)) else _host_array(values, argument)
    if array.size == 0 and isinstance(values, (list, tuple)):
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise UnsupportedDtype(
            f"{argument}: {_describe(array)}; wanted integers; pass np.asarray({argument}, np.int64)"
        )
    return array.astype(np.int64, copy=False)


def read_numbers(values: Any, argument: str) -> np.ndarray:
    """Host array of real numbers, as float64, from a number, a list or an array of any library.

    Raises
    ------
    UnsupportedDtype
        The elements are not real numbers.

    Examples
    --------
    >>> read_numbers([2, 0.5], "upstream")
    array([2. , 0.5])
    """
    plain = isinstance(values, (list, tuple, float, int, np.generic))
    array = np.asarray(values) if plain else _host_array(values, argument)
    if array.dtype.kind not in "fiu" and find_name(array.dtype) is None:
        raise UnsupportedDtype(f"{argument}: {_describe(array)}; wanted real numbers; pass float32 or float64")
    return array.astype(np.float64, copy=False)


def _read_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Boolean [count, longest] (or [n]) from booleans, or from integers that are all 0 or 1."""
    array = np.asarray(mask) if isinstance(mask, (list, tuple)) else _host_array(mask, "mask")
    if array.shape != shape:
        raise ShapeMismatch(f"mask: shape {array.shape}, wanted {shape}, one entry for every token of x")
    if array.dtype == bool:
        return array
    if array.dtype.kind not in "iu":
        raise UnsupportedDtype(f"mask: {_describe(array)}; wanted bool, or integers 0 and 1; pass mask != 0")
    if array.size and (array.min() < 0 or array.max() > 1):
        raise ShapeMismatch(f"mask: holds {array.min()} to {array.max()}, wanted only 0 and 1; pass mask != 0")
    return array.astype(bool)


def _read_offsets(offsets: Any, total: int) -> np.ndarray:
    offsets = read_indices(offsets, "offsets")
    if offsets.ndim != 1 or len(offsets) == 0:
        raise ShapeMismatch(f"offsets: shape {offsets.shape}, wanted [count + 1], from 0 to {total}")
    if offsets[0] != 0 or offsets[-1] != total:
        raise ShapeMismatch(
            f"offsets: from {offsets[0]} to {offsets[-1]}, wanted 0 to {total}, the tokens of x; "
            "pass x[offsets[0]:offsets[-1]] and offsets - offsets[0]"
        )
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        at = falls[0]
        raise ShapeMismatch(
            f"offsets: falls from {offsets[at]} to {offsets[at + 1]} at entry {at + 1}, wanted non-decreasing; "
            "pass np.concatenate([[0], np.cumsum(lengths)])"
        )
    return offsets


def _read_lengths(lengths: Any, count: int, longest: int) -> np.ndarray:
    lengths = read_indices(lengths, "lengths")
    if lengths.shape != (count,):
        raise ShapeMismatch(f"lengths: shape {lengths.shape}, wanted ({count},), one for every set of x")
    outside = np.flatnonzero((lengths < 0) | (lengths > longest))
    if len(outside):
        raise ShapeMismatch(f"lengths: {lengths[outside[0]]} at entry {outside[0]}, wanted 0 to {longest}")
    return lengths


# ------------------------------------------------------------------------------------- collections


class TokenRuns(NamedTuple):
    """Runs of evenly spaced tokens, in the order of the collection (``nk_token_runs_t``)."""

    pointers: np.ndarray  # uint64, address of a run's first token
    counts: np.ndarray  # uint64, tokens in it
    row_strides: np.ndarray  # int64, bytes from a token to the next
    element_strides: np.ndarray  # int64, bytes from an element to the next


class _Strided:
    """Elements at an address, for NumPy to look at."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        interface = {"version": 3, "data": (address, True), "shape": shape, "strides": strides}
        self.__array_interface__ = {**interface, "typestr": f"|V{itemsize}"}


@dataclass(frozen=True, eq=False)
class Collection:
    """A ragged collection of token sets: a view of the caller's arrays.

    Attributes
    ----------
    source : array or tuple of arrays
        What the caller gave.
    owners : tuple
        What keeps the elements alive.
    depth : int
    dtype : str
        ``"bf16"``, ``"f16"`` or ``"f32"``.
    device : str
        ``"cpu"`` or ``"cuda:<index>"``.
    single : bool
        One 2-D array: as a query its results have no query axis.
    offsets : array or None
        int64 ``[count + 1]``, in valid tokens. None for device arrays until they are packed.
    runs : TokenRuns or None
        Where the valid tokens lie in host memory.
    extras : dict
        `offsets`, `lengths` or `mask` as they were given.
    """

    source: Any
    owners: tuple[Any, ...]
    depth: int
    dtype: str
    device: str
    single: bool = False
    offsets: np.ndarray | None = None
    runs: TokenRuns | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        if self.offsets is not None:
            return len(self.offsets) - 1
        if "offsets" in self.extras:
            return len(self.extras["offsets"]) - 1
        return 1 if self.single else len(self.source)

    def __repr__(self) -> str:
        kind = "set" if self.single else "collection"
        return f"<numkong_py {kind}: {len(self)} x [tokens, {self.depth}] {self.dtype} on {self.device}>"

    @property
    def lengths(self) -> np.ndarray:
        """Valid tokens in every set, int64 [count]."""
        return np.diff(self.offsets)

    def __reduce__(self) -> tuple[Any, ...]:
        """Its tokens travel, not the addresses: those mean nothing in another process."""
        if self.runs is None:
            return _restored_on_device, (self.source, self.dtype, self.extras)
        flat = np.concatenate([np.zeros((0, self.depth), NUMPY_DTYPES[self.dtype]), *self._parts()])
        return _restored, (flat, self.offsets, self.single, self.extras)

    def _parts(self) -> Iterator[np.ndarray]:
        """The tokens of every run, without a copy."""
        dtype = NUMPY_DTYPES[self.dtype]
        for pointer, count, *strides in zip(*(array.tolist() for array in self.runs)):
            yield np.asarray(_Strided(pointer, (count, self.depth), tuple(strides), dtype.itemsize)).view(dtype)

    def blocks(self, tokens: int) -> Iterator[np.ndarray]:
        """All valid tokens in host memory, in order, as arrays of at most so many.

        Examples
        --------
        >>> [len(block) for block in collection([np.ones((3, 2), "f4"), np.ones((4, 2), "f4")]).blocks(4)]
        [3, 4]
        """
        held: list[np.ndarray] = []
        for part in self._parts():
            for begin in range(0, len(part), tokens):
                piece = part[begin : begin + tokens]
                if held and sum(map(len, held)) + len(piece) > tokens:
                    yield np.concatenate(held)
                    held = []
                held.append(piece)
        if held:
            yield np.concatenate(held)

    @cached_property
    def positions(self) -> np.ndarray:
        """Place of every valid token among the rows of its set, int64 [tokens]: undoes a mask in an argmax.

        Examples
        --------
        >>> padded = np.zeros((2, 3, 4), np.float32)
        >>> collection(padded, mask=[[True, False, True], [False, True, False]]).positions
        array([0, 2, 1])
        """
        if "mask" in self.extras:
            return np.nonzero(self.extras["mask"])[-1]
        return np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1], self.lengths)


def collection(
    x: Any,
    *,
    offsets: Any = None,
    lengths: Any = None,
    mask: Any = None,
    dtype: Any = None,
    depth: int | None = None,
) -> Collection:
    """View arrays as a ragged collection of token sets, without a copy.

    Parameters
    ----------
    x : array or list of arrays
        ``[n, depth]`` one set; a list of ``[n_i, depth]``; ``[total, depth]`` with `offsets`; ``[count, longest,
        depth]`` with `lengths`, `mask` or neither (every token is valid).
    offsets : int array, optional
        ``[count + 1]``, from 0 to ``total``.
    lengths : int array, optional
        ``[count]``: only the first tokens of every set are valid.
    mask : bool array, optional
        ``[count, longest]``, or ``[n]`` for one set: true where a token is valid, holes allowed.
    dtype : str or dtype, optional
        Element type to insist on; ``"bf16"`` reads uint16 arrays as bfloat16 bits.
    depth : int, optional
        Depth of an empty list.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, DeviceMismatch, InvalidArgument

    Examples
    --------
    >>> documents = collection(np.zeros((5, 8), np.float32), offsets=[0, 2, 2, 5])
    >>> documents.lengths
    array([2, 0, 3])
    """
    return read_collection(x, "x", offsets=offsets, lengths=lengths, mask=mask, dtype=dtype, depth=depth)


def _restored(tokens: np.ndarray, offsets: np.ndarray, single: bool, extras: dict[str, Any]) -> Collection:
    """A pickled collection of host memory; `extras` still say where its tokens were under a mask."""
    return replace(read_collection(tokens, "x", offsets=offsets), single=single, extras=extras)


def _restored_on_device(source: Any, dtype: str, extras: dict[str, Any]) -> Collection:
    return read_collection(source, "x", dtype=dtype, **extras)


def read_collection(
    x: Any,
    argument: str,
    *,
    offsets: Any = None,
    lengths: Any = None,
    mask: Any = None,
    dtype: Any = None,
    depth: int | None = None,
) -> Collection:
    """Do what `collection` does, with the argument's name in error messages."""
    given = {"offsets": offsets, "lengths": lengths, "mask": mask}
    extras = {name: value for name, value in given.items() if value is not None}
    if isinstance(x, Collection):
        return _unchanged(x, argument, extras, dtype)
    if len(extras) > 1:
        raise InvalidArgument(f"{' and '.join(extras)} say the same thing in different ways; pass one of them")
    wanted = None if dtype is None else name_of(dtype)
    if isinstance(x, (list, tuple)):
        if extras:
            raise InvalidArgument(f"{next(iter(extras))}: {argument} is a list, whose arrays have their own lengths")
        return _from_list(x, argument, wanted, depth)
    array = view(x, argument, wanted)
    _check_shape(array, argument, extras)
    if array.device != "cpu":
        single = len(array.shape) == 2 and "offsets" not in extras
        return Collection(x, (array.owner,), array.shape[-1], array.dtype, array.device, single, extras=extras)
    if "offsets" in extras:
        bounds = _read_offsets(offsets, array.shape[0])
        return _host_collection(array, bounds, _one_run(array), single=False, extras={"offsets": bounds})
    if len(array.shape) == 2 and mask is None:
        return _host_collection(array, np.array([0, array.shape[0]]), _one_run(array), single=True)
    return _from_padded(array, lengths, mask)


def _unchanged(x: Collection, argument: str, extras: dict[str, Any], dtype: Any) -> Collection:
    if extras:
        raise InvalidArgument(f"{next(iter(extras))}: {argument} is a collection already; give it to nk.collection")
    if dtype is not None and name_of(dtype) != x.dtype:
        raise UnsupportedDtype(f"{argument}: a collection of {x.dtype}, dtype={name_of(dtype)!r} was asked for")
    return x


def _check_shape(array: ArrayView, argument: str, extras: dict[str, Any]) -> None:
    shape = array.shape
    if len(shape) == 1:
        raise ShapeMismatch(
            f"{argument}: shape {shape}, wanted [tokens, depth]; pass {argument}[None, :] for one token"
        )
    if len(shape) not in (2, 3):
        raise ShapeMismatch(f"{argument}: shape {shape}, wanted [tokens, depth] or [count, longest, depth]")
    if shape[-1] == 0:
        raise ShapeMismatch(f"{argument}: shape {shape}, wanted a depth of at least 1")
    if "offsets" in extras and len(shape) != 2:
        raise ShapeMismatch(
            f"offsets: {argument} has shape {shape}, wanted [total, depth]; pass lengths= or mask= with a padded array"
        )
    if "lengths" in extras and len(shape) != 3:
        raise ShapeMismatch(
            f"lengths: {argument} has shape {shape}, wanted [count, longest, depth]; "
            "pass offsets=np.concatenate([[0], np.cumsum(lengths)])"
        )


def _host_collection(
    array: ArrayView,
    offsets: np.ndarray,
    runs: TokenRuns,
    single: bool,
    extras: dict[str, Any] | None = None,
) -> Collection:
    source = array.owner
    return Collection(source, (source,), array.shape[-1], array.dtype, "cpu", single, offsets, runs, extras or {})


def _one_run(array: ArrayView) -> TokenRuns:
    return TokenRuns(
        np.array([array.address], np.uint64),
        np.array([array.shape[0]], np.uint64),
        np.array([array.strides[0]], np.int64),
        np.array([array.strides[1]], np.int64),
    )


def _from_padded(array: ArrayView, lengths: Any, mask: Any) -> Collection:
    """One run per set without a mask, else one per stretch of valid tokens."""
    single = len(array.shape) == 2
    count, longest = (1, array.shape[0]) if single else array.shape[:2]
    set_stride = 0 if single else array.strides[0]
    extras = {}
    if mask is None:
        counts = np.full(count, longest) if lengths is None else _read_lengths(lengths, count, longest)
        sets, starts, run_counts = np.arange(count), np.zeros(count, np.int64), counts
    else:
        mask = _read_mask(mask, array.shape[:-1])
        extras["mask"] = mask
        edges = np.diff(mask.reshape(count, longest).astype(np.int8), axis=1, prepend=0, append=0)
        (sets, starts), (_, ends) = np.nonzero(edges == 1), np.nonzero(edges == -1)
        counts, run_counts = mask.reshape(count, longest).sum(axis=1), ends - starts
    pointers = array.address + sets * set_stride + starts * array.strides[-2]
    runs = TokenRuns(
        pointers.astype(np.uint64),
        run_counts.astype(np.uint64),
        np.full(len(pointers), array.strides[-2], np.int64),
        np.full(len(pointers), array.strides[-1], np.int64),
    )
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return _host_collection(array, offsets, runs, single, extras)


def _from_list(arrays: Sequence[Any], argument: str, dtype: str | None, depth: int | None) -> Collection:
    """One run per array of a list."""
    if len(arrays) == 0:
        if depth is None:
            raise ShapeMismatch(f"{argument}: an empty list has no depth; pass depth= (and dtype=)")
        none = np.zeros(0, np.int64)
        runs = TokenRuns(none.astype(np.uint64), none.astype(np.uint64), none, none)
        return Collection((), (), depth, dtype or "f32", "cpu", False, np.zeros(1, np.int64), runs)
    if isinstance(arrays[0], (list, tuple, int, float)):
        raise UnsupportedDtype(
            f"{argument}: a list of Python {type(arrays[0]).__name__} objects, wanted an array or a list of arrays; "
            f"pass np.asarray({argument}, np.float32)"
        )
    source = tuple(arrays)
    devices = {"cpu"} if all(type(x) is np.ndarray for x in source) else _devices(source, argument)
    if len(devices) > 1:
        raise DeviceMismatch(f"{argument}: a list of arrays on {' and '.join(sorted(devices))}, wanted one device")
    if devices != {"cpu"}:
        return _from_device_list(source, argument, dtype, devices.pop())
    owners = tuple(x if type(x) is np.ndarray else _host_array(x, f"{argument}[{i}]") for i, x in enumerate(source))
    first = owners[0]
    name = _element_name(first.dtype, f"{argument}[0]", dtype, first.shape, "on the host")
    for index, array in enumerate(owners):
        if array.ndim != 2 or array.shape[1] != first.shape[1] or array.shape[1] == 0 or array.dtype != first.dtype:
            _refuse_element(argument, index, array.shape, first.shape, array.dtype, dtype, name)
    counts = np.array([len(array) for array in owners], np.int64)
    runs = TokenRuns(
        np.array([array.__array_interface__["data"][0] for array in owners], np.uint64),
        counts.astype(np.uint64),
        np.array([array.strides[0] for array in owners], np.int64),
        np.array([array.strides[1] for array in owners], np.int64),
    )
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Collection(source, owners, first.shape[1], name, "cpu", False, offsets, runs)


def _devices(arrays: Sequence[Any], argument: str) -> set[str]:
    return {device_of(array, f"{argument}[{index}]") for index, array in enumerate(arrays)}


def _from_device_list(arrays: Sequence[Any], argument: str, dtype: str | None, device: str) -> Collection:
    views = [_device_view(array, f"{argument}[{index}]", dtype) for index, array in enumerate(arrays)]
    first = views[0]
    for index, array in enumerate(views):
        if len(array.shape) != 2 or array.shape[1] != first.shape[1] or array.dtype != first.dtype:
            found = NUMPY_DTYPES[array.dtype]
            _refuse_element(argument, index, array.shape, first.shape, found, dtype, first.dtype)
    offsets = np.concatenate([[0], np.cumsum([array.shape[0] for array in views])])
    return Collection(arrays, tuple(arrays), first.shape[1], first.dtype, device, False, offsets)


def _refuse_element(
    argument: str,
    index: int,
    shape: tuple[int, ...],
    first_shape: tuple[int, ...],
    found: np.dtype,
    dtype: str | None,
    first_dtype: str,
) -> NoReturn:
    """Say what is wrong with an array of a list."""
    name = f"{argument}[{index}]"
    if len(shape) != 2:
        raise ShapeMismatch(f"{name}: shape {shape}, wanted [tokens, depth]")
    if shape[1] == 0:
        raise ShapeMismatch(f"{name}: shape {shape}, wanted a depth of at least 1")
    if len(first_shape) == 2 and shape[1] != first_shape[1]:
        raise ShapeMismatch(f"{name}: depth {shape[1]}, and {argument}[0] has {first_shape[1]}; wanted one depth")
    element = _element_name(found, name, dtype, shape, "in the list")
    raise UnsupportedDtype(
        f"{name}: {element}, and {argument}[0] is {first_dtype}; wanted one type; "
        f"pass {name}.astype({_numpy_name(first_dtype)})"
    )
