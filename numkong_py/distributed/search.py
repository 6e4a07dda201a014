"""`topk` on a Dask cluster: one question travels once, shards stay where they were, and k hits of each come back."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, Future, as_completed, get_worker
from xxhash import xxh3_64_intdigest

from ..backends import BACKENDS
from ..corpus.search import Hits, Queries, Selection, empty_hits, merge, shards_topk
from ..corpus.shards import Shard
from ..errors import BackendUnavailable, InvalidArgument
from ..packed import PackedTensor, pack
from .files import file_here, forget_device_copies, open_corpus

__all__ = ["assign", "threads_of_workers", "topk"]

DEVICES = ("cpu", "cuda", "auto")
TASKS_PER_THREAD = 4  # of a worker: hundreds of small shards cost few tasks, and a late one holds up little
FAN = 8  # results that are merged at a time
SLACK = 1.25  # how much more than its share of the bytes a worker may get, so that shards stay where they were
SMALL = 1 << 16  # bytes of a question that goes with every task: less than a hop from worker to worker costs
GRAPH_WARNING = "distributed.admin.large-graph-warning-threshold"


def topk(
    client: Client,
    corpus: Any,
    queries: Any,
    k: int,
    *,
    device: str = "cpu",
    threads: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    storage_options: dict[str, Any] | None = None,
    progress: Any = False,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Find the best k documents of every query on a Dask cluster: the bits that `Corpus.topk` gives in one process.

    The question travels to the cluster once and hits travel back, merged on the way. A shard goes to the same worker
    every time, which has it mapped, unless that worker is gone. What a dying worker had not finished is done again by
    another one, and the result does not show it.

    Parameters
    ----------
    client : distributed.Client
        Synchronous. Its workers need numkong_py, and see the files under the same paths or URLs.
    corpus : Corpus, path, URL or list of paths or URLs
        See `open_corpus`.
    queries : array, list of arrays, Collection or PackedTensor
        In host memory.
    k : int
    device : {"cpu", "cuda", "auto"}
        What workers score on; ``"auto"`` is CUDA where a worker has a usable device. CUDA rows may differ from CPU rows
        in the last bits of a score, so only ``"cpu"`` gives the same bits whatever the workers have.
    threads : int, optional
        For one task. Default: the threads of the worker that it is meant for, shared among the tasks of that worker.
    cache : path, optional
        Folder on the workers for copies of remote shards. Default: the worker's scratch space, which ends with it.
    storage_options : dict, optional
        For the file system, see `open_corpus`.
    progress : bool or callable
        True shows a bar, None on a terminal only; a callable gets numbers of documents.
    **options
        As for `Corpus.topk`: include, exclude, candidates, missing, min_mean_score, block, screen, metric, reduction,
        empty. The ids of documents in plain files are their places.

    Returns
    -------
    scores, ids : arrays
        As for `Corpus.topk`.

    Raises
    ------
    BackendUnavailable
        There are no workers, or ``device="cuda"`` and a worker has none.
    InvalidArgument
        The client is asynchronous, or an option does not exist. Others as for `Corpus.topk`.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> pack([np.float32([[2, 3]]), np.float32([[4, 5]])]).save(f"{folder.name}/part-0.safetensors")
    >>> with Client(processes=False, n_workers=1, threads_per_worker=1, dashboard_address=":0") as client:
    ...     topk(client, folder.name, np.float32([[1, 0]]), 1)
    (array([4.]), array([1]))
    >>> folder.cleanup()
    """
    if device not in DEVICES:
        raise InvalidArgument(f"device: {device!r}, wanted one of {', '.join(map(repr, DEVICES))}")
    workers = threads_of_workers(client)
    folder = None if cache is None else os.fspath(cache)

    def score(
        shards: Sequence[Shard],
        queries: Queries,
        k: int,
        selection: Selection | None,
        *,
        progress: Callable[[int], Any],
        threads: int | None,
        **rest: Any,
    ) -> Hits:
        question = Question(queries, k, selection, rest, device, folder)
        return _on_cluster(client, workers, shards, question, threads, progress if watched else None)

    watched = progress is not False
    found = open_corpus(corpus, storage_options=storage_options)
    return found.topk(queries, k, threads=threads, progress=progress, score=score, **options)


def threads_of_workers(client: Client) -> dict[str, int]:
    """Addresses of the workers of a client, and how many threads each has.

    Raises
    ------
    InvalidArgument
        It is no synchronous client.
    BackendUnavailable
        It has no workers.
    """
    if not isinstance(client, Client):
        raise InvalidArgument(f"client: a {type(client).__name__}, wanted a distributed.Client")
    if client.asynchronous:
        raise InvalidArgument("client: asynchronous; pass distributed.Client(address), or call this in a thread")
    workers = client.nthreads()
    if not workers:
        raise BackendUnavailable(
            f"client: {client} has no workers; start some, or call client.wait_for_workers(1) first"
        )
    return dict(workers)


# ------------------------------------------------------------------------------------- who scores what


@lru_cache(16)
def assign(shards: tuple[tuple[str, int], ...], workers: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """Which worker each shard goes to: mostly the same one as long as it lives, and none gets much more than its share.

    Rendezvous hashing (Thaler and Ravishankar, 1998) with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018).

    Parameters
    ----------
    shards : tuple of (name, bytes)
    workers : tuple of (address, threads)

    Examples
    --------
    >>> shards = tuple((f"shard-{i}", 100) for i in range(6))
    >>> sorted(assign(shards, (("a", 1), ("b", 1), ("c", 1))))
    [0, 0, 1, 1, 2, 2]
    """
    share = SLACK * sum(size for _, size in shards) / sum(threads for _, threads in workers)
    loads = [0] * len(workers)
    chosen = []
    for name, size in shards:
        order = sorted(range(len(workers)), key=lambda i: xxh3_64_intdigest(f"{name} {workers[i][0]}".encode()))
        fitting = (i for i in order if loads[i] + size <= share * workers[i][1])
        owner = next(fitting, None)
        if owner is None:
            owner = min(order, key=lambda i: (loads[i] + size) / workers[i][1])
        loads[owner] += size
        chosen.append(owner)
    return tuple(chosen)


@dataclass(frozen=True)
class Job:
    """Shards for one task; a class of its own, so that Dask does not look for futures in it."""

    address: str
    shards: tuple[Shard, ...]
    threads: int
    cached: int  # bytes of all shards of the worker

    @property
    def documents(self) -> int:
        return sum(shard.count for shard in self.shards)


def _jobs(shards: Sequence[Shard], workers: dict[str, int], threads: int | None) -> list[Job]:
    owners = assign(tuple((each.file.entry.head, each.file.entry.bytes) for each in shards), tuple(workers.items()))
    jobs = []
    for number, (address, room) in enumerate(workers.items()):
        mine = [shard for shard, owner in zip(shards, owners) if owner == number]
        count = min(len(mine), TASKS_PER_THREAD * room)
        edges = [len(mine) * i // count for i in range(count + 1)] if count else [0]
        cached = sum(shard.file.entry.bytes for shard in mine)
        for begin, end in pairwise(edges):
            jobs.append(Job(address, tuple(mine[begin:end]), threads or max(1, room // count), cached))
    return jobs


# ------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Question:
    """What is asked of every shard; a worker gets it once and keeps the queries as its rows have packed them."""

    queries: Queries
    k: int
    selection: Selection | None
    options: dict[str, Any]
    device: str
    cache: str | None

    @cached_property
    def bytes(self) -> int:
        return len(pickle.dumps(self, protocol=pickle.HIGHEST_PROTOCOL))

    @property
    def descending(self) -> bool:
        return self.options.get("metric") != "angular"


def _on_cluster(
    client: Client,
    workers: dict[str, int],
    shards: Sequence[Shard],
    question: Question,
    threads: int | None,
    progress: Callable[[int], Any] | None,
) -> Hits:
    """Score shards on a cluster and merge their hits."""
    none = empty_hits(len(question.queries), question.queries.given.dtype)
    jobs = _jobs(shards, workers, threads)
    if not jobs:
        return none
    name = f"numkong_py-{uuid.uuid4().hex}"
    asked = question if question.bytes <= SMALL else _spread(client, question, f"{name}-question")
    parts = [
        client.submit(
            _score, job, asked, key=f"{name}-{i}", workers=[job.address], allow_other_workers=True, pure=False
        )
        for i, job in enumerate(jobs)
    ]
    merged = _merging(client, name, parts, question)
    documents = {part.key: job.documents for part, job in zip(parts, jobs)}
    for part in as_completed(parts) if progress else ():
        if part.status == "error":
            break
        progress(documents[part.key])
    return merge([none, *client.gather(merged)], question.k, descending=question.descending)


def _spread(client: Client, question: Question, name: str) -> Future:
    """Send a question to the cluster once; workers get it from one another.

    It is the result of a task and not scattered: what is scattered is lost with the workers that hold it, and a task is
    done again.
    """
    with dask.config.set({GRAPH_WARNING: "1 TiB"}):  # many queries have to travel, and Dask would warn of them
        return client.submit(_same, question, key=name, pure=False)


def _merging(client: Client, name: str, parts: list[Future], question: Question) -> list[Future]:
    level = 0
    while len(parts) > FAN:
        level += 1
        groups = [parts[i : i + FAN] for i in range(0, len(parts), FAN)]
        parts = [
            client.submit(
                merge, group, question.k, descending=question.descending, key=f"{name}-merge-{level}-{i}", pure=False
            )
            for i, group in enumerate(groups)
        ]
    return parts


def _same(question: Question) -> Question:
    return question


def _score(job: Job, question: Question) -> Hits:
    """Hits of a job's shards, on the worker that Dask has chosen."""
    worker = get_worker()
    folder = Path(question.cache or Path(worker.local_directory) / "numkong_py")
    device = _device(question, worker.address)
    queries = question.queries if device == "cpu" else _to_device(question.queries, device)
    try:
        return _score_on(job, question, queries, folder, device)
    except FileNotFoundError as error:
        reason = (
            f"worker {worker.address} does not see it: files have one path on all machines, or a URL; those that a "
            "compaction replaced stay for the grace that the corpus was created with"
        )
        raise FileNotFoundError(error.errno, reason, error.filename) from error
    except MemoryError:
        if device == "cpu":
            raise
        forget_device_copies()  # of other shards; these ones may fit now
        return _score_on(job, question, queries, folder, device)


def _score_on(job: Job, question: Question, queries: Queries, folder: Path, device: str) -> Hits:
    here = (shard.with_file(file_here(shard.file, folder, device)) for shard in job.shards)
    options = {**question.options, "threads": job.threads, "cached": job.cached}
    return shards_topk(here, queries, question.k, question.selection, **options)


def _device(question: Question, address: str) -> str:
    """Where this worker scores.

    Raises
    ------
    BackendUnavailable
    """
    if question.device == "cpu":
        return "cpu"
    rows = [row for row in BACKENDS if row.device == "cuda" and question.queries.given.dtype in row.dtypes]
    if any(row.available for row in rows):
        return "cuda"
    if question.device == "cuda":
        raise BackendUnavailable(
            f'device: "cuda", and worker {address} has none: {rows[0].reason}; pass "auto" or "cpu"'
        )
    return "cpu"


def _to_device(queries: Queries, device: str) -> Queries:
    given = queries.given
    moved = given.to(device) if isinstance(given, PackedTensor) else pack(given, device=device)
    return Queries(moved, given.depth, given.dtype)
