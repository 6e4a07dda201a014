"""`numkong_py.jax` against a jitted einsum, `lax.map` and the NumPy facade: one JSON line for every measurement.

    python bench/jax_calls.py                  wall time, on a machine of its own
    python bench/jax_calls.py --clock process  processor time of all threads, where others use the machine too

Shapes are one query against documents, depth 128; the least of several runs counts. Peak memory is that of a process of
its own, over what it held before the call.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import numkong_py as nk
from numkong_py import jax as nkx

SHAPES = {"rerank": (1000, 32, 300), "colpali": (100, 1024, 1024)}  # documents, query tokens, document tokens
DEPTH = 128
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def einsum(q: Any, docs: Any) -> Any:
    """All similarities at once."""
    return jnp.einsum("qid,bjd->qbij", q, docs).max(-1).sum(-1)


def mapped(q: Any, docs: Any) -> Any:
    """One document at a time."""
    return jax.lax.map(lambda one: jnp.einsum("qid,jd->qij", q, one).max(-1).sum(-1), docs)


def milliseconds(function: Callable[[], Any], clock: Callable[[], float], runs: int, calls: int = 1) -> float:
    """Least time of a call."""
    jax.block_until_ready(function())
    times = []
    for _ in range(runs):
        start = clock()
        for _ in range(calls):
            result = function()
        jax.block_until_ready(result)
        times.append((clock() - start) / calls * 1e3)
    return min(times)


def overhead(clock: Callable[[], float]) -> dict[str, Any]:
    """A jitted call on next to nothing, beside one of a program that adds 1."""
    q, docs = jnp.ones((1, 4, 16)), jnp.ones((2, 4, 16))
    ours, trivial = jax.jit(nkx.maxsim), jax.jit(lambda q, docs: q + 1)
    return {
        "what": "overhead",
        "ours_us": 1e3 * milliseconds(lambda: ours(q, docs), clock, 20, 200),
        "trivial_us": 1e3 * milliseconds(lambda: trivial(q, docs), clock, 20, 200),
    }


def speed(shape: str, dtype: str, clock: Callable[[], float]) -> dict[str, Any]:
    """Arrays and a packed corpus, here and in the facade; einsum and map of arrays."""
    count, query_tokens, document_tokens = SHAPES[shape]
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((1, query_tokens, DEPTH)), dtype)
    docs = jnp.asarray(rng.standard_normal((count, document_tokens, DEPTH)), dtype)
    host = np.asarray(q), np.asarray(docs)
    tensor = nk.pack(host[1])
    corpus = nkx.packed(tensor)
    functions = {name: jax.jit(f) for name, f in (("ours", nkx.maxsim), ("einsum", einsum), ("map", mapped))}
    calls = {
        "arrays": lambda: functions["ours"](q, docs),
        "packed": lambda: functions["ours"](q, corpus),
        "facade_arrays": lambda: nk.maxsim(*host),
        "facade_packed": lambda: nk.maxsim(host[0], tensor),
        "einsum": lambda: functions["einsum"](q, docs),
        "map": lambda: functions["map"](q, docs),
    }
    return {
        "what": shape,
        "dtype": dtype,
        **{f"{name}_ms": milliseconds(call, clock, 5) for name, call in calls.items()},
    }


def peak_megabytes() -> float:
    """Of this process on Linux; getrusage would start from what the parent held."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024


def memory() -> dict[str, Any]:
    """What a forward and a backward pass of 16 x 24 pages take beyond their inputs."""
    rng = np.random.default_rng(0)
    q, docs = (jnp.asarray(rng.standard_normal((n, 1024, DEPTH)), jnp.float32) for n in (16, 24))
    both = jax.jit(jax.grad(lambda q, docs: nkx.maxsim(q, docs).sum(), (0, 1)))
    jax.block_until_ready(both(q[:1, :8], docs[:1, :8]))
    before = peak_megabytes()
    jax.block_until_ready(jax.jit(nkx.maxsim)(q, docs))
    forward = peak_megabytes()
    jax.block_until_ready(both(q, docs))
    return {
        "what": "peak memory",
        "forward_mb": forward - before,
        "with_gradients_mb": peak_megabytes() - before,
        "argmax_and_gradients_mb": (16 * 24 * 1024 * 4 + q.nbytes + docs.nbytes) / 2**20,
        "similarities_mb": 16 * 24 * 1024 * 1024 * 4 / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--memory", action="store_true", help="only the peak memory, in this process")
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(memory()))
        return
    clock = CLOCKS[options.clock]
    print(json.dumps({"jax": jax.__version__, "clock": options.clock, **overhead(clock)}), flush=True)
    for shape in SHAPES:
        for dtype in ("float32", "bfloat16"):
            print(json.dumps(speed(shape, dtype, clock)), flush=True)
    subprocess.run([sys.executable, __file__, "--memory"], check=True)


if __name__ == "__main__":
    main()
