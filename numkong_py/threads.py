"""The thread pool of this process: made on first use, kept, and forgotten by a forked child."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from typing import Any

from .errors import InvalidArgument

__all__ = ["piece_count", "run_all", "thread_count", "usable_cpus"]

# Handing a piece to a thread was measured at 25 to 60 us (two busy cores); the fastest row spends about as long on this
# many multiply-adds.
WORK_PER_THREAD = 1 << 23
# Pieces of a job outnumber its threads, so that one which shares its processor does not keep the others waiting; each
# is worth a few milliseconds of the fastest row, a hundred times what a call costs.
PIECES_OF_A_THREAD = 8
WORK_OF_A_PIECE = 1 << 28
MOST_THREADS = 256  # started one by one, as work needs them

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _forget() -> None:
    """In a forked child the parent's threads do not exist, and its lock may be held for ever."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def usable_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(threads: int | None, work: int) -> int:
    """Threads for a job of so many multiply-adds: as many as asked for, else as many as the work is worth.

    Examples
    --------
    >>> thread_count(8, 1), thread_count(None, 1000)
    (8, 1)
    """
    if threads is None:
        return 1 if work < 2 * WORK_PER_THREAD else min(usable_cpus(), work // WORK_PER_THREAD)
    if isinstance(threads, bool) or not isinstance(threads, Integral) or threads < 1:
        raise InvalidArgument(f"threads: {threads!r}, wanted None or an integer of at least 1")
    return int(threads)


def piece_count(threads: int, work: int) -> int:
    """Pieces for so many threads and multiply-adds: several a thread, where there is enough work for that.

    Examples
    --------
    >>> piece_count(4, 1000), piece_count(4, 1 << 40)
    (4, 32)
    """
    return max(threads, min(PIECES_OF_A_THREAD * threads, work // WORK_OF_A_PIECE))


def run_all(function: Callable[[Any], Any], pieces: Sequence[Any], threads: int) -> None:
    """Call the function on every piece, here and on `threads` - 1 others, each taking the next one; wait for all."""
    left = deque(pieces)

    def work() -> None:
        while True:
            try:
                piece = left.popleft()
            except IndexError:
                return
            try:
                function(piece)
            except BaseException:
                left.clear()  # the rest is of no use
                raise

    others = min(threads, len(pieces)) - 1
    if not others:
        work()
        return
    global _pool
    with _lock:
        _pool = pool = _pool or ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="numkong_py")
    futures = [pool.submit(work) for _ in range(others)]
    try:
        work()
    finally:
        for future in futures:
            future.exception()  # the buffers must not go away under a running thread
    for future in futures:
        future.result()
