"""Device memory of a call beyond its inputs and scores: ``python bench/cuda/memory.py out.jsonl [largest count]``.

ColPali's shape: one query of 1024 tokens, documents of 1024 tokens, depth 128, bf16; up to as many documents as fit.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cupy as cp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.cuda.forward import tokens_of
from bench.cuda.timing import stamp
from numkong_py import cuda

TOKENS, DEPTH = 1024, 128
SPARE_BYTES = 3e9  # of the device, left to the library and to what others hold


class Peak(cp.cuda.MemoryHook):
    """The most bytes that are handed out at a time."""

    name = "peak"

    def __init__(self) -> None:
        self.now = self.most = 0

    def malloc_postprocess(self, *, size: int, **_: object) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def free_postprocess(self, *, mem_size: int, **_: object) -> None:
        self.now -= mem_size


def main(path: str, largest: int) -> None:
    free, _ = cp.cuda.runtime.memGetInfo()
    fitting = int((free - SPARE_BYTES) / (TOKENS * DEPTH * 2 + TOKENS * 8))
    about = stamp()
    query = cuda.pack(tokens_of(TOKENS, DEPTH, "bf16", 1), dtype="bf16")
    some = tokens_of(1000 * TOKENS, DEPTH, "bf16", 2).reshape(1000, TOKENS, DEPTH)
    with open(path, "a") as file:
        for count in sorted({1000, 10_000, 100_000, fitting}):
            if count > min(fitting, largest):
                continue
            cp.get_default_memory_pool().free_all_blocks()
            corpus = cp.empty((count, TOKENS, DEPTH), np.uint16)
            for first in range(0, count, 1000):
                corpus[first : first + 1000] = some[: min(1000, count - first)]
            documents = cuda.pack(corpus, dtype="bf16", copy=False)
            with Peak() as packing:
                documents.prepare()
            out = cp.empty((1, count), np.float32)
            begin, end = cp.cuda.Event(), cp.cuda.Event()
            with Peak() as first_call:
                cuda.score(query, documents, out=out)
            with Peak() as later_call:
                cuda.score(query, documents, out=out)
            begin.record()
            cuda.score(query, documents, out=out)
            end.record()
            end.synchronize()
            record = {
                "workload": f"memory,1x{count},{TOKENS}x{TOKENS},d{DEPTH},bf16",
                "corpus_gb": corpus.nbytes / 1e9,
                "norms_mb": packing.most / 1e6,
                "first_call_mb": first_call.most / 1e6,
                "later_call_mb": later_call.most / 1e6,
                "similarities_mb": count * TOKENS * TOKENS * 4 / 1e6,  # what is never stored
                "call_ms": cp.cuda.get_elapsed_time(begin, end),
            }
            print(record, flush=True)
            file.write(json.dumps({**record, **about}) + "\n")
            last = count - count % 1000 - 1000
            assert (out[0, last : last + 1000] == out[0, :1000]).all(), "documents score the same wherever they lie"
            del corpus, documents, out


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize)
