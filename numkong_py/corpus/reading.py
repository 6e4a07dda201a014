"""Files from the disk into memory: in pieces, by several threads, past the page cache where it could not keep them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, wait
from pathlib import Path

import numpy as np

from ..errors import CorruptFile
from ..layout import aligned_bytes

__all__ = ["PIECE", "READERS", "Room", "cache_limit", "start_reading"]

PAGE = 4096  # direct reads want memory, places and counts on multiples of it; a disk that wants more refuses them
PIECE = 8 << 20  # bytes of one read: the system splits it into as many requests as the disk takes at once
READERS = 2  # threads: while one read ends, the next has begun
CGROUPS = (  # memory limits of a process, v1 and v2: controller, folder, file
    ("memory", Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    ("", Path("/sys/fs/cgroup"), "memory.max"),
)


class Room:
    """Memory that files are read into, one after another."""

    def __init__(self) -> None:
        self._bytes = aligned_bytes(0, PAGE)

    def take(self, count: int) -> np.ndarray:
        """At least so many bytes, whole pages; what was taken before is overwritten."""
        count += -count % PAGE
        if len(self._bytes) < count:
            self._bytes = aligned_bytes(count, PAGE)
        return self._bytes[:count]


def start_reading(
    readers: Executor, path: Path, begin: int, count: int, room: Room, *, direct: bool
) -> Callable[[], np.ndarray]:
    """Start reading `count` bytes of a file from `begin`; what is returned waits for them and gives them.

    Parameters
    ----------
    readers : Executor
    path : Path
    begin, count : int
    room : Room
        Where the bytes go.
    direct : bool
        Past the page cache, which costs the processor a third and leaves what is cached alone; the bytes are not
        there for the next reader.

    Raises
    ------
    CorruptFile
        The file ended before. OSError of the system's kind, naming the file.
    """
    lead = begin % PAGE
    first, size = begin - lead, lead + count
    buffer = room.take(size)
    pieces = [
        readers.submit(
            _read_piece, path, first + at, memoryview(buffer[at : at + PIECE]), min(PIECE, size - at), direct
        )
        for at in range(0, size, PIECE)
    ]

    def finish() -> np.ndarray:
        wait(pieces)  # all of them, also after an error: nobody writes into the room from here on
        for piece in pieces:
            piece.result()
        return buffer[lead:size]

    return finish


def _read_piece(path: Path, begin: int, target: memoryview, count: int, direct: bool) -> None:
    """Read `count` bytes from a multiple of a page into whole pages; plain reads do what direct ones leave."""
    try:
        done = _read_direct(path, begin, target, count) if direct else 0
        if done < count:
            done += _read_plain(path, begin + done, target[done:count])
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    if done < count:
        raise CorruptFile(f"{path}: became shorter while it was read")


def _read_direct(path: Path, begin: int, target: memoryview, count: int) -> int:
    """How many of the bytes came by one read past the page cache: none where file system or disk refuse it."""
    try:
        with open(path, "rb", buffering=0, opener=_open_direct) as file:
            file.seek(begin)
            return min(count, file.readinto(target))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return 0


def _open_direct(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_DIRECT", 0))


def _read_plain(path: Path, begin: int, target: memoryview) -> int:
    """How many of the bytes came by plain reads: fewer than wanted only where the file ends."""
    done = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while done < len(target) and (got := file.readinto(target[done:])):
            done += got
    return done


def cache_limit() -> int:
    """Bytes of files that the system can keep in memory for this process, as far as it tells (Linux does)."""
    return min([*_available(), *_cgroup_limits()], default=1 << 63)


def _available() -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield 1024 * int(line.split()[1])


def _cgroup_limits() -> Iterator[int]:
    """Limits of the groups that this process is in, and of those around them."""
    lines = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, place = line.split(":", 2)
        for controller, root, name in CGROUPS:
            if controller in controllers.split(","):
                inside = Path(place.lstrip("/"))
                for folder in (root / inside, *(root / parent for parent in inside.parents)):
                    with contextlib.suppress(OSError, ValueError):  # not here, in a container; or "max"
                        yield int((folder / name).read_text())
