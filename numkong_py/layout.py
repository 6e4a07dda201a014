"""The packed header (``include/numkong/packed.h``) as NumPy reads it, for code that has bytes and no extension."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .errors import LayoutMismatch

__all__ = ["ALIGNMENT", "EXACT", "HEADER", "MAGIC", "Coding", "Contents", "Header", "aligned_bytes", "read_header"]

ALIGNMENT = 64  # of every region from the start of a buffer, and of the buffers allocated here

MAGIC = b"NKPACK\0\0"  # the first bytes of every packed buffer

FIELDS = {  # those that Python needs: type and place of each in the 256 bytes
    "layout": ("<u4", 12),
    "dtype": ("<u4", 16),
    "flags": ("<u4", 20),
    "documents": ("<u8", 24),
    "tokens": ("<u8", 32),
    "depth": ("<u8", 40),
    "total_bytes": ("<u8", 48),
    "offsets_at": ("<u8", 56),
    "documents_at": ("<u8", 64),
    "square_at": ("<u8", 72),
    "scale_at": ("<u8", 80),
    "screen_at": ("<u8", 104),
    "originals_at": ("<u8", 112),
    "inverse_norm_at": ("<u8", 120),
    "ids_at": ("<u8", 128),
    "codebook_at": ("<u8", 136),
    "centroids": ("<u8", 144),
    "tile_tokens": ("<u4", 152),
    "code_bias": ("<u4", 156),
    "code_bytes": ("<u8", 160),
}
_FORMATS, _PLACES = zip(*FIELDS.values())
HEADER = np.dtype({"names": list(FIELDS), "formats": _FORMATS, "offsets": _PLACES, "itemsize": 256})


class Header(NamedTuple):
    """What Python needs of a packed header, in the order of `FIELDS`."""

    layout: int
    dtype: int
    flags: int
    documents: int
    tokens: int
    depth: int
    total_bytes: int
    offsets_at: int
    documents_at: int
    square_at: int
    scale_at: int
    screen_at: int
    originals_at: int
    inverse_norm_at: int
    ids_at: int
    codebook_at: int
    centroids: int
    tile_tokens: int
    code_bias: int
    code_bytes: int


class Coding(NamedTuple):
    """What a packing keeps of a token: ``nk_coding_t``."""

    precision: str
    bits: int = 0  # of "residual"
    centroids: int = 0  # of "residual"


EXACT = Coding("exact")


class Contents(NamedTuple):
    """A packed buffer and what its header says, as every row hands it out: what `PackedTensor` is made of."""

    row: Any  # the row that packed it
    buffer: Any  # uint8, one dimension, in the row's own array library
    pointer: Any  # its first byte, in whatever form the row's calls take
    dtype: str
    depth: int
    offsets: np.ndarray  # int64 [documents + 1], in host memory
    device: str  # "cpu" or "cuda:<index>"
    coding: Coding = EXACT


def read_header(buffer: np.ndarray) -> Header:
    """Read the header of a uint8 buffer whose bytes were checked.

    Raises
    ------
    LayoutMismatch
        The buffer is shorter than a header.
    """
    if buffer.nbytes < HEADER.itemsize:
        raise LayoutMismatch(f"packed: {buffer.nbytes} bytes are less than a header of {HEADER.itemsize} bytes")
    return Header(*buffer[: HEADER.itemsize].view(HEADER)[0].item())


def aligned_bytes(count: int, alignment: int = ALIGNMENT) -> np.ndarray:
    """Allocate `count` uint8 elements that start on a multiple of 64 bytes, or of another power of two.

    Examples
    --------
    >>> aligned_bytes(100).ctypes.data % 64
    0
    """
    spare = np.empty(count + alignment - 1, np.uint8)
    start = -spare.ctypes.data % alignment
    return spare[start : start + count]
