"""A corpus in host memory through a device pool of 8 GB: ``python bench/cuda/stream.py out.jsonl [gigabytes]``.

``of_copy`` compares its rate with one large pinned copy to the device in the same run.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import cupy as cp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.cuda.forward import tokens_of
from bench.cuda.timing import stamp
from numkong_py import cuda

TOKENS, DEPTH = 300, 128


def pinned_copy_gbps(size: int = 1 << 30) -> float:
    host = np.frombuffer(cp.cuda.alloc_pinned_memory(size), np.uint8, size)
    device = cp.empty(size, np.uint8)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        device.set(host)
        cp.cuda.runtime.deviceSynchronize()
        times.append(time.perf_counter() - start)
    return size / min(times) / 1e9


def main(path: str, gigabytes: float) -> None:
    cp.get_default_memory_pool().set_limit(size=8 << 30)
    count = int(gigabytes * 1e9) // (TOKENS * DEPTH * 2)
    block = tokens_of(1 << 20, DEPTH, "f16", 3).get()
    tokens = np.resize(block, (count * TOKENS, DEPTH))
    offsets = np.arange(count + 1, dtype=np.int64) * TOKENS
    queries = cuda.pack(tokens_of(32, DEPTH, "f16", 1))
    copy = pinned_copy_gbps()
    cuda.stream_topk(queries, tokens[: 3000 * TOKENS], offsets[:3001], 100)
    records = []
    for kind in ("pageable", "pinned"):
        if kind == "pinned":
            memory = np.frombuffer(cp.cuda.alloc_pinned_memory(tokens.nbytes), np.float16, tokens.size)
            memory = memory.reshape(tokens.shape)
            memory[:] = tokens
            tokens = memory
        cp.get_default_memory_pool().free_all_blocks()
        start = time.perf_counter()
        cuda.stream_topk(queries, tokens, offsets, 100)
        cp.cuda.runtime.deviceSynchronize()
        seconds = time.perf_counter() - start
        rate = tokens.nbytes / seconds / 1e9
        records.append(
            {
                "workload": f"stream,{kind},32x{TOKENS},d{DEPTH},f16",
                "corpus_gb": tokens.nbytes / 1e9,
                "documents_per_second": count / seconds,
                "gbps": rate,
                "pinned_copy_gbps": copy,
                "of_copy": rate / copy,
                "device_pool_gb": cp.get_default_memory_pool().total_bytes() / 1e9,
            }
        )
        print(records[-1], flush=True)
    about = stamp()
    with open(path, "a") as file:
        file.writelines(json.dumps({**record, **about}) + "\n" for record in records)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 20.0)
