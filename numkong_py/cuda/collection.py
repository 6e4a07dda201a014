"""Collections on the device: tokens of all documents (or queries) side by side, with what scoring needs of them."""

from __future__ import annotations

import ctypes
import struct
import sys
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import cupy as cp
import ml_dtypes
import numpy as np

from ..errors import BackendUnavailable, DeviceMismatch, ShapeMismatch, UnsupportedDtype
from .compile import kernel
from .kernels import DTYPE_IDS
from .rows import best_row

__all__ = ["CudaCollection", "as_tokens", "pack"]

STORED = {"bf16": np.dtype(np.uint16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
TYPES = {np.dtype(ml_dtypes.bfloat16): "bf16", **{stored: name for name, stored in STORED.items()}}
MAX_DEPTH = 4096
WORDS = 4096  # a chunk of pinned words
STATS = struct.Struct("@5Qq4i")  # Params of token_stats.cu
NORMALIZE = struct.Struct("@Qq2i")  # of normalize.cu
TENSOR_MAP_TYPES = {"bf16": 9, "f16": 6, "f32": 6}  # CUtensorMapDataType; f32 streams its f16 plane


# ------------------------------------------------------------------------------------- arrays of any library


def as_tokens(x: Any, dtype: str | None, argument: str = "x") -> tuple[cp.ndarray, str]:
    """A CuPy view of a CUDA array of any library, bf16 as its bits, and the short name of its type.

    Raises
    ------
    DeviceMismatch
        The array is not on a CUDA device.
    UnsupportedDtype
        Its elements are not bf16, f16 or f32, or are uint16 without ``dtype="bf16"``.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        x = x.detach()
        if x.dtype == torch.bfloat16:
            x, dtype = x.view(torch.int16), "bf16"
    if not isinstance(x, cp.ndarray):
        if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack__"):
            raise DeviceMismatch(
                f"{argument}: {type(x).__name__} on the host, wanted a CUDA array; pass cupy.asarray({argument})"
            )
        if x.__dlpack_device__()[0] not in (2, 3, 13):
            raise DeviceMismatch(
                f"{argument}: {type(x).__name__} is not on a CUDA device; move it to the device of the other side"
            )
        x = cp.from_dlpack(x)
    found = TYPES.get(x.dtype)
    if found is None and dtype == "bf16" and x.dtype == np.int16:
        x, found = x.view(np.uint16), "bf16"
    elif found == "bf16" and x.dtype != np.uint16:
        x = x.view(np.uint16)
    elif found == "bf16" and dtype != "bf16":
        found = None  # 16-bit integers are bits of bfloat16 numbers only where the caller says so
    if found is None:
        hint = ' (bits of bfloat16 numbers? pass dtype="bf16")' if x.dtype.itemsize == 2 else ""
        raise UnsupportedDtype(
            f"{argument}: dtype {x.dtype}, wanted bf16, f16 or f32{hint}; pass {argument}.astype(cupy.float32)"
        )
    if dtype is not None and dtype != found:
        raise UnsupportedDtype(
            f"{argument}: dtype {found}, wanted {dtype}; nothing is converted silently, pass {argument}.astype"
        )
    return x, found


def _host_integers(x: Any, argument: str) -> np.ndarray:
    values = x.get() if isinstance(x, cp.ndarray) else np.asarray(x)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ShapeMismatch(f"{argument}: dtype {values.dtype}, shape {values.shape}, wanted one axis of integers")
    return values.astype(np.int64)


def _check_offsets(offsets: np.ndarray, total: int) -> np.ndarray:
    if not len(offsets) or offsets[0] != 0 or offsets[-1] > total or (np.diff(offsets) < 0).any():
        raise ShapeMismatch(
            f"offsets: wanted 0, ascending, at most {total} tokens; got {offsets[:3]} .. {offsets[-3:]}"
        )
    return offsets


def _valid_positions(shape: tuple[int, int], lengths: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Flat positions of the valid tokens of a padded collection, and how many each document has."""
    count, longest = shape
    if mask is not None:
        mask = mask.get() if isinstance(mask, cp.ndarray) else np.asarray(mask)
        if mask.shape != shape or (mask.dtype.kind != "b" and not np.isin(mask, (0, 1)).all()):
            raise ShapeMismatch(
                f"mask: dtype {mask.dtype}, shape {mask.shape}, wanted {shape} of booleans (or integers 0 and 1)"
            )
        valid = mask.astype(bool)
    else:
        lengths = _host_integers(lengths, "lengths")
        if lengths.shape != (count,) or (lengths < 0).any() or (lengths > longest).any():
            raise ShapeMismatch(f"lengths: wanted {count} numbers from 0 to {longest}, got shape {lengths.shape}")
        valid = np.arange(longest) < lengths[:, None]
    return np.flatnonzero(valid), valid.sum(1)


# ------------------------------------------------------------------------------------- the collection


class _Made(NamedTuple):
    """When the latest part of a collection was made, and the streams that come after that."""

    event: cp.cuda.Event
    streams: set[int]


class CudaCollection:
    """Token matrices on one CUDA device.

    Parameters
    ----------
    tokens : cupy.ndarray, shape (total, depth)
        In the input's type (bf16 as uint16), rows contiguous.
    offsets : numpy.ndarray of int64, shape (count + 1,), or None
        Set i holds tokens ``offsets[i]`` to ``offsets[i + 1]``; None: `count` sets of `length` tokens.
    dtype : str
        ``"bf16"``, ``"f16"`` or ``"f32"``.
    row : str
        ``"sm90"`` or ``"sm80"``: the kernels that will score it.

    Attributes
    ----------
    plane : cupy.ndarray of uint16, shape (total, stride)
        What tensor cores read: the tokens, rows padded with zeros to 16 bytes; for f32 the f16 screen.
    """

    def __init__(
        self, tokens: cp.ndarray, offsets: np.ndarray | None, dtype: str, row: str, count: int = 0, length: int = 0
    ) -> None:
        self.dtype, self.row = dtype, row
        self.depth = tokens.shape[1]
        self.stride = (self.depth + 7) // 8 * 8
        self.device_id = tokens.data.device_id
        self.originals: cp.ndarray | None = None
        self._loud: np.ndarray | None = None  # what the device said of loudness, in host memory
        self._schedules: dict[Any, Any] = {}
        self.recipes: dict[Any, Any] = {}  # prepared launches, see scoring.py
        self._maps: dict[int, bytes] = {}
        self._made: _Made | None = None
        if offsets is not None:
            self.host_offsets = offsets
            self.count = len(offsets) - 1
        else:  # `count` sets of `length` tokens each
            self.count, self.longest, self.uniform = count, length, True
        if dtype == "f32":
            self.originals = tokens
            self.plane = cp.empty((tokens.shape[0], self.stride), np.uint16)
        else:
            self.plane = _padded_rows(tokens, self.stride)

    # ---------------------------------------------------------------- what it is
    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        tokens = int(self.host_offsets[-1] - self.host_offsets[0])
        return (
            f"<CudaCollection {len(self)} sets, {tokens} tokens, depth {self.depth}, {self.dtype}, "
            f"row {self.row}, {self.device}, {self.nbytes} bytes>"
        )

    @property
    def device(self) -> str:
        """``"cuda:<index>"``."""
        return f"cuda:{self.device_id}"

    @cached_property
    def host_offsets(self) -> np.ndarray:
        """Set i holds tokens ``host_offsets[i]`` to ``host_offsets[i + 1]``; on the host."""
        return np.arange(self.count + 1, dtype=np.int64) * self.longest

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens a set, on the host."""
        return np.diff(self.host_offsets)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest set."""
        return int(self.lengths.max(initial=0))

    @cached_property
    def uniform(self) -> bool:
        """Whether set i starts at token ``i * longest``, so that kernels need no offsets."""
        return self.host_offsets[0] == 0 and bool((self.lengths == self.longest).all())

    @cached_property
    def offsets(self) -> cp.ndarray:
        """The offsets on the device, int64."""
        with on_device(self.device_id):
            return cp.asarray(self.host_offsets)

    @property
    def offsets_pointer(self) -> int:
        """For kernels: 0 where the sets are uniform."""
        return 0 if self.uniform else self.offsets.data.ptr

    @property
    def nbytes(self) -> int:
        """Device memory that it holds on to."""
        held = [self.plane, self.originals, *(self.__dict__.get(name) for name in ("offsets", "_stats"))]
        flat = [array for entry in held for array in (entry if isinstance(entry, tuple) else (entry,))]
        return sum(array.nbytes for array in flat if isinstance(array, cp.ndarray))

    # ---------------------------------------------------------------- what scoring needs
    @cached_property
    def _stats(self) -> tuple[cp.ndarray, cp.ndarray]:
        with on_device(self.device_id):
            total, count = self.plane.shape[0], self.count
            squares = cp.empty(total, np.float64)
            sets = cp.empty((count + 1, 4), np.float32)
            stream = cp.cuda.get_current_stream().ptr
            cp.cuda.runtime.memsetAsync(sets.data.ptr, 0, sets.nbytes, stream)
            tokens = self.plane if self.originals is None else self.originals
            stats = kernel("token_stats.cu", self.row, self.device_id, 128, DTYPE=DTYPE_IDS[self.dtype])
            splits = min((self.longest + 7) // 8, max(1, 4096 // max(count, 1)))
            if count and splits:
                parameters = STATS.pack(
                    tokens.data.ptr, self.offsets_pointer, squares.data.ptr,
                    self.plane.data.ptr if self.originals is not None else 0, sets.data.ptr,
                    count, self.longest, self.depth, tokens.shape[1], self.stride,
                )  # fmt: skip
                stats.launch(min(count, 1 << 20), stream, parameters, splits)
            return squares, sets

    @property
    def squares(self) -> cp.ndarray:
        """Squared norm of every token, f64."""
        return self._stats[0]

    @property
    def sets(self) -> cp.ndarray:
        """Largest norm, largest screen residual and whether a token is loud, f32 ``[count, 4]``."""
        return self._stats[1][: len(self)]

    @cached_property
    def stats_pointers(self) -> tuple[int, int]:
        """Of `squares` and `sets`, for kernels."""
        squares, sets = self._stats
        return squares.data.ptr, sets.data.ptr

    @property
    def prepared(self) -> bool:
        """Whether norms and loudness were computed."""
        return "_stats" in self.__dict__

    def normalize(self) -> None:
        """Divide every token by its norm; the collection's own memory, before anything was computed from it."""
        with on_device(self.device_id):
            tokens = self.plane if self.originals is None else self.originals
            if tokens.size:
                run = kernel("normalize.cu", self.row, self.device_id, 128, DTYPE=DTYPE_IDS[self.dtype])
                parameters = NORMALIZE.pack(tokens.data.ptr, tokens.shape[0], self.depth, tokens.shape[1])
                run.launch(min(-(-tokens.shape[0] // 8), 1 << 20), cp.cuda.get_current_stream().ptr, parameters)

    def prepare(self) -> None:
        """Queue what later calls need, on the current stream: norms, loudness, the f32 screen."""
        with on_device(self.device_id):
            _ = self.offsets
            if self._loud is None:
                self._loud = _announce(self._stats[1][len(self)])
            self.mark()

    def mark(self) -> None:
        """Note that the current stream has just made part of this collection; other streams will wait for it."""
        self._made = _Made(cp.cuda.Event(disable_timing=True), {cp.cuda.get_current_stream().ptr})
        self._made.event.record()

    def join(self, stream: int) -> None:
        """Let the current stream, whose handle is given, wait for what other streams have made of this collection."""
        made = self._made
        if made is not None and stream not in made.streams:
            cp.cuda.get_current_stream().wait_event(made.event)
            made.streams.add(stream)

    @property
    def may_be_loud(self) -> bool:
        """Whether a product with these tokens could overflow f32, as far as the host knows; never waits for the device.

        Only bf16 reaches there (a squared norm of 2^112). True until the device's answer has arrived in host memory.
        """
        return self.dtype == "bf16" and (self._loud is None or bool(self._loud[0]))

    def tensor_map(self, box_tokens: int) -> bytes:
        """CUtensorMap of the plane: boxes of `box_tokens` x 64 columns in 128-byte swizzle, zeros outside."""
        if box_tokens not in self._maps:
            self._maps[box_tokens] = _encode_tensor_map(self.plane, self.dtype, box_tokens)
        return self._maps[box_tokens]

    # ---------------------------------------------------------------- parts and ways back
    def __getitem__(self, which: slice) -> CudaCollection:
        """Neighbouring sets, sharing this collection's memory."""
        start, stop, step = which.indices(len(self))
        if step != 1:
            raise ShapeMismatch(f"slice: step {step}, wanted 1; pack the chosen sets instead")
        part = object.__new__(CudaCollection)
        kept = ("dtype", "row", "depth", "stride", "device_id", "originals", "plane", "_maps", "_loud", "_made")
        part.__dict__.update({name: self.__dict__[name] for name in kept if name in self.__dict__})
        part.host_offsets = self.host_offsets[start : max(start, stop) + 1]
        part.count = len(part.host_offsets) - 1
        part._schedules, part.recipes = {}, {}
        if "_stats" in self.__dict__:
            squares, sets = self._stats
            part.__dict__["_stats"] = squares, sets[start : max(start, stop) + 1]
        if "offsets" in self.__dict__:
            part.__dict__["offsets"] = self.offsets[start : max(start, stop) + 1]
        return part

    def unpack(self) -> cp.ndarray:
        """The stored tokens, bit for bit, ``[tokens, depth]`` (bf16 as uint16)."""
        stored = self.originals if self.originals is not None else self.plane[:, : self.depth].view(STORED[self.dtype])
        return stored[int(self.host_offsets[0]) : int(self.host_offsets[-1])]

    def to_host(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens (bf16 as uint16) and offsets as NumPy arrays; waits for the copy."""
        return cp.ascontiguousarray(self.unpack()).get(), self.host_offsets - self.host_offsets[0]


def on_device(device: int) -> Any:
    """Context in which a device is current; free where it is already."""
    return nullcontext() if cp.cuda.runtime.getDevice() == device else cp.cuda.Device(device)


def _padded_rows(tokens: cp.ndarray, stride: int) -> cp.ndarray:
    """Rows that start on 16 bytes and end in zeros, as uint16; the array itself where it already is so."""
    total, depth = tokens.shape
    tokens = tokens if tokens.dtype == np.uint16 else tokens.view(np.uint16)
    if depth == stride and tokens.flags.c_contiguous and tokens.data.ptr % 16 == 0:
        return tokens
    rows = cp.zeros((total, stride), np.uint16) if depth < stride else cp.empty((total, stride), np.uint16)
    rows[:, :depth] = tokens
    return rows


_pinned: list[Any] = []  # chunks of words, the last one with its number of words in use


def pinned_word(initial: float) -> np.ndarray:
    """Four bytes of pinned host memory, which the device may write; never reused, so that a late write harms nobody."""
    if not _pinned or _pinned[-1][1] == WORDS:
        _pinned.append([np.frombuffer(cp.cuda.alloc_pinned_memory(4 * WORDS), np.float32, WORDS), 0])
    words, used = _pinned[-1]
    _pinned[-1][1] += 1
    words[used] = initial
    return words[used : used + 1]


def _announce(any_loud: cp.ndarray) -> np.ndarray:
    """Start copying a device word to host memory, which reads 1 until the answer is there."""
    word = pinned_word(1.0)
    stream, kind = cp.cuda.get_current_stream().ptr, cp.cuda.runtime.memcpyDeviceToHost
    cp.cuda.runtime.memcpyAsync(word.ctypes.data, any_loud.data.ptr, 4, kind, stream)
    return word


def _encode_tensor_map(plane: cp.ndarray, dtype: str, box_tokens: int) -> bytes:
    try:
        encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(
            f"sm90: the driver has no cuTensorMapEncodeTiled ({error}); use backend='sm80'"
        ) from None
    total, stride = plane.shape
    memory = ctypes.create_string_buffer(128 + 64)
    aligned = (ctypes.addressof(memory) + 63) & ~63
    status = encode(
        ctypes.c_void_p(aligned), ctypes.c_int(TENSOR_MAP_TYPES[dtype]), ctypes.c_uint32(2),
        ctypes.c_void_p(plane.data.ptr), (ctypes.c_uint64 * 2)(stride, max(total, 1)),
        (ctypes.c_uint64 * 1)(2 * stride), (ctypes.c_uint32 * 2)(64, box_tokens),
        (ctypes.c_uint32 * 2)(1, 1), ctypes.c_int(0), ctypes.c_int(3), ctypes.c_int(3), ctypes.c_int(0),
    )  # no interleave, 128-byte swizzle, 256-byte L2 promotion, zeros outside  # fmt: skip
    if status:
        raise BackendUnavailable(
            f"sm90: cuTensorMapEncodeTiled refused {total} x {stride} tokens (CUDA error {status})"
        )
    return ctypes.string_at(aligned, 128)


# ------------------------------------------------------------------------------------- packing


def pack(
    x: Any,
    *,
    offsets: Any = None,
    lengths: Any = None,
    mask: Any = None,
    dtype: str | None = None,
    row: str | None = None,
    copy: bool = True,
) -> CudaCollection:
    """Put CUDA arrays into one collection on their device.

    Offsets, lengths and masks are read on the host: arrays of the device are copied there, which waits for them.

    Parameters
    ----------
    x : array or list of arrays
        ``[n, d]`` one set, list of ``[n_i, d]``, ``[total, d]`` with `offsets`, ``[B, L, d]`` alone or with `lengths`
        or `mask`. Any strides.
    offsets, lengths, mask : array of integers, array of integers, array of booleans
        ``[B + 1]``, ``[B]``, ``[B, L]`` (holes allowed).
    dtype : str
        ``"bf16"`` for bits of bfloat16 numbers in uint16.
    row : str
        Default: the best one for the device.
    copy : bool
        Whether contiguous tokens are copied; False shares the caller's memory.

    Raises
    ------
    UnsupportedDtype, DeviceMismatch, ShapeMismatch
    """
    if isinstance(x, CudaCollection):
        return x
    count = length = 0
    if isinstance(x, (list, tuple)):
        tokens, dtype, offsets = _concatenate(x, dtype)
        fresh = True
    else:
        source, dtype = as_tokens(x, dtype)
        with on_device(source.data.device_id):
            if offsets is None and lengths is None and mask is None and 2 <= source.ndim <= 3:
                count, length = (1, source.shape[0]) if source.ndim == 2 else source.shape[:2]
                tokens = source if source.ndim == 2 else source.reshape(count * length, source.shape[2])
            else:
                tokens, offsets = _flatten(source, offsets, lengths, mask)
            fresh = tokens.data.mem is not source.data.mem
    device = tokens.data.device_id
    if not 1 <= tokens.shape[1] <= MAX_DEPTH:
        raise ShapeMismatch(f"x: depth {tokens.shape[1]}, wanted 1 to {MAX_DEPTH}")
    with on_device(device):
        if not tokens.flags.c_contiguous or (copy and not fresh):
            tokens = cp.array(tokens, copy=True, order="C")
        return CudaCollection(tokens, offsets, dtype, row or best_row(device), count, length)


def _concatenate(arrays: Any, dtype: str | None) -> tuple[cp.ndarray, str, np.ndarray]:
    views = [as_tokens(one, dtype, f"x[{i}]") for i, one in enumerate(arrays)]
    if not views:
        raise ShapeMismatch("x: an empty list has no depth; pass an array of shape (0, depth) with offsets=[0]")
    first, dtype = views[0]
    for i, (view, found) in enumerate(views):
        if view.ndim != 2 or view.shape[1] != first.shape[-1]:
            raise ShapeMismatch(f"x[{i}]: shape {view.shape}, wanted (tokens, {first.shape[-1]}) as x[0]")
        if found != dtype:
            raise UnsupportedDtype(f"x[{i}]: {found}, but x[0] is {dtype}; convert one of them")
        if view.device.id != first.device.id:
            raise DeviceMismatch(
                f"x[{i}]: on cuda:{view.device.id}, but x[0] is on cuda:{first.device.id}; copy one of them over"
            )
    offsets = np.concatenate([[0], np.cumsum([view.shape[0] for view, _ in views], dtype=np.int64)])
    with cp.cuda.Device(first.device.id):
        return cp.concatenate([view for view, _ in views]), dtype, offsets


def _flatten(tokens: cp.ndarray, offsets: Any, lengths: Any, mask: Any) -> tuple[cp.ndarray, np.ndarray]:
    if sum(given is not None for given in (offsets, lengths, mask)) > 1:
        raise ShapeMismatch("offsets, lengths, mask: at most one of them")
    if tokens.ndim == 2 and offsets is not None:
        ends = _check_offsets(_host_integers(offsets, "offsets"), tokens.shape[0])
        return tokens[: int(ends[-1])], ends
    if tokens.ndim != 3 or offsets is not None:
        raise ShapeMismatch(
            f"x: shape {tokens.shape}, wanted (n, d), (total, d) with offsets, or (B, L, d) with lengths or mask"
        )
    count, longest, depth = tokens.shape
    positions, counts = _valid_positions((count, longest), lengths, mask)
    ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if len(positions) == count * longest:
        return tokens.reshape(count * longest, depth), ends
    where = cp.asarray(positions)
    return tokens[where // max(longest, 1), where % max(longest, 1)], ends
