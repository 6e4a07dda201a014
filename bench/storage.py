"""How fast corpora are written, opened and scored from a disk: records for docs/storage.md, which this makes anew.

    python bench/storage.py --out bench/results/storage/mine.jsonl            two minutes, 4 GB of disk
    python bench/storage.py --report bench/results/storage/*.jsonl            the table in docs/storage.md

The corpus is larger than the memory that the process may use: a memory cgroup (v1 or v2) is made for it, which needs
the right to do so; without one the record says so. Before every pass the system is told to drop the files' pages.
Rounds take turns: the files read plainly and directly, shards scored once they are in memory, everything scored.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from stamp import stamp

import numkong_py as nk
from numkong_py.corpus.reading import READERS, Room, start_reading

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "storage.md"
MARKS = ("<!-- bench/storage.py -->", "<!-- end -->")
MEMORY = (  # where memory cgroups are made, v1 and v2: the folder, the file with the limit
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
DISK = (  # and those that slow a disk down
    (Path("/sys/fs/cgroup/blkio"), "blkio.throttle.read_bps_device"),
    (Path("/sys/fs/cgroup"), "io.max"),
)
ROUND_ROWS = (
    ("plain_mb_s", "the disk, plain reads by one thread, MB/s", 0),
    ("direct_mb_s", "the disk, direct reads by several threads, MB/s", 0),
    ("memory_mb_s", "scored in memory, MB/s", 0),
    ("scored_mb_s", "all of the corpus scored from the disk, MB/s", 0),
    ("share", "share of the slower of memory and the disk's faster one", 2),
    ("plain_cpu", "processor time of plain reads, s/GB", 2),
    ("direct_cpu", "of direct reads, s/GB", 2),
    ("memory_cpu", "of scoring in memory, s/GB", 2),
    ("scored_cpu", "of all of the corpus scored from the disk, s/GB", 2),
)
DEPTH, LENGTH, QUERY = 128, 256, 32  # elements; tokens of a document; of a query
BATCH = 1024  # documents


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="JSONL file to append to")
    parser.add_argument("--report", type=Path, nargs="+", help="results to make the table of docs/storage.md from")
    parser.add_argument("--folder", type=Path, help="where to put the corpus: a folder on the disk to measure")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the corpus")
    parser.add_argument("--memory", type=float, default=1.0, help="gigabytes that the process may use")
    parser.add_argument("--shard-megabytes", type=int, default=256)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--queries", type=int, default=1, help="more of them make scoring slower than the disk")
    parser.add_argument("--disk-megabytes", type=int, help="let the disk give no more a second (cgroup v1 or v2)")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


# ------------------------------------------------------------------------------------- measuring


def batches(count: int) -> Iterator[Any]:
    """Documents of one block of random vectors, whose first token counts them."""
    tokens = np.random.default_rng(0).standard_normal((BATCH * LENGTH, DEPTH)).astype(np.float16)
    offsets = np.arange(0, BATCH * LENGTH + 1, LENGTH)
    for number in range(count):
        tokens[::LENGTH, 0] = number
        yield nk.collection(tokens, offsets=offsets)


@contextmanager
def limited(places: tuple[tuple[Path, str], ...], value: str) -> Iterator[bool]:
    """Put this process into a cgroup of its own with a limit; whether that worked."""
    for parent, name in places:
        group = parent / f"numkong_py-{name}-{os.getpid()}"
        try:
            group.mkdir()
            (group / name).write_text(value)
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            continue
        yield True
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
        return
    yield False


def device_of(folder: Path) -> str:
    """Numbers of the whole disk that a folder is on."""
    device = folder.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    whole = place.resolve().parent if (place / "partition").exists() else place
    return (whole / "dev").read_text().strip()


@contextmanager
def limits(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """What the process may use, as the record says it."""
    with ExitStack() as stack:
        memory = stack.enter_context(limited(MEMORY, str(int(options.memory * 1e9))))
        disk = False
        if options.disk_megabytes:
            rate = f"{device_of(folder)} {'' if DISK[0][0].exists() else 'rbps='}{options.disk_megabytes * 1000000}"
            disk = stack.enter_context(limited(DISK, rate))
        yield {
            "memory": f"{options.memory:g} GB" if memory else "none",
            "disk": f"{options.disk_megabytes} MB/s" if disk else "none",
        }


def forget(corpus: nk.Corpus) -> None:
    """Let the system drop the pages of all files."""
    for shard in corpus.shards:
        handle = os.open(shard.path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read_all(corpus: nk.Corpus) -> None:
    """Read every file from begin to end."""
    room = bytearray(8 << 20)
    for shard in corpus.shards:
        with open(shard.path, "rb", buffering=0) as file:
            while file.readinto(room):
                pass


def read_all_directly(corpus: nk.Corpus) -> None:
    """Read every file from begin to end by several threads, past the page cache where that can be done."""
    with ThreadPoolExecutor(READERS) as readers:
        room = Room()
        for shard in corpus.shards:
            start_reading(readers, shard.path, 0, shard.file.entry.bytes, room, direct=True)()


def rate(work: Callable[[], Any], size: int) -> tuple[float, float]:
    """Megabytes a second, and processor seconds a gigabyte."""
    begin, processor = time.perf_counter(), time.process_time()
    work()
    return size / (time.perf_counter() - begin) / 1e6, (time.process_time() - processor) / (size / 1e9)


def rate_in_memory(corpus: nk.Corpus, query: np.ndarray, threads: int | None) -> tuple[float, float]:
    """The same of scoring, every shard once while it is in memory."""
    seconds, processor, size, room = 0.0, 0.0, 0, Room()
    with ThreadPoolExecutor(READERS) as readers:
        for shard in corpus.shards:
            documents = shard.file.start_reading(readers, room, direct=True)()
            begin, before = time.perf_counter(), time.process_time()
            nk.topk(query, documents, 10, threads=threads)
            seconds += time.perf_counter() - begin
            processor += time.process_time() - before
            size += documents.nbytes
    return size / seconds / 1e6, processor / (size / 1e9)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One record."""
    corpus = nk.Corpus.create(folder / "corpus", DEPTH, "f16", shard_bytes=options.shard_megabytes << 20)
    packed_batch = nk.pack_size(BATCH * LENGTH, DEPTH, "f16", documents=BATCH)
    count = max(3, round(options.gigabytes * 1e9 / packed_batch))
    begin = time.perf_counter()
    corpus.append(batches(count), progress=False)
    seconds = time.perf_counter() - begin
    size = corpus.info()["bytes"]
    query = np.random.default_rng(1).standard_normal((options.queries, QUERY, DEPTH)).astype(np.float16)
    record: dict[str, Any] = {
        "kind": "storage",
        "documents": len(corpus),
        "bytes": size,
        "shards": len(corpus.shards),
        "row": corpus.shards[0].row,
        "append_mb_s": size / seconds / 1e6,
        "threads": options.threads,
        "queries": options.queries,
        "rounds": [],
    }
    with limits(options, folder) as limited_to:
        record |= limited_to
        record |= opening(corpus, query, options.threads)
        for _ in range(options.rounds):
            record["rounds"].append(one_round(corpus, query, options.threads))
            print(json.dumps(record["rounds"][-1]), file=sys.stderr)
    return record


def opening(corpus: nk.Corpus, query: np.ndarray, threads: int | None) -> dict[str, Any]:
    """Time and memory of opening, and of ten documents of two shards found by id."""
    nk.Corpus.open(corpus.path).topk(query[0], 1, candidates=[0], threads=threads)
    forget(corpus)
    seconds, before = [], resident()
    for _ in range(5):
        begin = time.perf_counter()
        opened = nk.Corpus.open(corpus.path)
        seconds.append(time.perf_counter() - begin)
    after = resident()
    ids = [int(i) for shard in (opened.shards[0], opened.shards[-1]) for i in range(shard.begin + 7, shard.begin + 12)]
    begin = time.perf_counter()
    opened.topk(query[0], 10, candidates=ids, threads=threads)
    return {
        "open_ms": [1e3 * each for each in seconds],
        "open_mb": (after - before) / 1e6,
        "ten_documents_ms": 1e3 * (time.perf_counter() - begin),
        "ten_documents_mb": (resident() - after) / 1e6,
    }


def one_round(corpus: nk.Corpus, query: np.ndarray, threads: int | None) -> dict[str, float]:
    """Rates of the disk, of scoring in memory, and of scoring everything from the disk."""
    size = corpus.info()["bytes"]
    forget(corpus)
    plain, plain_cpu = rate(lambda: read_all(corpus), size)
    forget(corpus)
    direct, direct_cpu = rate(lambda: read_all_directly(corpus), size)
    disk = max(plain, direct)
    memory, memory_cpu = rate_in_memory(corpus, query, threads)
    forget(corpus)
    opened = nk.Corpus.open(corpus.path)
    scored, scored_cpu = rate(lambda: opened.topk(query, 10, threads=threads), size)
    busy = os.getloadavg()[0]
    return {
        "plain_mb_s": plain,
        "direct_mb_s": direct,
        "memory_mb_s": memory,
        "scored_mb_s": scored,
        "share": scored / min(disk, memory),
        "plain_cpu": plain_cpu,
        "direct_cpu": direct_cpu,
        "memory_cpu": memory_cpu,
        "scored_cpu": scored_cpu,
        "load": busy,
    }


# ------------------------------------------------------------------------------------- reporting


def table(paths: list[Path]) -> str:
    """What was measured, the last record of every file."""
    lines = []
    for path in paths:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        run, record = records[-2:]
        rounds = record["rounds"]
        middle = {name: float(np.median([each[name] for each in rounds])) for name in rounds[0]}
        best = max(rounds, key=lambda each: each["share"])
        threads = record["threads"] or "all"
        lines += [
            f"{run['machine']['model']}, {run['date']}, row `{record['row']}`, {threads} threads, load "
            f"{middle['load']:.1f} on {run['machine']['cores']} cores; {record['documents']} documents of {LENGTH} "
            f"tokens, {record['bytes'] / 1e9:.1f} GB in {record['shards']} shards; {record['queries']} queries; "
            f"limit of memory: {record['memory']}, of the disk: {record['disk']}.",
            "",
            "| what | median | best round |",
            "| --- | --- | --- |",
            *(f"| {what} | {middle[name]:.{digits}f} | {best[name]:.{digits}f} |" for name, what, digits in ROUND_ROWS),
            f"| appended, MB/s | {record['append_mb_s']:.0f} | |",
            f"| opened, ms | {np.median(record['open_ms']):.1f} | {min(record['open_ms']):.1f} |",
            f"| memory that opening took, MB | {record['open_mb']:.1f} | |",
            f"| ten documents of two shards by id, from the disk, ms | {record['ten_documents_ms']:.0f} | |",
            f"| memory that they took, MB | {record['ten_documents_mb']:.1f} | |",
            "",
        ]
    return "\n".join(lines)


def report(paths: list[Path]) -> None:
    """Put the table into docs/storage.md."""
    begin, end = map(re.escape, MARKS)
    text, found = re.subn(
        f"{begin}.*?{end}", lambda _: f"{MARKS[0]}\n\n{table(paths)}\n{MARKS[1]}", DOCUMENT.read_text(), flags=re.DOTALL
    )
    if not found:
        sys.exit(f"{DOCUMENT}: has no {MARKS[0]}")
    DOCUMENT.write_text(text)


def main() -> None:
    """Measure, or report."""
    options = parse()
    if options.report:
        report(options.report)
        return
    if options.out is None:
        sys.exit("--out or --report")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        run = stamp({**plain, "folder": None, "out": None, "quick": False})
        record = {"run": run["run"], **measure(options, Path(folder))}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        file.write("".join(json.dumps(each) + "\n" for each in (run, record)))


if __name__ == "__main__":
    main()
