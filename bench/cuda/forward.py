"""Forward benches on a CUDA device: ``python bench/cuda/forward.py out.jsonl [workload ...]``; one JSON record a line.

``kernel_ms`` is device time (CUDA graph replay), ``call_ms`` the whole Python call enqueued back to back, with a query
that is a plain array, ``packed_call_ms`` the same through `numkong_py.maxsim` with a packed one. Document sets rotate,
so that no run measures the L2 cache.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
import numkong_py as nk
from bench.cuda.timing import ceilings, kernel_ms, stamp, whole_call_ms
from numkong_py import cuda


class Workload(NamedTuple):
    """Queries x documents, tokens of each, depth and type; `most` is the project's target for kernel and call in ms."""

    queries: int
    documents: int
    query_tokens: int
    document_tokens: int
    depth: int = 128
    dtype: str = "bf16"
    least_tokens: int = 0  # ragged from here to document_tokens
    most: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        ragged = f"{self.least_tokens}.." if self.least_tokens else ""
        shape = f"{self.queries}x{self.documents},{self.query_tokens}x{ragged}{self.document_tokens}"
        return f"{shape},d{self.depth},{self.dtype}"


WORKLOADS = [
    Workload(1, 1000, 32, 300, most=(0.023, 0.035)),
    Workload(1, 10000, 32, 300, most=(0.20,)),
    Workload(1, 1000, 32, 1024, most=(0.064,)),
    Workload(1, 1000, 128, 1024, most=(0.072,)),
    Workload(1, 1000, 512, 1024, most=(0.195,)),
    Workload(1, 1000, 1024, 1024, most=(0.36,)),
    Workload(32, 1000, 32, 180, most=(0.080,)),
    Workload(32, 1000, 32, 260, least_tokens=100, most=(0.080,)),
    Workload(32, 1000, 32, 300, most=(0.13,)),
    Workload(32, 1000, 1024, 1024, most=(11.2,)),
    Workload(1, 8, 1024, 1024, most=(0.012, 0.025)),
    Workload(1, 1000, 32, 300, dtype="f16"),
    Workload(1, 1000, 1024, 1024, dtype="f16"),
    *(Workload(1, 1000, 1024, 1024, depth=depth) for depth in (64, 96, 256)),
    Workload(1, 1000, 1024, 300, depth=768),
    *(Workload(32, 1000, 32, 300, depth=depth) for depth in (64, 96, 256, 768)),
    Workload(1, 1000, 32, 300, dtype="f32"),
    Workload(1, 1000, 1024, 1024, dtype="f32"),
    Workload(32, 1000, 32, 300, dtype="f32"),
    Workload(1, 1000, 32, 600, least_tokens=1),
]


def lengths_of(workload: Workload) -> np.ndarray:
    if not workload.least_tokens:
        return np.full(workload.documents, workload.document_tokens)
    rng = np.random.default_rng(7)
    return rng.integers(workload.least_tokens, workload.document_tokens + 1, workload.documents)


def tokens_of(count: int, depth: int, dtype: str, seed: int) -> cp.ndarray:
    """Unit vectors of random directions; bf16 as its bits."""
    cp.random.seed(seed)
    x = cp.random.standard_normal((count, depth), dtype=np.float32)
    x /= cp.linalg.norm(x, axis=1, keepdims=True)
    if dtype == "f32":
        return x
    if dtype == "f16":
        return x.astype(np.float16)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def measure(workload: Workload, ceiling: dict[str, float]) -> dict[str, Any]:
    lengths = lengths_of(workload)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total, depth, dtype = int(offsets[-1]), workload.depth, workload.dtype
    item = 4 if dtype == "f32" else 2
    name = "bf16" if dtype == "bf16" else None
    count = max(1, min(6, math.ceil(400e6 / (total * depth * item))))
    raw = tokens_of(workload.queries * workload.query_tokens, depth, dtype, 1)
    raw = raw.reshape(workload.queries, workload.query_tokens, depth)
    packed_query = nk.pack(raw, dtype=name)
    packed_sets = [nk.pack(tokens_of(total, depth, dtype, 2 + i), offsets=offsets, dtype=name) for i in range(count)]
    queries, sets = packed_query.pointer, [packed.pointer for packed in packed_sets]
    cp.cuda.runtime.deviceSynchronize()
    out = cp.empty((workload.queries, workload.documents), np.float64 if dtype == "f32" else np.float32)
    score: list[Callable[[], Any]] = [lambda d=d: cuda.score(queries, d, out=out) for d in sets]
    call: list[Callable[[], Any]] = [lambda d=d: cuda.score(raw, d, dtype=name) for d in sets]
    packed_call: list[Callable[[], Any]] = [lambda d=d: nk.maxsim(packed_query, d) for d in packed_sets]
    flops = 2.0 * workload.queries * workload.query_tokens * total * depth
    moved = (total * depth + raw.size) * item + out.nbytes
    record: dict[str, Any] = {
        "workload": workload.name,
        "kernel_ms": kernel_ms(score),
        "call_ms": whole_call_ms(call),
        "packed_call_ms": whole_call_ms(packed_call),
    }
    if workload.queries * workload.query_tokens * workload.documents * 4 < 2e9:
        record["argmax_kernel_ms"] = kernel_ms([lambda d=d: cuda.score(queries, d, return_argmax=True) for d in sets])
    record["tflops"] = flops / record["kernel_ms"] / 1e9
    record["of_matmul"] = record["tflops"] / ceiling["matmul_tflops"]
    floor = max(flops / ceiling["matmul_tflops"] / 1e9, moved / ceiling["copy_tbps"] / 1e9)
    record["of_floor"] = floor / record["kernel_ms"]
    record["bound"] = "compute" if floor * ceiling["copy_tbps"] * 1e9 > moved * 1.0001 else "memory"
    record["most_ms"] = workload.most
    return record


def main(path: str, chosen: list[str]) -> None:
    about = stamp()
    start = time.perf_counter()
    ceiling = ceilings()
    print(f"{about['machine']}: matmul {ceiling['matmul_tflops']:.0f} TFLOP/s, copy {ceiling['copy_tbps']:.2f} TB/s")
    with open(path, "a") as file:
        file.write(json.dumps({"workload": "ceilings", **ceiling, **about}) + "\n")
        for workload in WORKLOADS:
            if chosen and not any(part in workload.name for part in chosen):
                continue
            try:
                record = measure(workload, ceiling)
            except Exception as error:  # one shape that fails must not hide the others
                record = {"workload": workload.name, "error": repr(error)[:300]}
            file.write(json.dumps({**record, **ceiling, **about}) + "\n")
            file.flush()
            if "error" in record:
                print(f"{workload.name:34s} FAILED {record['error']}")
                continue
            print(
                f"{workload.name:34s} kernel {record['kernel_ms']:8.4f}  call {record['call_ms']:8.4f}  "
                f"packed {record['packed_call_ms']:8.4f}  "
                f"argmax {record.get('argmax_kernel_ms', math.nan):8.4f}  {record['tflops']:6.0f} TFLOP/s  "
                f"{record['of_matmul']:.2f} of matmul  {record['of_floor']:.2f} of {record['bound']} floor  "
                f"at most {workload.most}",
                flush=True,
            )
            cp.get_default_memory_pool().free_all_blocks()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
