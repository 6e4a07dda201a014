"""What the CUDA rows do for `numkong_py.PackedTensor`, whose packed buffer is a `CudaCollection` here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cupy as cp
import numpy as np

from ..arrays import Collection, read_indices
from ..errors import DeviceMismatch, IndexOutOfRange, ShapeMismatch, UnsupportedDtype
from ..layout import Contents
from . import search
from .collection import STORED, CudaCollection, on_device
from .collection import pack as pack_arrays
from .scoring import METRICS, Scores
from .scoring import score as score_collections

__all__ = ["adopt", "check_output", "first_nonfinite", "pack", "read_candidates", "score", "topk", "unpack"]

METRIC_NAMES = {number: name for name, number in METRICS.items()}


def _host_tokens(collection: Collection) -> np.ndarray:
    """Tokens of a collection in host memory, side by side, [tokens, depth] in the stored type."""
    stored = STORED[collection.dtype]

    def run(pointer: int, count: int, row_stride: int, element_stride: int) -> np.ndarray:
        interface = {
            "data": (pointer, True),
            "shape": (count, collection.depth),
            "strides": (row_stride, element_stride),
            "typestr": stored.str,
            "version": 3,
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))

    runs = [run(*map(int, each)) for each in zip(*collection.runs) if each[1]]
    return np.concatenate(runs) if runs else np.empty((0, collection.depth), stored)


def pack(row: Any, collection: Collection, normalize: bool) -> Contents:
    """Pack a collection of device arrays, or copy one of host arrays to the current device."""
    packed = _collection_of(row, collection, copy=True)
    if normalize:
        packed.normalize()
    packed.prepare()
    return _contents(row, packed)


def adopt(row: Any, collection: Collection) -> Contents:
    """Take device arrays for one call, where they lie if they can be read there."""
    return _contents(row, _collection_of(row, collection, copy=False))


def _contents(row: Any, packed: CudaCollection) -> Contents:
    return Contents(row, packed, packed, packed.dtype, packed.depth, packed.host_offsets, packed.device)


def _collection_of(row: Any, collection: Collection, copy: bool) -> CudaCollection:
    if collection.device == "cpu":
        tokens, extras = cp.asarray(_host_tokens(collection)), {"offsets": collection.offsets}
    else:
        tokens, extras = collection.source, dict(collection.extras)
        if "mask" in extras and getattr(tokens, "ndim", 0) == 2:  # one set with a mask of its own
            tokens, extras["mask"] = tokens[None], extras["mask"][None]
    return pack_arrays(tokens, dtype=collection.dtype, row=row.name, copy=copy, **extras)


def unpack(contents: Contents, begin: int, end: int) -> cp.ndarray:
    """Tokens begin .. end as they were given, in new memory; bf16 as its bits."""
    packed: CudaCollection = contents.pointer
    with on_device(packed.device_id):
        return packed.unpack()[begin:end].copy()


def first_nonfinite(contents: Contents) -> int | None:
    """First token with a NaN or an infinity, or None; waits for the device."""
    packed: CudaCollection = contents.pointer
    with on_device(packed.device_id):
        found = cp.flatnonzero(~cp.isfinite(packed.squares))
        return int(found[0]) if found.size else None


def read_candidates(candidates: Any, rows: int, documents: Any) -> cp.ndarray:
    """Document indices [rows, count] on the device, counted within the documents' buffer, -1 for none.

    Host arrays are checked; device arrays are not waited for: what lies outside counts as none.
    """
    on_host = not hasattr(candidates, "__cuda_array_interface__")
    indices = read_indices(candidates, "candidates") if on_host else cp.asarray(candidates)
    if indices.ndim == 1 and rows == 1:
        indices = indices[None, :]
    if indices.ndim != 2 or len(indices) != rows:
        raise ShapeMismatch(f"candidates: shape {indices.shape}, wanted [{rows}, count], one row for every query set")
    if indices.dtype.kind not in "iu":
        raise UnsupportedDtype(f"candidates: dtype {indices.dtype}, wanted integers; pass candidates.astype(int)")
    if on_host:
        outside = (indices < -1) | (indices >= len(documents))
        if outside.any():
            row, column = np.argwhere(outside)[0]
            raise IndexOutOfRange(
                f"candidates[{row}, {column}]: {indices[row, column]}, wanted 0 to {len(documents) - 1}, or -1 for none"
            )
    device = documents.pointer.device_id
    if not on_host and indices.device.id != device:
        raise DeviceMismatch(f"candidates: on cuda:{indices.device.id}, docs: on cuda:{device}; copy them over")
    with on_device(device):
        indices = cp.asarray(indices, np.int64)
        inside = (indices >= 0) & (indices < len(documents))
        return cp.ascontiguousarray(cp.where(inside, indices + documents.begin, -1))


def check_output(out: Any, shape: tuple[int, ...], dtype: np.dtype) -> cp.ndarray:
    """The caller's array for scores, if scores can be written to it; any strides will do."""
    fix = f"pass cupy.empty({shape}, cupy.{dtype})"
    if not isinstance(out, cp.ndarray):
        raise UnsupportedDtype(f"out: a {type(out).__name__}, wanted a CuPy array; {fix}")
    if out.dtype != dtype:
        raise UnsupportedDtype(f"out: dtype {out.dtype}, wanted {dtype}; {fix}")
    if out.shape != shape:
        raise ShapeMismatch(f"out: shape {out.shape}, wanted {shape}; {fix}")
    return out


def _part(packed: Any) -> CudaCollection:
    """The sets of a PackedTensor: its whole buffer or a range of it."""
    whole: CudaCollection = packed.pointer
    return whole if len(packed) == len(whole) else whole[packed.begin : packed.end]


def score(
    queries: Any,
    documents: Any,
    *,
    metric: int,
    mean: bool = False,
    candidates: cp.ndarray | None = None,
    threads: int | None = None,
    **options: Any,
) -> Scores:
    """Score packed query sets against packed documents; candidates count within the documents' buffer."""
    return score_collections(
        _part(queries),
        _part(documents) if candidates is None else documents.pointer,
        metric=METRIC_NAMES[metric],
        reduction="mean" if mean else "sum",
        candidates=candidates,
        **options,
    )


def topk(
    queries: Any,
    documents: Any,
    k: int,
    *,
    metric: str,
    candidates: Any = None,
    block: int | None = None,
    progress: Any = None,
    threads: int | None = None,
    **options: Any,
) -> tuple[cp.ndarray, cp.ndarray]:
    """The k best documents of each query, selected on the device; short lists end in index -1, scored as empty."""
    with on_device(documents.pointer.device_id):
        worst = np.inf if metric == "angular" else -np.inf
        available = len(documents)
        if candidates is not None:
            candidates = read_candidates(candidates, len(queries), documents)
            candidates = cp.where(candidates < 0, -1, candidates - documents.begin)
            available = candidates.shape[1]
        found = min(k, available)
        scores = cp.full((len(queries), k), worst, np.float64 if documents.dtype == "f32" else np.float32)
        indices = cp.full((len(queries), k), -1, np.int64)
        if found and len(queries):
            best, where = search.topk(
                _part(queries), _part(documents), found, candidates=candidates, metric=metric, **options
            )
            scores[:, :found] = cp.where(where < 0, worst, best)
            indices[:, :found] = where
        if callable(progress):
            progress(len(documents))
    return (scores[0], indices[0]) if queries.single else (scores, indices)
