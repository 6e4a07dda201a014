"""Seconds of a new process's first call, its cache empty and full: ``python bench/cuda/first_call.py out.jsonl``.

The call packs, scores and reads the scores back; imports, and the start of the CUDA context, are timed apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.cuda.timing import stamp

PROCESS = """
import time
import cupy, numpy
import numkong_py as nk
x = cupy.asarray(numpy.random.default_rng(1).standard_normal((1000, 300, 128)).astype(numpy.float16))
q = x[0, :32].copy()
cupy.cuda.runtime.deviceSynchronize()
start = time.perf_counter()
packed = nk.pack(x)
nk.maxsim(q, packed).get()
first = time.perf_counter() - start
start = time.perf_counter()
other = nk.pack(x[:77, :251])  # another count and length compile nothing
nk.maxsim(x[0, :21].copy(), other).get()
nk.maxsim(x[:5, :30].copy(), packed).get()
print(first, time.perf_counter() - start)
"""


def main(path: str) -> None:
    about = stamp()
    with tempfile.TemporaryDirectory() as cache, open(path, "a") as file:
        environment = {**os.environ, "NUMKONG_CACHE": cache, "PYTHONPATH": os.pathsep.join(sys.path)}
        environment["CUDA_CACHE_DISABLE"] = "1"  # NVRTC and the driver keep caches of their own
        for state in ("empty", "full"):
            told = subprocess.run([sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True)
            if told.returncode:
                sys.exit(told.stderr)
            first, other = map(float, told.stdout.split())
            record = {"workload": f"first call,{state} cache", "first_call_s": first, "other_shapes_s": other}
            print(record, flush=True)
            file.write(json.dumps({**record, **about}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
