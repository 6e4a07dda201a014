"""Corpora that crash, run out of disk, cannot be written, or are damaged.

``NUMKONG_CRASHES=200 python -m pytest tests/test_corpus_damage.py -k random_points`` kills as often as that.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import DEPTH, QUERIES, assert_holds, assert_tidy, documents
from oracle import ROOT
from test_storage import tensors

import numkong_py as nk
from numkong_py.corpus import writer
from numkong_py.corpus.manifest import MANIFEST, read_manifest

CRASHES = int(os.environ.get("NUMKONG_CRASHES", "24"))
IDS = list(range(24))
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")


@pytest.fixture(autouse=True)
def few_shards_and_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends merge three shards, and files stay in memory: a killed process loses nothing by that."""
    monkeypatch.setattr(writer, "FAN", 3)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def small_corpus(path: Path, kind: str = "int") -> tuple[nk.Corpus, list[Any]]:
    """Shards enough that the next append merges some, ids, metadata, and deleted documents."""
    ids: list[Any] = IDS if kind == "int" else [f"d{id}" for id in IDS]
    corpus = nk.Corpus.create(path, DEPTH, "f32", shard_bytes=20000)
    for begin, end in ((0, 20), (20, 22), (22, 24)):
        part = ids[begin:end]
        odd = [bool(i % 2) for i in range(begin, end)]
        corpus.append(documents(part), part, {"name": [f"n{id}" for id in part], "odd": odd})
    corpus.delete([ids[3], ids[21]])
    return corpus, [id for id in ids if id not in (ids[3], ids[21])]


OPERATIONS: dict[str, tuple[Callable[[nk.Corpus], Any], Callable[[list[Any]], list[Any]]]] = {
    "append": (lambda corpus: corpus.append(documents([100, 101]), [100, 101]), lambda ids: [*ids, 100, 101]),
    "stream": (
        lambda corpus: corpus.append(iter([documents(range(24, 54)), documents(range(54, 84))])),
        lambda ids: [*ids, *range(24, 84)],
    ),
    "delete": (lambda corpus: corpus.delete([0, 22]), lambda ids: [id for id in ids if id not in (0, 22)]),
    "compact": (lambda corpus: corpus.compact(), lambda ids: ids),
}


# ------------------------------------------------------------------------------------------- kill -9


def change_for_ever(path: Path, ids: list[int], seed: int, report: int) -> None:
    """In a child: change the corpus, saying before each change what it is and after it that it is done."""
    rng, ids = np.random.default_rng(seed), list(ids)
    corpus = nk.Corpus.open(path)
    for fresh in count(max(ids) + 1, 10):
        choice = rng.random()
        kind = "append" if choice < 0.5 or len(ids) < 20 else "delete" if choice < 0.8 else "compact"
        chosen: list[int] = []
        if kind == "append":
            chosen = list(range(fresh, fresh + int(rng.integers(1, 10))))
        if kind == "delete":
            chosen = sorted(int(id) for id in rng.choice(ids, int(rng.integers(1, 5)), replace=False))
        os.write(report, json.dumps([kind, chosen]).encode() + b"\n")
        if kind == "append":
            corpus.append(iter([documents(chosen[:3]), documents(chosen[3:])]), chosen)
        elif kind == "delete":
            corpus.delete(chosen)
        else:
            corpus.compact()
        os.write(report, b"done\n")
        ids = [*(id for id in ids if kind != "delete" or id not in chosen), *(chosen if kind == "append" else [])]


def killed_after(seconds: float, child: Callable[[int], Any]) -> list[str]:
    """Lines that a child reported until it was killed, so many seconds after its first one."""
    listen, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(report)
        finally:
            os._exit(1)
    os.close(report)
    with open(listen, "rb", buffering=0) as lines:
        said = lines.read(1)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        said += b"".join(iter(lambda: lines.read(1 << 16), b""))
    return said.decode().splitlines()


def replayed(ids: list[int], lines: list[str]) -> tuple[list[int], list[int], str | None]:
    """The documents after what was acknowledged, after what may be done too, and what that is."""
    running = None
    for line in lines:
        if line != "done":
            running = json.loads(line)
            continue
        ids, running = applied(ids, *running), None
    return (ids, ids, None) if running is None else (ids, applied(ids, *running), running[0])


def applied(ids: list[int], kind: str, chosen: list[int]) -> list[int]:
    if kind == "append":
        return [*ids, *chosen]
    return [id for id in ids if kind != "delete" or id not in chosen]


@forks
def test_killed_at_random_points(tmp_path: Path) -> None:
    """What was acknowledged is there, what was not is there whole or not at all, and readers keep what they have."""
    path, rng = tmp_path / "corpus", np.random.default_rng(9)
    corpus, ids = small_corpus(path)
    readers: list[tuple[nk.Corpus, list[int]]] = []
    interrupted: Counter[str | None] = Counter()
    for number in range(CRASHES):
        if len(ids) > 100:
            corpus.refresh().delete(ids[24:])
            ids = ids[:24]
        readers = [*readers[-3:], (nk.Corpus.open(path), ids)]
        seconds = float(rng.uniform(0, 0.05))
        lines = killed_after(seconds, lambda report, n=number, ids=ids: change_for_ever(path, ids, n, report))
        before, after, running = replayed(ids, lines)
        interrupted[running] += 1
        opened = nk.Corpus.open(path, verify="full")
        ids = after if opened.ids.tolist() == after else before
        assert_holds(opened, ids)
        for reader, had in readers:
            assert_holds(reader, had)
        nk.Corpus.open(path).append([])  # a writer comes by
        assert_tidy(path)
    print(f"killed {CRASHES} times, in {dict(interrupted)}")
    assert CRASHES < 24 or {"append", "delete", "compact"} <= set(interrupted)


class Steps:
    """Everything that a writer asks of the disk, in order; at the n-th something happens instead."""

    def __init__(self, at: int, happens: Callable[[], Any]) -> None:
        self.at, self.happens, self.seen = at, happens, 0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **keywords: Any) -> Any:
            self.seen += 1
            if self.seen == self.at:
                self.happens()
            return function(*arguments, **keywords)

        return step

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("fsync", "replace", "utime"):
            patch.setattr(os, name, self.wrap(getattr(os, name)))
        for name in ("unlink", "write_text"):
            patch.setattr(pathlib.Path, name, self.wrap(getattr(pathlib.Path, name)))
        opened = pathlib.Path.open

        def open_watched(path: Path, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            if "x" not in mode:
                return opened(path, mode, *arguments, **keywords)
            return WatchedFile(self.wrap(opened)(path, mode, *arguments, **keywords), self)

        patch.setattr(pathlib.Path, "open", open_watched)


class WatchedFile:
    """A file whose writes are steps."""

    def __init__(self, file: Any, steps: Steps) -> None:
        self._file = file
        self.write = steps.wrap(file.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> WatchedFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()


@forks
@pytest.mark.parametrize("name", OPERATIONS)
def test_killed_at_every_step(name: str, tmp_path: Path) -> None:
    operation, change = OPERATIONS[name]
    _, ids = small_corpus(tmp_path / "whole")
    outcomes = []
    for at in count(1):
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "whole", path)
        reader = nk.Corpus.open(path)
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.MonkeyPatch.context() as patch:
                    Steps(at, lambda: os.kill(os.getpid(), signal.SIGKILL)).install(patch)
                    operation(nk.Corpus.open(path))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL)
        opened = nk.Corpus.open(path, verify="full")
        done = opened.info()["generation"] > reader.info()["generation"]
        assert_holds(opened, change(ids) if done else ids)
        assert_holds(reader, ids)
        opened.append([])
        assert_tidy(path)
        outcomes.append(done)
        if status == 0:
            break
        shutil.rmtree(path)
    print(f"{name}: killed at {len(outcomes) - 1} steps, done from step {outcomes.index(True) + 1}")
    assert outcomes == sorted(outcomes) and outcomes[-1] and len(outcomes) > 8


# ------------------------------------------------------------------------------------------- full and read-only disks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_disk_that_fails_at_every_step(name: str, number: int, tmp_path: Path) -> None:
    operation, change = OPERATIONS[name]
    _, ids = small_corpus(tmp_path / "whole")

    def fail() -> None:
        raise OSError(number, os.strerror(number), "an inner name")

    failures = 0
    for at in count(1):
        path = tmp_path / str(at)
        shutil.copytree(tmp_path / "whole", path)
        corpus, message = nk.Corpus.open(path), None
        with pytest.MonkeyPatch.context() as patch:
            steps = Steps(at, fail)
            steps.install(patch)
            try:
                operation(corpus)
            except OSError as error:
                message = str(error)
        opened = nk.Corpus.open(path, verify="full")
        done = opened.info()["generation"] > read_manifest(tmp_path / "whole").generation
        assert_holds(opened, change(ids) if done else ids)
        if message is None:
            assert done
        else:
            failures += 1
            assert str(path) in message and os.strerror(number) in message and "an inner name" not in message
            assert "not written" in message or "written, but its folder could not be flushed" in message
        assert_holds(corpus.refresh(), change(ids) if done else ids)
        corpus.append([])
        assert_tidy(path)
        shutil.rmtree(path)
        if steps.seen < at:
            break
    assert failures > 4


@pytest.mark.skipif(os.name != "posix", reason="limits on file sizes are POSIX")
def test_a_disk_that_fills_while_a_shard_is_written(tmp_path: Path) -> None:
    corpus, ids = small_corpus(tmp_path / "corpus")
    code = (
        "import resource, sys, numpy as np, numkong_py as nk\n"
        "corpus = nk.Corpus.open(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))\n"
        "try:\n    corpus.append(np.ones((4000, 8), np.float32))\nexcept OSError as error:\n    print(error)\n"
        "corpus.append(np.ones((3, 8), np.float32))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, corpus.path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert os.strerror(errno.EFBIG) in done.stdout and str(corpus.path) in done.stdout
    assert corpus.refresh().ids.tolist() == [*ids, 24]
    assert_tidy(corpus.path)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_a_read_only_folder() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        corpus, ids = small_corpus(Path(folder, "corpus"))
        (corpus.path / "writer.lock").unlink()
        os.chmod(folder, 0o755)
        corpus.path.chmod(0o555)
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            for operation, _ in OPERATIONS.values():
                with pytest.raises(PermissionError, match=r"cannot be written, and is unchanged") as caught:
                    operation(corpus)
                assert str(corpus.path) in str(caught.value)
            with pytest.raises(PermissionError):
                nk.Corpus.create(corpus.path / "inner", DEPTH, "f32")
            assert_holds(nk.Corpus.open(corpus.path, verify="full"), ids)  # readers need not write
        finally:
            os.seteuid(user)
            corpus.path.chmod(0o755)
        assert_holds(nk.Corpus.open(corpus.path), ids)


@pytest.mark.skipif(sys.platform != "linux", reason="which file a handle is, is asked of /proc")
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_must_survive_a_power_cut_is_on_the_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is flushed before it gets its name, and every name before a manifest that counts on it."""
    corpus, _ = small_corpus(tmp_path / "corpus")
    replace, dirty, unnamed, named = os.replace, set(), set(), []

    def flushed(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            unnamed.clear()
        dirty.discard(path)

    def renamed(source: Path, target: Path) -> None:
        assert source not in dirty, f"{target} gets its name before its bytes are on the disk"
        if Path(target).name == MANIFEST:
            assert not unnamed, f"the manifest is replaced before the names of {unnamed} are on the disk"
        replace(source, target)
        unnamed.add(Path(target))
        named.append(Path(target).name)

    opened = pathlib.Path.open

    def open_dirty(path: Path, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        if "x" in mode:
            dirty.add(path)
        return opened(path, mode, *arguments, **keywords)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(pathlib.Path, "open", open_dirty)
    OPERATIONS[name][0](corpus)
    assert named[-1] == MANIFEST and len(named) > 1 and not unnamed


# ------------------------------------------------------------------------------------------- damage


def facts(corpus: nk.Corpus) -> list[Any]:
    """All that a corpus says of its documents."""
    ids = corpus.ids.tolist()
    scores, found = corpus.topk(QUERIES, 7)
    rows = corpus.metadata.rows(ids)
    listed = corpus.topk(QUERIES[0], 3, candidates=ids[5:20])
    return [ids, scores.tobytes(), found.tolist(), rows, listed[0].tobytes(), listed[1].tolist(), len(corpus)]


def files(path: Path) -> list[Path]:
    manifest = read_manifest(path)
    return [path / MANIFEST, *sorted(path / name for name in manifest.files)]


def boundaries(path: Path) -> Iterator[int]:
    """Sizes that a file is cut to: at, before and behind every place where something begins."""
    size = path.stat().st_size
    edges = {0, 1, 8, size // 2, size}
    if path.suffix == ".safetensors":
        _, table, start = tensors(path)
        edges |= {start + edge for tensor in table.values() for edge in tensor["data_offsets"]} | {start, start + 256}
    yield from sorted({edge + by for edge in edges for by in (-1, 0, 1)} & set(range(size)))


@pytest.mark.parametrize("kind", ["int", "str"])
def test_every_truncation_is_seen(kind: str, tmp_path: Path) -> None:
    small_corpus(tmp_path / "corpus", kind)
    for path in files(tmp_path / "corpus"):
        whole = path.read_bytes()
        for size in boundaries(path):
            path.write_bytes(whole[:size])
            for verify in ("header", "full"):
                with pytest.raises(nk.CorruptFile, match=path.name):
                    nk.Corpus.open(tmp_path / "corpus", verify=verify)
        path.write_bytes(whole + b"\0")
        with pytest.raises(nk.CorruptFile, match=path.name):
            nk.Corpus.open(tmp_path / "corpus")
        path.unlink()
        with pytest.raises((nk.CorruptFile, FileNotFoundError), match=path.name):
            nk.Corpus.open(tmp_path / "corpus")
        path.write_bytes(whole)
    nk.Corpus.open(tmp_path / "corpus", verify="full")


def flip_bytes(folder: Path, kind: str, flips: int) -> Counter[str]:
    """Flip bytes all over a corpus: with verify="full" it is refused or right, else it is refused or gives numbers."""
    corpus, _ = small_corpus(folder, kind)
    wanted, rng = facts(corpus), np.random.default_rng(12)
    outcomes: Counter[str] = Counter()
    everywhere = files(folder)
    for number in range(flips):
        path = everywhere[number % len(everywhere)] if number % 2 else everywhere[number // 2 % 3]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        place, flip = int(rng.integers(len(whole))), int(rng.integers(1, 256))
        damaged[place] ^= flip
        path.write_bytes(damaged)
        for verify in ("full", "header"):
            try:
                found = facts(nk.Corpus.open(folder, verify=verify))
                right = found == wanted
                outcomes[f"{verify}: {'right' if right else 'wrong'}"] += 1
                assert right or verify == "header", f"{path.name}: byte {place} ^ {flip}"
                trusted = path.suffix != ".safetensors" or place < tensors(path)[2]
                assert right or not trusted, f"{path.name}: byte {place} ^ {flip}, in what is always checked"
            except (nk.CorruptFile, nk.UnknownId) as error:
                assert verify == "header" or isinstance(error, nk.CorruptFile)
                outcomes[f"{verify}: refused"] += 1
        path.write_bytes(whole)
    return outcomes


@pytest.mark.parametrize("kind", ["int", "str"])
def test_flipped_bytes(kind: str, tmp_path: Path) -> None:
    """In a process of its own, which no damage may end with a signal."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "corpus"), kind, "1000"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    outcomes = json.loads(done.stdout)
    print(outcomes)
    assert outcomes["full: refused"] > 900 and outcomes["header: refused"] > 300


def test_files_that_are_swapped_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for name in "ab":
        corpus = nk.Corpus.create(tmp_path / name, DEPTH, "f32")
        corpus.append([np.full((3, DEPTH), ord(name), np.float32)])
        paths.append(corpus.shards[0].path)
    shutil.copyfile(*paths)
    with pytest.raises(nk.CorruptFile, match="not the one that the manifest names"):
        nk.Corpus.open(tmp_path / "b").topk(QUERIES, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"numkong_py_corpus": 2},
        {"numkong_py_corpus": None},
        {"depth": 0},
        {"depth": "8"},
        {"dtype": "f64"},
        {"shards": 3},
        {"shards": [{"file": "x"}]},
        {"shards": [["../x", "", 1, 1, 1, "serial", None, None]]},
        {"tombstones": {"file": "a/b", "hash": "", "bytes": 0, "documents": 0}},
        {"tombstones": {"file": "b", "hash": "", "bytes": -1, "documents": 0}},
        {"ids": "uuid"},
        {"columns": []},
        {"more": 1},
    ],
    ids=str,
)
def test_manifests_of_others_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    from numkong_py.corpus import manifest

    small_corpus(tmp_path / "corpus")
    path = tmp_path / "corpus" / MANIFEST
    content = json.loads(path.read_text())
    content.pop(manifest.HASH)
    content |= change
    for entry in content["shards"] if isinstance(content["shards"], list) else ():
        if isinstance(entry, dict) and change.get("shards"):
            entry.update(file="../x")
    content[manifest.HASH] = manifest.digest([manifest._canonical(content)])
    path.write_text(json.dumps(content))
    with pytest.raises(nk.CorruptFile, match=MANIFEST):
        nk.Corpus.open(tmp_path / "corpus")


@pytest.mark.parametrize("text", ["", "{}", "[]", "nonsense", "[" * 100000, '{"xxh3_64": 1}'], ids=range(6))
def test_what_is_no_manifest(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(nk.CorruptFile, match=MANIFEST):
        nk.Corpus.open(tmp_path)


if __name__ == "__main__":
    print(json.dumps(flip_bytes(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
