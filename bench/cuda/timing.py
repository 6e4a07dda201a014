"""Timing on one CUDA device: CUDA events around many calls, medians; what ceilings the card has in the same run."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import cupy as cp

__all__ = ["ceilings", "kernel_ms", "stamp", "whole_call_ms"]


def _events() -> tuple[cp.cuda.Event, cp.cuda.Event]:
    return cp.cuda.Event(), cp.cuda.Event()


def kernel_ms(calls: list[Callable[[], Any]], target_ms: float = 30.0, rounds: int = 5) -> float:
    """Milliseconds of device time a call: calls in rotation, replayed from a CUDA graph; launches cost nothing."""
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        for call in calls:
            call()
            call()
        begin, end = _events()
        stream.synchronize()
        begin.record(stream)
        calls[0]()
        end.record(stream)
        stream.synchronize()
        once = max(cp.cuda.get_elapsed_time(begin, end), 2e-3)
        count = max(1, min(200 // len(calls), int(target_ms / once / len(calls)))) * len(calls)
        stream.begin_capture()
        for i in range(count):
            calls[i % len(calls)]()
        graph = stream.end_capture()
        graph.launch(stream)
        times = []
        for _ in range(rounds):
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            stream.synchronize()
            times.append(cp.cuda.get_elapsed_time(begin, end) / count)
    return statistics.median(times)


def whole_call_ms(calls: list[Callable[[], Any]], target_ms: float = 30.0, rounds: int = 5) -> float:
    """Milliseconds a Python call, enqueued back to back: whichever of host and device is slower."""
    for call in calls:
        call()
    cp.cuda.runtime.deviceSynchronize()
    start = time.perf_counter()
    calls[0]()
    cp.cuda.runtime.deviceSynchronize()
    once = max(1e3 * (time.perf_counter() - start), 1e-2)
    count = max(1, min(400, int(target_ms / once))) * len(calls)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for i in range(count):
            calls[i % len(calls)]()
        cp.cuda.runtime.deviceSynchronize()
        times.append(1e3 * (time.perf_counter() - start) / count)
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """TFLOP/s of an 8192^3 bf16 product through torch, TB/s of a device copy (read + write): this run's reach."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def best_of(call: Callable[[], Any], count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(5):
            call()
            begin.record()
            for _ in range(count):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / count)
        return statistics.median(times)

    product = 2 * 8192**3 / best_of(lambda: torch.mm(a, b, out=c), 20) / 1e9
    copy = 2 * source.numel() / best_of(lambda: target.copy_(source), 10) / 1e9
    return {"matmul_tflops": product, "copy_tbps": copy}


def stamp() -> dict[str, Any]:
    """What every record says of the machine and the code."""

    def told(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
        except OSError:
            return ""

    properties = cp.cuda.runtime.getDeviceProperties(0)
    return {
        "machine": "H200" if b"H200" in properties["name"] else properties["name"].decode(),
        "driver": cp.cuda.runtime.driverGetVersion(),
        "nvrtc": ".".join(map(str, cp.cuda.nvrtc.getVersion())),
        "cupy": cp.__version__,
        "python": platform.python_version(),
        "commit": os.environ.get("NUMKONG_COMMIT") or told("git", "rev-parse", "--short", "HEAD"),
    }
