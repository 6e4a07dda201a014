"""The k best documents of each query: chosen on the device, from a collection or a corpus that streams through it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy as cp
import numpy as np

from ..errors import InvalidArgument, ShapeMismatch
from .collection import STORED, CudaCollection, on_device, pack
from .compile import kernel
from .rows import best_row
from .scoring import score

__all__ = ["stream_topk", "topk"]

MAX_K = 4096  # topk.cu
PARAMETERS = struct.Struct("@4Q4q2i")
SHARED_BYTES = 12 * MAX_K + 2048
SCORE_BYTES = 256 << 20  # scores kept at a time
BLOCK_BYTES = (
    256 << 20
)  # tokens of one streamed block, twice on the device and twice pinned; pinning 1 GB takes half a second
COPY_THREADS = min(16, os.cpu_count() or 1)  # fill pinned memory: 7 GB/s one, 41 GB/s eight, 48 sixteen; the link 55
GRAIN = 8 << 20  # bytes a copy task


def _select(
    scores: cp.ndarray,
    indices: cp.ndarray | None,
    base: int,
    k: int,
    best: cp.ndarray,
    best_indices: cp.ndarray,
    row: str,
) -> None:
    """Queue ``topk.cu``: the k best of each row of `scores` into the first k columns of `best`."""
    run = kernel("topk.cu", row, scores.device.id, 1024, SHARED_BYTES, F64=int(scores.dtype == np.float64))
    parameters = PARAMETERS.pack(
        scores.data.ptr, 0 if indices is None else indices.data.ptr, best.data.ptr, best_indices.data.ptr,
        scores.shape[1], scores.strides[0] // scores.itemsize, base, best.strides[0] // best.itemsize,
        scores.shape[0], k,
    )  # fmt: skip
    run.launch(min(scores.shape[0], 1 << 20), cp.cuda.get_current_stream().ptr, parameters)


def _ranked(scores: cp.ndarray, options: dict[str, Any]) -> cp.ndarray:
    """Scores as ``topk.cu`` ranks them, higher first, and back: angular ones (lower is better) change their sign."""
    return -scores if options.get("metric") == "angular" else scores


class _Running:
    """The best so far: two halves, the running k and the newest k, merged into the other buffer."""

    def __init__(self, queries: int, k: int, score_type: Any, row: str) -> None:
        self.k, self.row = k, row
        self.scores = [cp.empty((queries, 2 * k), score_type) for _ in range(2)]
        self.indices = [cp.empty((queries, 2 * k), np.int64) for _ in range(2)]
        self.blocks = 0

    def add(self, scores: cp.ndarray, base: int, indices: cp.ndarray | None = None) -> None:
        """Take the scores of the next documents (or candidates, with their own indices)."""
        k, newest = self.k, slice(self.k, None) if self.blocks else slice(0, self.k)
        _select(scores, indices, base, k, self.scores[0][:, newest], self.indices[0][:, newest], self.row)
        if self.blocks:
            _select(self.scores[0], self.indices[0], 0, k, self.scores[1], self.indices[1], self.row)
            self.scores.reverse()
            self.indices.reverse()
        self.blocks += 1

    def result(self) -> tuple[cp.ndarray, cp.ndarray]:
        return self.scores[0][:, : self.k], self.indices[0][:, : self.k]


def _check_k(k: int, available: int) -> int:
    if not 0 < k <= MAX_K:
        raise InvalidArgument(f"k: {k}, wanted 1 to {MAX_K}; score() gives all scores")
    return min(k, available)


def topk(
    queries: Any, documents: Any, k: int, *, candidates: Any = None, dtype: str | None = None, **options: Any
) -> tuple[cp.ndarray, cp.ndarray]:
    """The k best documents of each query: best score first, then lowest index; empty documents, then NaN last.

    Parameters
    ----------
    queries, documents, candidates, dtype
        As in `score`. Candidates of -1 (or out of range) come last, with index -1 and score NaN.
    k : int
        1 to 4096, cut to what there is.
    **options
        ``metric``, ``reduction``, ``empty`` of `score`.

    Returns
    -------
    scores : cupy.ndarray, shape (queries, k)
    indices : cupy.ndarray of int64, shape (queries, k)
    """
    queries = queries if isinstance(queries, CudaCollection) else pack(queries, dtype=dtype, copy=False)
    documents = documents if isinstance(documents, CudaCollection) else pack(documents, dtype=dtype, copy=False)
    with on_device(documents.device_id):
        if candidates is not None:
            candidates = cp.ascontiguousarray(cp.asarray(candidates), dtype=np.int64)
            order = cp.argsort(candidates, axis=1)  # equal scores go by document, not by place in the list
            candidates = cp.ascontiguousarray(cp.take_along_axis(candidates, order, 1))
            candidates = cp.where(candidates < len(documents), candidates, -1)
            k = _check_k(k, candidates.shape[1])
            scores = _ranked(score(queries, documents, candidates=candidates, **options).scores, options)
            best, indices = cp.empty((len(queries), k), scores.dtype), cp.empty((len(queries), k), np.int64)
            _select(scores, candidates, 0, k, best, indices, documents.row)
            return _ranked(best, options), indices
        k = _check_k(k, len(documents))
        score_type = np.dtype(np.float64 if documents.dtype == "f32" else np.float32)
        best, indices = cp.empty((len(queries), k), score_type), cp.empty((len(queries), k), np.int64)
        step = max(1, SCORE_BYTES // max(1, len(documents) * score_type.itemsize))
        for first in range(0, len(queries), step):
            part = queries if step >= len(queries) else queries[first : first + step]
            scores = _ranked(score(part, documents, **options).scores, options)
            _select(scores, None, 0, k, best[first : first + step], indices[first : first + step], documents.row)
        return _ranked(best, options), indices


# ------------------------------------------------------------------------------------- streaming


def _blocks(offsets: np.ndarray, limit: int) -> Iterator[tuple[int, int]]:
    """Ranges of documents of at most `limit` tokens (one longer document goes alone)."""
    first = 0
    while first < len(offsets) - 1:
        last = int(np.searchsorted(offsets, offsets[first] + limit, side="right")) - 1
        last = min(max(last, first + 1), len(offsets) - 1)
        yield first, last
        first = last


def _is_pinned(array: np.ndarray) -> bool:
    try:
        return cp.cuda.runtime.pointerGetAttributes(array.ctypes.data).type == 1
    except cp.cuda.runtime.CUDARuntimeError:
        return False


class _Staging:
    """One of two slots for blocks on their way: pinned memory, device memory and the events that order their use."""

    def __init__(self, tokens: int, depth: int, stored: np.dtype, pinned: bool) -> None:
        self.device = cp.empty((tokens, depth), stored)
        self.copied, self.scored = cp.cuda.Event(disable_timing=True), cp.cuda.Event(disable_timing=True)
        self.host = None
        if not pinned:
            memory = cp.cuda.alloc_pinned_memory(self.device.nbytes)
            self.host = np.frombuffer(memory, stored, self.device.size).reshape(tokens, depth)

    def fill(self, tokens: np.ndarray, pool: ThreadPoolExecutor, stream: cp.cuda.Stream) -> cp.ndarray:
        """Queue the copy of one block to the device; returns where it will be."""
        source = tokens
        if self.host is not None:
            self.copied.synchronize()  # the pinned half is free once its last copy has left
            source = self.host[: len(tokens)]
            rows = max(1, GRAIN // max(1, tokens.strides[0]))
            pieces = [slice(at, at + rows) for at in range(0, len(tokens), rows)]
            list(pool.map(lambda piece: np.copyto(source[piece], tokens[piece]), pieces))
        target = self.device[: len(tokens)]
        stream.wait_event(self.scored)
        kind = cp.cuda.runtime.memcpyHostToDevice
        cp.cuda.runtime.memcpyAsync(target.data.ptr, source.ctypes.data, target.nbytes, kind, stream.ptr)
        self.copied.record(stream)
        return target


def stream_topk(
    queries: Any,
    tokens: np.ndarray,
    offsets: np.ndarray,
    k: int,
    *,
    dtype: str | None = None,
    block: int | None = None,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> tuple[cp.ndarray, cp.ndarray]:
    """The k best documents of a corpus in host memory (or memory-mapped), which passes through the device in blocks.

    Copies run on a stream of their own through pinned memory while the block before is scored, so device memory stays
    the same whatever the corpus holds: two blocks, and k results a query.

    Parameters
    ----------
    queries : CudaCollection or anything that `pack` takes
    tokens : numpy.ndarray, shape (total, depth)
        f16, f32, or bf16 as uint16 or ``ml_dtypes.bfloat16``; read once. Pinned memory is copied from directly.
    offsets : numpy.ndarray of int64, shape (count + 1,)
    k : int
        1 to 4096.
    block : int
        Documents a block at most; default: as many as 256 MB hold.
    progress : callable
        Called with the number of documents of each block once it is queued.
    **options
        ``metric``, ``reduction``, ``empty`` of `score`.
    """
    queries = queries if isinstance(queries, CudaCollection) else pack(queries, dtype=dtype, copy=False)
    offsets = np.asarray(offsets, np.int64)
    stored = STORED[queries.dtype]
    if tokens.ndim != 2 or tokens.shape[1] != queries.depth or tokens.itemsize != stored.itemsize:
        raise ShapeMismatch(
            f"tokens: {tokens.dtype} {tokens.shape}, wanted (total, {queries.depth}) of {queries.dtype}"
        )
    tokens = tokens.view(stored)
    count = len(offsets) - 1
    k = _check_k(k, count)
    limit = BLOCK_BYTES // (queries.depth * stored.itemsize)
    limit = max(limit, int(np.diff(offsets).max(initial=1)))
    ranges = [part for wide in _blocks(offsets, limit) for part in _split(wide, block)]
    limit = max((int(offsets[last] - offsets[first]) for first, last in ranges), default=1)
    with cp.cuda.Device(queries.device_id), ThreadPoolExecutor(COPY_THREADS) as pool:
        pinned = tokens.flags.c_contiguous and _is_pinned(tokens)
        slots = [_Staging(max(limit, 1), queries.depth, stored, pinned) for _ in range(2)]
        compute, copies = cp.cuda.get_current_stream(), cp.cuda.Stream(non_blocking=True)
        running = _Running(len(queries), k, np.float64 if queries.dtype == "f32" else np.float32, queries.row)
        for turn, (first, last) in enumerate(ranges):
            slot = slots[turn % 2]
            target = slot.fill(tokens[offsets[first] : offsets[last]], pool, copies)
            compute.wait_event(slot.copied)
            part = CudaCollection(
                target, offsets[first : last + 1] - offsets[first], queries.dtype, best_row(queries.device_id)
            )
            running.add(_ranked(score(queries, part, **options).scores, options), first)
            slot.scored.record(compute)
            if progress is not None:
                progress(last - first)
        copies.synchronize()  # the staging memory is given back below
        best, indices = running.result()
        return _ranked(best, options), indices


def _split(documents: tuple[int, int], block: int | None) -> list[tuple[int, int]]:
    first, last = documents
    step = block or last - first
    return [(at, min(at + step, last)) for at in range(first, last, step)]
