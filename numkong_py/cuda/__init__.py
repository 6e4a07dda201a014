"""CUDA rows: fused MaxSim on CuPy arrays. Importing this touches neither CuPy nor a device; names load at first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .rows import cuda_rows

__all__ = ["CudaCollection", "Scores", "cuda_rows", "pack", "score", "stream_topk", "topk", "warmup"]

_HOMES = {
    "CudaCollection": ".collection",
    "Scores": ".scoring",
    "pack": ".collection",
    "score": ".scoring",
    "stream_topk": ".search",
    "topk": ".search",
    "warmup": ".scoring",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(_HOMES[name], __name__), name)
    return found
