"""How the forward kernel's work is dealt out: which documents, or pieces of documents, each CTA walks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["Pieces", "balance", "chunk_count", "cut_documents", "deal_documents"]


class Pieces(NamedTuple):
    """Parts of documents in the order in which CTAs take them.

    Attributes
    ----------
    start, count : numpy.ndarray
        First token (in the whole collection) and tokens of a piece.
    slot : numpy.ndarray
        Where its result goes.
    chunk_begin : numpy.ndarray, shape (chunks + 1,)
        Pieces of each chunk.
    piece_begin : numpy.ndarray, shape (documents + 1,)
        Pieces of each document.
    base : numpy.ndarray
        First token of a piece within its document.
    """

    start: np.ndarray
    count: np.ndarray
    slot: np.ndarray
    chunk_begin: np.ndarray
    piece_begin: np.ndarray
    base: np.ndarray

    def table(self) -> np.ndarray:
        """The kernel's ``Piece`` structs as int32 ``[pieces, 4]``."""
        table = np.empty((len(self.start), 4), np.int32)
        table[:, :2] = self.start.astype("<i8").reshape(-1, 1).view(np.int32)
        table[:, 2], table[:, 3] = self.count, self.slot
        return table


def tiles_of(lengths: np.ndarray, tile: int) -> np.ndarray:
    """Tiles that a document costs; an empty one still passes through the ring."""
    return np.maximum((lengths + tile - 1) // tile, 1)


def chunk_count(blocks: int, grid: int, limit: int) -> int:
    """Chunks of documents so that (query blocks x chunks) fill whole waves of the persistent grid, with few waves."""
    candidates = [max(1, min(limit, waves * grid // blocks)) for waves in range(1, 33)]

    def waste(chunks: int) -> float:
        items = blocks * chunks
        waves = -(-items // grid)
        return 1.0 - items / (waves * grid) + 0.002 * waves  # a wave reloads the query rows

    return min(dict.fromkeys(candidates), key=waste)


def balance(lengths: np.ndarray, chunks: int, tile: int) -> float:
    """Mean over maximum load of the chunks that `deal_documents` makes."""
    tiles = np.sort(tiles_of(lengths, tile))[::-1]
    loads = np.bincount(_snake(len(tiles), chunks), weights=tiles, minlength=chunks)
    return float(loads.mean() / loads.max()) if len(tiles) else 1.0


def _snake(count: int, chunks: int) -> np.ndarray:
    """Chunk of the i-th largest document: forth and back over the chunks."""
    turn, place = np.divmod(np.arange(count), chunks)
    return np.where(turn % 2 == 0, place, chunks - 1 - place)


def deal_documents(offsets: np.ndarray, chunks: int, tile: int) -> Pieces:
    """Whole documents, largest first, dealt so that chunks cost about the same."""
    lengths = np.diff(offsets)
    by_size = np.argsort(-tiles_of(lengths, tile), kind="stable")
    chunk = _snake(len(lengths), chunks)
    order = by_size[np.argsort(chunk, kind="stable")]
    chunk_begin = np.concatenate([[0], np.cumsum(np.bincount(chunk, minlength=chunks))])
    return Pieces(
        offsets[order],
        lengths[order],
        order,
        chunk_begin,
        np.arange(len(lengths) + 1),
        np.zeros(len(lengths), np.int64),
    )


def cut_documents(offsets: np.ndarray, chunks: int, tile: int) -> Pieces:
    """Documents cut at tile boundaries so that every chunk has the same number of tiles (within one)."""
    lengths = np.diff(offsets)
    tile_begin = np.concatenate([[0], np.cumsum((lengths + tile - 1) // tile)])
    total = int(tile_begin[-1])
    chunks = min(chunks, total)
    cuts = np.arange(chunks + 1) * total // max(chunks, 1)
    bounds = np.union1d(tile_begin, cuts)
    begin, end = bounds[:-1], bounds[1:]
    document = np.searchsorted(tile_begin, begin, side="right") - 1
    base = (begin - tile_begin[document]) * tile
    count = np.minimum(lengths[document] - base, (end - begin) * tile)
    return Pieces(
        offsets[document] + base,
        count,
        np.arange(len(begin)),
        np.searchsorted(begin, cuts),
        np.searchsorted(document, np.arange(len(lengths) + 1)),
        base,
    )
