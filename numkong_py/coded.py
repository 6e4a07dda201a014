"""Coded packings as NumPy sees them: views of every region of a packed buffer, and the way from one to another.

A coded token is its scale times its code vector. What a row stores differs in two things only, the tokens of a tile and
the bias of int8 codes, and a buffer's header names both: so codes move between rows, and between machines, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .layout import Header, read_header

__all__ = ["Regions", "copy_sets", "regions", "summarise"]

WORD_BYTES = {"int8": 4}  # codes of a token that lie together in a tile; 1 for other precisions
SIGNED = ("int8",)  # precisions whose codes carry the row's bias
SUMMARY = np.dtype(  # of nk_packed_document_t, what coded packings fill in
    {
        "names": ["norm_max", "norm_min", "residual_max", "residual_ratio_max", "flags"],
        "formats": ["<f8", "<f4", "<f4", "<f4", "<u4"],
        "offsets": [0, 8, 12, 24, 40],
        "itemsize": 48,
    }
)
UNSCREENABLE = 1  # nk_document_unscreenable_k
BLOCK = 1 << 16  # tokens copied at a time


class Regions(NamedTuple):
    """Views of a coded packing; counts of tokens are rounded up to whole tiles."""

    header: Header
    offsets: np.ndarray  # int64 [documents + 1]
    documents: np.ndarray  # uint8 [documents, 48]: their summaries
    scale: np.ndarray  # float32 [tokens]
    inverse_norm: np.ndarray  # float32 [tokens], or empty
    plane: np.ndarray  # uint8 [tile, word, token of the tile, byte of the word]
    ids: np.ndarray  # uint32 [tokens], or empty
    codebook: np.ndarray  # uint8, or empty


def regions(buffer: np.ndarray, precision: str) -> Regions:
    """View the regions of a coded packing in host memory, whichever row packed it."""
    header = read_header(buffer)
    tile, word = header.tile_tokens, WORD_BYTES.get(precision, 1)
    padded = -(-header.tokens // tile) * tile
    words = header.code_bytes // word

    def view(start: int, count: int, dtype: type) -> np.ndarray:
        return buffer[start : start + count * np.dtype(dtype).itemsize].view(dtype)

    normed, identified = header.screen_at > header.inverse_norm_at, header.codebook_at > header.ids_at
    return Regions(
        header,
        view(header.offsets_at, header.documents + 1, np.int64),
        view(header.documents_at, header.documents * SUMMARY.itemsize, np.uint8).reshape(-1, SUMMARY.itemsize),
        view(header.scale_at, padded, np.float32),
        view(header.inverse_norm_at, padded if normed else 0, np.float32),
        view(header.screen_at, padded * words * word, np.uint8).reshape(padded // tile, words, tile, word),
        view(header.ids_at, padded if identified else 0, np.uint32),
        buffer[header.codebook_at : header.total_bytes],
    )


def copy_sets(source: Regions, sets: np.ndarray, target: Regions, precision: str) -> None:
    """Copy chosen token sets with all their metadata into a packing that was laid out for them."""
    flip = (source.header.code_bias ^ target.header.code_bias) & 0xFF if precision in SIGNED else 0
    target.documents[...] = source.documents[sets]
    target.codebook[...] = source.codebook
    starts = source.offsets[sets] - target.offsets[:-1]
    tokens = np.arange(target.offsets[-1]) + np.repeat(starts, np.diff(target.offsets))
    for begin in range(0, len(tokens), BLOCK):
        chosen = tokens[begin : begin + BLOCK]
        places = np.arange(begin, begin + len(chosen))
        for name in ("scale", "inverse_norm", "ids"):
            if len(getattr(target, name)):
                getattr(target, name)[places] = getattr(source, name)[chosen]
        tile, lane = np.divmod(chosen, source.header.tile_tokens)
        to_tile, to_lane = np.divmod(places, target.header.tile_tokens)
        target.plane[to_tile, :, to_lane] = source.plane[tile, :, lane] ^ np.uint8(flip)


def summarise(target: Regions, norms: np.ndarray, losses: np.ndarray) -> None:
    """Fill in the summaries of the documents from bounds of every token's norm and of what its codes leave over."""
    filled = np.diff(target.offsets) > 0
    starts = target.offsets[:-1][filled]
    if not len(starts):
        return
    scaled = np.isfinite(norms) & (norms > 0)
    ratios = np.divide(losses, norms, out=losses.copy(), where=scaled) * (1 + 2.0**-39)
    summaries = np.zeros(len(starts), SUMMARY)
    summaries["norm_max"] = np.maximum.reduceat(norms, starts)
    summaries["norm_min"] = _rounded_up(np.minimum.reduceat(norms, starts))
    summaries["residual_max"] = _rounded_up(np.maximum.reduceat(losses, starts))
    summaries["residual_ratio_max"] = _rounded_up(np.maximum.reduceat(ratios, starts))
    summaries["flags"] = np.where(np.isfinite(summaries["norm_max"]), 0, UNSCREENABLE)
    target.documents[filled] = summaries.view(np.uint8).reshape(-1, SUMMARY.itemsize)


def _rounded_up(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
        return np.where(rounded < values, np.nextafter(rounded, np.float32(np.inf)), rounded)
