"""Other GPU libraries on the forward workloads: ``python bench/cuda/peers.py out.jsonl``; needs torch and the peers.

Same shapes, data and timing as ``forward.py`` (device time by graph replay, then the whole call back to back). A first
call is timed apart: it tunes for seconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.cuda.forward import Workload
from bench.cuda.timing import stamp, whole_call_ms

WORKLOADS = [
    Workload(1, 1000, 32, 300),
    Workload(1, 1000, 32, 1024),
    Workload(1, 1000, 128, 1024),
    Workload(1, 1000, 1024, 1024),
    Workload(32, 1000, 32, 300),
    Workload(1, 8, 1024, 1024),
]


def graph_ms(calls: list[Callable[[], Any]], rounds: int = 5) -> float:
    """Milliseconds of device time a call, replayed from a CUDA graph."""
    count = 24 // len(calls) * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(rounds + 1):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return statistics.median(times[1:])


def plain(q: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    return torch.einsum("qid,bjd->qbij", q, d).amax(-1).float().sum(-1)


def contenders() -> dict[str, Callable[[torch.Tensor, torch.Tensor], Any]]:
    """What takes queries [n, tokens, depth] and documents [count, tokens, depth]."""
    found: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {"torch einsum": plain}
    try:
        import flash_maxsim as flash

        found["flash-maxsim"] = lambda q, d: (
            flash.flash_maxsim(q[0], d) if len(q) == 1 else flash.flash_maxsim_batched(q, d)
        )
    except ImportError as error:
        print(f"flash-maxsim: {error}")
    try:
        import late_interaction_kernels as late

        found["late-interaction-kernels"] = lambda q, d: late.maxsim(q, d)
    except ImportError as error:
        print(f"late-interaction-kernels: {error}")
    return found


def unit(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, device="cuda")
    return torch.nn.functional.normalize(x, dim=-1).to(torch.bfloat16)


def main(path: str) -> None:
    about = stamp()
    peers = contenders()
    torch.set_grad_enabled(False)
    with open(path, "a") as file:
        for w in WORKLOADS:
            q = unit(w.queries, w.query_tokens, w.depth, seed=1)
            bytes_a_set = w.documents * w.document_tokens * w.depth * 2
            sets = [
                unit(w.documents, w.document_tokens, w.depth, seed=2 + i)
                for i in range(max(1, min(6, -(-400_000_000 // bytes_a_set))))
            ]
            for name, peer in peers.items():
                record: dict[str, Any] = {"workload": w.name, "contender": name}
                if "-" in name:
                    record["version"] = version(name)
                try:
                    start = time.perf_counter()
                    peer(q, sets[0])
                    torch.cuda.synchronize()
                    record["first_call_s"] = time.perf_counter() - start
                    calls = [lambda q=q, d=d, peer=peer: peer(q, d) for d in sets]
                    record["call_ms"] = whole_call_ms(calls)
                    record["kernel_ms"] = graph_ms(calls)
                except Exception as error:  # one shape that fails must not hide the others
                    record["error"] = repr(error)[:200]
                print({key: record[key] for key in record if key != "version"}, flush=True)
                file.write(json.dumps({**record, **about}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
