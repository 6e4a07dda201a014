"""One side of a gradient: where its tokens lie, and the layout that its gradient has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .arrays import Collection, read_indices
from .dtypes import NUMPY_DTYPES, name_of
from .errors import InvalidArgument, ShapeMismatch, UnsupportedDtype
from .packed import PackedTensor

__all__ = ["Side", "read_grad_dtype", "read_need", "read_upstream", "shape_of", "side_of"]


@dataclass(frozen=True)
class Side:
    """Token sets and the layout of their gradient.

    Attributes
    ----------
    source : Collection or PackedTensor
    offsets : array
        int64 ``[count + 1]`` in host memory: set b holds valid tokens offsets[b] .. offsets[b + 1], from 0.
    shape : tuple of int
        Of the gradient: the input's for one 2-D array and for padded ones, else ``[tokens, depth]``.
    places : array or None
        int64 ``[tokens]`` in host memory: the row, of the gradient's ``prod(shape[:-1])`` rows, of every valid token;
        None where the rows are the valid tokens, in order. All other rows are +0.
    widened : bool
        Its tokens are taken in float32, as decoded ones of the other side are.
    """

    source: Any
    offsets: np.ndarray
    shape: tuple[int, ...]
    places: np.ndarray | None
    widened: bool = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def dtype(self) -> str:
        """Short name of the element type."""
        return "f32" if self.widened else self.source.dtype

    @property
    def depth(self) -> int:
        """Elements of a token."""
        return self.source.depth

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda:<index>"``."""
        return self.source.device

    @property
    def single(self) -> bool:
        """One 2-D array."""
        return self.source.single

    @property
    def packed(self) -> bool:
        """Whether a row has packed it."""
        return isinstance(self.source, PackedTensor)

    @property
    def begin(self) -> int:
        """Number of its first set, where candidates count from."""
        return 0

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest set."""
        return int(np.diff(self.offsets).max(initial=0))

    @cached_property
    def tokens(self) -> np.ndarray:
        """Valid tokens in host memory, contiguous ``[tokens, depth]``: a view where they lie so, else a copy."""
        return self._tokens().astype(NUMPY_DTYPES[self.dtype], copy=False)

    def _tokens(self) -> np.ndarray:
        if self.packed:
            contents, begin, end = self.source.contents, self.source.begin, self.source.end
            return self.source.row.view(contents, int(contents.offsets[begin]), int(contents.offsets[end]))
        dtype = NUMPY_DTYPES[self.source.dtype]
        arrays = [array.view(dtype) for array in self.source.owners]
        if isinstance(self.source.source, (list, tuple)):
            whole = np.concatenate(arrays) if arrays else np.zeros((0, self.depth), dtype)
        else:
            whole = arrays[0].reshape(-1, self.depth)
        return np.ascontiguousarray(whole if self.places is None else whole[self.places])

    def empty_gradient(self, dtype: np.dtype) -> np.ndarray:
        """Memory for a gradient: +0 where no valid token's row goes, undefined elsewhere."""
        return (np.empty if self.places is None else np.zeros)(self.shape, dtype)


def _host(values: Any) -> np.ndarray:
    """Copy of a device array in host memory, whatever library it is of; host arrays and lists stay."""
    if hasattr(values, "__cuda_array_interface__") and hasattr(values, "get"):
        return values.get()  # CuPy
    if hasattr(values, "__cuda_array_interface__") and hasattr(values, "cpu"):
        return values.cpu().numpy()  # torch
    return np.asarray(values)


def _device_offsets(source: Collection) -> np.ndarray:
    """Offsets of a collection of device arrays, which has none before it is packed."""
    extras = source.extras
    if "offsets" in extras:
        return read_indices(_host(extras["offsets"]), "offsets")
    if "lengths" in extras:
        lengths = read_indices(_host(extras["lengths"]), "lengths")
    elif "mask" in extras:
        lengths = np.atleast_1d(_host(extras["mask"]).astype(bool).sum(axis=-1))
    else:
        shape = source.source.shape
        lengths = np.full(1 if source.single else shape[0], shape[-2])
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def side_of(source: Collection | PackedTensor) -> Side:
    """Read the layout of one side."""
    if isinstance(source, PackedTensor):
        return Side(source, source.offsets, (source.tokens, source.depth), None)
    offsets = _device_offsets(source) if source.offsets is None else source.offsets
    flat = (int(offsets[-1]), source.depth)
    if isinstance(source.source, (list, tuple)) or "offsets" in source.extras:
        return Side(source, offsets, flat, None)
    shape = tuple(source.source.shape)
    longest, lengths = shape[-2], np.diff(offsets)
    if (lengths == longest).all():
        return Side(source, offsets, shape, None)
    if "mask" in source.extras:
        return Side(source, offsets, shape, np.flatnonzero(_host(source.extras["mask"])))
    starts = np.arange(len(lengths)) * longest - offsets[:-1]
    return Side(source, offsets, shape, np.arange(offsets[-1]) + np.repeat(starts, lengths))


# ------------------------------------------------------------------------------------- options of gradients


def read_need(need: Any, sides: tuple[str, str]) -> tuple[bool, bool]:
    """Which of two sides are wanted, from both names or one of them."""
    names = (need,) if isinstance(need, str) else tuple(need)
    if not names or any(name not in sides for name in names):
        raise InvalidArgument(f'need: {need!r}, wanted "{sides[0]}", "{sides[1]}", or both in a tuple')
    return sides[0] in names, sides[1] in names


def read_grad_dtype(grad_dtype: Any, dtype: str) -> str:
    """Short name of a gradient's type: ``"f32"`` (the default) or the input's."""
    if grad_dtype is None:
        return "f32"
    name = name_of(grad_dtype, "grad_dtype")
    if name not in ("f32", dtype):
        raise UnsupportedDtype(f"grad_dtype: {name}, wanted f32, or {dtype} as the tokens are")
    return name


def shape_of(values: Any) -> tuple[int, ...]:
    """Shape of an array of any library, of a list or of a number."""
    return tuple(values.shape) if hasattr(values, "shape") else np.shape(values)


def read_upstream(upstream: Any, shape: tuple[int, ...], what: str = "scores") -> Any:
    """The upstream gradient as it was given, if it broadcasts to the shape of what it is the derivative by."""
    found = shape_of(upstream)
    padded = (1,) * (len(shape) - len(found)) + found
    if len(found) > len(shape) or any(a not in (1, b) for a, b in zip(padded, shape)):
        raise ShapeMismatch(
            f"upstream: shape {found}, wanted one that broadcasts to {shape}, the shape of the {what}; "
            f"pass the derivative of the loss by the {what}"
        )
    return upstream
