"""Timing: contenders take turns, one call each a round, with the machine's ceilings in between."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ceilings import Ceilings


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds until `seconds` have passed, within bounds; a turn lasts `turn_seconds` or longer.

    The clock is wall time; processor time of one thread where a machine is shared with other work.
    """

    least: int = 5
    most: int = 41
    seconds: float = 4.0
    turn_seconds: float = 2e-3
    clock: Callable[[], float] = time.perf_counter


QUICK = Effort(least=3, most=5, seconds=0.5, turn_seconds=5e-4)


def _repeats(call: Callable[[], Any], turn_seconds: float) -> int:
    """Calls in a turn; the first one warms up."""
    call()
    begin = time.perf_counter()
    call()
    return max(1, int(turn_seconds / max(time.perf_counter() - begin, 1e-7)))


def interleave(
    calls: dict[str, tuple[Callable[[], Any], Callable[[], None] | None]], ceilings: Ceilings | None, effort: Effort
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Time every call in turn, again and again.

    Parameters
    ----------
    calls : dict
        Name to (call, activate); activate runs before a turn, outside of the time.
    ceilings : Ceilings or None
        Sampled in every round.
    effort : Effort

    Returns
    -------
    seconds : dict
        Name to seconds a call, one number a round.
    rates : dict
        Ceiling to giga-operations (gigabytes) a second, one number a round.
    """
    repeats = {}
    for name, (call, activate) in calls.items():
        if activate:
            activate()
        repeats[name] = _repeats(call, effort.turn_seconds)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    rates: dict[str, list[float]] = {name: [] for name in (ceilings.names if ceilings else ())}
    enabled, start, rounds = gc.isenabled(), time.perf_counter(), 0
    gc.collect()
    gc.disable()
    try:
        while rounds < effort.least or (rounds < effort.most and time.perf_counter() - start < effort.seconds):
            for name, (call, activate) in calls.items():
                if activate:
                    activate()
                begin = effort.clock()
                for _ in range(repeats[name]):
                    call()
                seconds[name].append((effort.clock() - begin) / repeats[name])
            for name in rates:
                rates[name].append(ceilings.sample(name))
            rounds += 1
    finally:
        if enabled:
            gc.enable()
    return seconds, rates


# ---------------------------------------------------------------------------------------------------- memory


def _resident(field: str) -> int:
    """Bytes from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def extra_peak_bytes(call: Callable[[], Any]) -> int:
    """Memory that a call needs at its peak beyond what is there before it; meant for a process of its own.

    The system's high-water mark is set back where it can be (Linux); elsewhere the mark of the whole process counts,
    which is too small when making the inputs took more.
    """
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        call()
        return max(0, _resident("VmHWM") - before)
    except OSError:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        call()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (
            1 if os.uname().sysname == "Darwin" else 1024
        )
