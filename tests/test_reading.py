"""Reading from the disk in pieces: every byte in its place, whatever the system gives at a time or refuses."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numkong_py as nk
from numkong_py.corpus import reading
from numkong_py.corpus.reading import PAGE, Room, cache_limit, start_reading

CONTENTS = np.random.default_rng(5).integers(0, 256, 20 * PAGE + 777, dtype=np.uint8).tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENTS)
    return path


@pytest.fixture
def readers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as readers:
        yield readers


def read(
    readers: ThreadPoolExecutor, path: Path, begin: int, count: int, direct: bool, room: Room | None = None
) -> bytes:
    found = start_reading(readers, path, begin, count, room or Room(), direct=direct)()
    return found.tobytes()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "plain"])
@pytest.mark.parametrize("piece", [PAGE, 3 * PAGE, reading.PIECE])
def test_any_place_and_count(
    direct: bool, piece: int, path: Path, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE", piece)
    room = Room()
    size = len(CONTENTS)
    for begin in (0, 64, PAGE - 64, PAGE, 2 * PAGE + 64, size - 1, size):
        for count in (0, 1, 100, PAGE, 3 * PAGE, 3 * PAGE + 1, size - begin):
            wanted = CONTENTS[begin : begin + count]
            if len(wanted) == count:
                assert read(readers, path, begin, count, direct, room) == wanted


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "plain"])
def test_what_a_file_lacks(
    direct: bool, path: Path, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE", 2 * PAGE)
    for length in (0, 64, PAGE, 7 * PAGE + 5, len(CONTENTS) - 1):
        os.truncate(path, length)
        with pytest.raises(nk.CorruptFile, match="file: became shorter"):
            read(readers, path, 64, len(CONTENTS) - 64, direct)
        path.write_bytes(CONTENTS)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=str(path)):
        read(readers, path, 0, 100, direct)


class Disk:
    """Stands in for `open`: gives few bytes at a time, or errors."""

    def __init__(self, most: int, number: int | None = None, direct_number: int | None = None) -> None:
        self.most, self.number, self.direct_number = most, number, direct_number
        self.calls = 0

    def __call__(self, path: Path, mode: str, buffering: int, opener: Any = None) -> io.RawIOBase:
        disk, number = self, self.direct_number if opener else self.number
        raw = io.FileIO(path)

        class File(io.RawIOBase):
            def seek(self, place: int, whence: int = 0) -> int:
                return raw.seek(place, whence)

            def readinto(self, target: Any) -> int:
                disk.calls += 1
                if number is not None:
                    raise OSError(number, os.strerror(number))
                return raw.readinto(memoryview(target)[: disk.most])

            def close(self) -> None:
                raw.close()
                super().close()

        return File()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "plain"])
def test_short_reads(direct: bool, path: Path, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(777)
    monkeypatch.setattr(reading, "open", disk, raising=False)
    monkeypatch.setattr(reading, "PIECE", 2 * PAGE)
    assert read(readers, path, 64, len(CONTENTS) - 64, direct) == CONTENTS[64:]
    assert disk.calls > len(CONTENTS) // 777


def test_refused_direct_reads_are_plain_ones(
    path: Path, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(PAGE, direct_number=errno.EINVAL)
    monkeypatch.setattr(reading, "open", disk, raising=False)
    assert read(readers, path, 0, len(CONTENTS), direct=True) == CONTENTS
    assert disk.calls > 20


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "plain"])
def test_a_disk_that_fails_names_the_file(
    direct: bool, path: Path, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "open", Disk(PAGE, errno.EIO, errno.EIO), raising=False)
    with pytest.raises(OSError, match=str(path)) as caught:
        read(readers, path, 0, len(CONTENTS), direct)
    assert caught.value.errno == errno.EIO


def test_nobody_writes_into_the_room_after_an_error(
    path: Path, readers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, ended = threading.Event(), []

    def read_piece(path: Path, begin: int, *rest: Any) -> None:
        if begin == 0:
            failed.set()
            raise OSError(errno.EIO, "no")
        failed.wait(60)
        threading.Event().wait(0.05)
        ended.append(begin)

    monkeypatch.setattr(reading, "_read_piece", read_piece)
    monkeypatch.setattr(reading, "PIECE", 5 * PAGE)
    finish = start_reading(readers, path, 0, len(CONTENTS), Room(), direct=False)
    with pytest.raises(OSError, match="no"):
        finish()
    assert sorted(ended) == [5 * PAGE, 10 * PAGE, 15 * PAGE, 20 * PAGE]


def test_a_room_is_used_again_and_aligned() -> None:
    room = Room()
    large = room.take(3 * PAGE + 1)
    assert len(large) == 4 * PAGE and large.ctypes.data % PAGE == 0
    assert room.take(PAGE).ctypes.data == large.ctypes.data
    assert Room().take(PAGE).ctypes.data != large.ctypes.data


@pytest.mark.skipif(not Path("/proc/self/cgroup").exists(), reason="cgroups are Linux's")
def test_the_limit_of_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    _, controllers, place = places[0]
    monkeypatch.setattr(reading, "CGROUPS", ((controllers.split(",")[0], tmp_path, "limit"),))
    free = cache_limit()
    assert 0 < free < 1 << 50
    (tmp_path / "limit").write_text("12345\n")
    assert cache_limit() == 12345
    (tmp_path / "limit").write_text("max\n")
    assert cache_limit() == pytest.approx(free, rel=0.5)
    inner = tmp_path / place.lstrip("/")
    inner.mkdir(parents=True, exist_ok=True)
    (inner / "limit").write_text("99\n")
    assert cache_limit() == 99
