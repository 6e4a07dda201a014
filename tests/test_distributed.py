"""Dask: the bits of one process whoever scores, dies or is late; files that are elsewhere; packing as a job."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import DTYPES, assert_same_bits

import numkong_py as nk

pytest.importorskip("distributed", reason="Dask is not installed; pip install 'numkong-py[distributed]'")

import dask.array
import dask.bag
import fsspec
from dask import delayed
from distributed import Client, LocalCluster

from numkong_py import distributed
from numkong_py.distributed import files, search
from numkong_py.distributed.search import SMALL, assign

RANDOM = np.random.default_rng(84)
DEPTH = 6
QUERIES = [RANDOM.integers(-2, 3, (count, DEPTH)).astype(np.float32) for count in (3, 0, 7)]


def documents(count: int, dtype: str = "f32") -> list[np.ndarray]:
    """Small integers, so that scores tie; some documents are empty, some hold a NaN."""
    lengths = RANDOM.integers(0, 5, count)
    found = [RANDOM.integers(-2, 3, (length, DEPTH)).astype(DTYPES[dtype]) for length in lengths]
    for document in found[:: max(1, count // 4)]:
        document[:1] = np.nan
    return found


DOCUMENTS = documents(120)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as found,
    ):
        yield found


@pytest.fixture
def local_client() -> Iterator[Client]:
    """A worker in this process, which sees its memory and its monkeypatches."""
    with Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address=":0") as found:
        yield found


@pytest.fixture(autouse=True)
def no_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shard is open in this process yet."""
    monkeypatch.setattr(files, "_files", files._files.copy())
    monkeypatch.setattr(files, "_making", {})
    files._files.clear()


def shards_on_disk(folder: Path, found: list[np.ndarray], size: int = 17, **options: Any) -> list[str]:
    folder.mkdir(exist_ok=True)
    paths = [str(folder / f"{begin:04}.safetensors") for begin in range(0, len(found), size)]
    for number, path in enumerate(paths):
        nk.pack(found[number * size : (number + 1) * size], **options).save(path)
    return paths


def make_corpus(folder: Path, found: list[np.ndarray], ids: Any = None, dtype: str = "f32") -> nk.Corpus:
    """A corpus of several shards with deleted documents, one shard without any left."""
    corpus = nk.Corpus.create(folder, DEPTH, dtype, shard_bytes=2500)
    for begin in range(0, len(found), 40):
        corpus.append(found[begin : begin + 40], ids=None if ids is None else ids[begin : begin + 40])
    first = corpus.shards[1]
    gone = corpus.ids[[*range(first.begin, first.end), 0, 77]]
    corpus.delete(gone)
    assert len(corpus.shards) > 4 and min(map(len, corpus.shards)) == 0
    return corpus


def same(found: Any, wanted: Any) -> None:
    assert_same_bits(found[0], wanted[0], "scores")
    assert found[1].dtype == wanted[1].dtype and found[1].tolist() == wanted[1].tolist()


# ------------------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_one_process(dtype: str, client: Client, tmp_path: Path) -> None:
    found = documents(120, dtype)
    corpus = make_corpus(tmp_path / "corpus", found, dtype=dtype)
    queries = [query.astype(DTYPES[dtype]) for query in QUERIES]
    alive = corpus.ids
    live = nk.pack([found[i] for i in alive])
    for metric in ("dot", "cosine", "angular"):
        for k, reduction in ((1, "sum"), (9, "mean"), (500, "sum")):
            options = {"metric": metric, "reduction": reduction}
            got = distributed.topk(client, corpus, queries, k, **options)
            same(got, corpus.topk(queries, k, **options))
            scores, places = nk.topk(queries, live, k, **options)  # and without anything that both share
            same(got, (scores, np.where(places < 0, -1, alive[places])))


@pytest.mark.parametrize("kind", ["int", "str"])
def test_filters(kind: str, client: Client, tmp_path: Path) -> None:
    ids = [f"document {i}" for i in range(120)] if kind == "str" else list(range(1000, 1120))
    corpus = make_corpus(tmp_path / "corpus", DOCUMENTS, ids)
    alive = corpus.ids
    lists = [alive[RANDOM.permutation(len(alive))[:9]].tolist() for _ in QUERIES]
    for options in (
        {"include": alive[::3]},
        {"include": alive[:2], "exclude": alive[1:60]},
        {"exclude": alive[::2]},
        {"candidates": lists},
        {"min_mean_score": 1.5},
        {"block": 3, "empty": 7.0},
    ):
        same(distributed.topk(client, corpus, QUERIES, 12, **options), corpus.topk(QUERIES, 12, **options))
    same(distributed.topk(client, str(corpus.path), QUERIES[0], 5), corpus.topk(QUERIES[0], 5))
    with pytest.raises(nk.UnknownId):
        distributed.topk(client, corpus, QUERIES, 5, include=["nobody"] if kind == "str" else [7])


def test_files_without_a_manifest(client: Client, tmp_path: Path) -> None:
    paths = shards_on_disk(tmp_path / "parts", DOCUMENTS)
    wanted = nk.topk(QUERIES, DOCUMENTS, 20)
    for corpus in (
        paths,
        tmp_path / "parts",
        f"{tmp_path}/parts/*.safetensors",
        f"file://{tmp_path}/parts",
        [Path(path) for path in paths],
    ):
        same(distributed.topk(client, corpus, QUERIES, 20), wanted)
    same(distributed.topk(client, paths[0], nk.pack(QUERIES), 3), nk.topk(QUERIES, DOCUMENTS[:17], 3))
    same(distributed.topk(client, paths, QUERIES[0], 3), nk.topk(QUERIES[0], DOCUMENTS, 3))
    backwards = distributed.topk(client, paths[:1] * 2, QUERIES, 40)
    same(backwards, nk.topk(QUERIES, DOCUMENTS[:17] * 2, 40))
    places = [3, 50, 119]
    found = distributed.topk(client, paths, QUERIES, 3, include=places)[1]
    assert [sorted(row) for row in found.tolist()] == [places] * len(QUERIES)


def test_files_without_documents_or_tokens(client: Client, tmp_path: Path) -> None:
    """Places go on through them, several at the same place included."""
    nothing = nk.pack([], depth=DEPTH, dtype="f32")
    parts = [nothing, DOCUMENTS[:3], nothing, nothing, [np.zeros((0, DEPTH), np.float32)] * 2, DOCUMENTS[3:9], nothing]
    paths = [tmp_path / f"{number}.safetensors" for number in range(len(parts))]
    for path, part in zip(paths, parts):
        (part if part is nothing else nk.pack(part)).save(path)
    flat = [document for part in parts if part is not nothing for document in part]
    for corpus in (paths, distributed.open_corpus(paths)):
        same(distributed.topk(client, corpus, QUERIES, 15), nk.topk(QUERIES, flat, 15))
    same(distributed.open_corpus(paths).topk(QUERIES, 15), nk.topk(QUERIES, flat, 15))
    scores, ids = distributed.topk(client, paths[:1], QUERIES, 2)
    assert ids.tolist() == [[-1, -1]] * 3 and np.isneginf(scores).all()
    scores, ids = distributed.topk(client, paths, [], 2)
    assert scores.shape == ids.shape == (0, 2)


def test_many_queries_many_shards_and_a_bar(client: Client, tmp_path: Path) -> None:
    """A question that travels by itself, hits that are merged on the cluster, and every document counted once."""
    paths = shards_on_disk(tmp_path / "parts", DOCUMENTS, 2)
    queries = RANDOM.integers(-2, 3, (300, 12, DEPTH)).astype(np.float32)
    assert queries.nbytes > SMALL and len(paths) > 50
    done: list[int] = []
    found = distributed.topk(client, paths, queries, 4, progress=done.append)
    same(found, nk.topk(queries, DOCUMENTS, 4))
    assert sum(done) == len(DOCUMENTS) and len(done) == 3 * search.TASKS_PER_THREAD > search.FAN


# ------------------------------------------------------------------------------------------- workers that die


def die_after_scoring(flag: str, victim: str, dask_worker: Any) -> int:
    """Arm a worker: it ends itself as kill -9 would, in its next query, with part of its work done."""
    if dask_worker.address == victim:
        score = search.shards_topk

        def dying(*arguments: Any, **options: Any) -> Any:
            score(*arguments, **options)
            Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)

        search.shards_topk = dying
    return os.getpid()


def wait_for_workers(client: Client, gone: int) -> None:
    """Until three workers are there again and the killed one is not among them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pids = client.run(os.getpid, on_error="ignore").values()
        if len(pids) == 3 and gone not in pids:
            return
        time.sleep(0.2)
    pytest.fail("the killed worker did not come back")


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
@pytest.mark.parametrize("count", [3, 300], ids=["a question in each task", "a question of its own"])
def test_a_worker_killed_in_mid_query(count: int, client: Client, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", DOCUMENTS)
    queries = RANDOM.integers(-2, 3, (count, 12, DEPTH)).astype(np.float32)
    wanted = corpus.topk(queries, 25)
    same(distributed.topk(client, corpus, queries, 25), wanted)
    jobs = search._jobs(corpus.shards, dict(client.nthreads()), None)
    victim = jobs[0].address
    flag = tmp_path / "died"
    pid = client.run(die_after_scoring, str(flag), victim)[victim]
    same(distributed.topk(client, corpus, queries, 25), wanted)
    assert flag.exists()
    wait_for_workers(client, pid)
    same(distributed.topk(client, corpus, queries, 25), wanted)


# ------------------------------------------------------------------------------------------- who scores what


def test_shards_stay_with_their_workers_and_nobody_has_too_many() -> None:
    shards = tuple((f"shard {i}", int(size)) for i, size in enumerate(RANDOM.integers(50, 150, 400)))
    workers = (("a", 1), ("b", 1), ("c", 4), ("d", 2))
    owners = assign(shards, workers)
    total = sum(size for _, size in shards)
    for number, (_, threads) in enumerate(workers):
        mine = sum(size for (_, size), owner in zip(shards, owners) if owner == number)
        assert mine <= search.SLACK * total * threads / 8 + 150
    assert assign(shards, workers) == owners
    more = assign((*shards, ("new", 100)), workers)
    assert sum(a != b for a, b in zip(owners, more)) <= 4
    fewer = assign(shards, (workers[0], *workers[2:]))  # b is gone
    renamed = [workers.index((workers[0], *workers[2:])[owner]) for owner in fewer]
    moved = sum(a != b for a, b in zip(owners, renamed))
    assert moved <= 1.6 * owners.count(1)
    assert sorted(assign((("x", 5), ("y", 5)), (("a", 1), ("b", 1)))) == [0, 1]
    assert assign((), workers) == ()


def test_threads_of_a_worker_are_shared_among_its_tasks(tmp_path: Path) -> None:
    corpus = files.open_corpus(shards_on_disk(tmp_path / "parts", DOCUMENTS, 40))
    assert len(corpus.shards) == 3
    assert [(len(job.shards), job.threads) for job in search._jobs(corpus.shards, {"a": 8}, None)] == [(1, 2)] * 3
    assert [(len(job.shards), job.threads) for job in search._jobs(corpus.shards, {"a": 1}, None)] == [(1, 1)] * 3
    assert {job.threads for job in search._jobs(corpus.shards, {"a": 1}, 5)} == {5}
    many = files.open_corpus(shards_on_disk(tmp_path / "many", DOCUMENTS, 2))
    assert [len(job.shards) for job in search._jobs(many.shards, {"a": 1}, None)] == [15] * search.TASKS_PER_THREAD


def test_a_worker_without_a_gpu(client: Client, tmp_path: Path) -> None:
    if any(row.available for row in nk.backends() if row.device == "cuda"):
        pytest.skip("this machine has a GPU")
    paths = shards_on_disk(tmp_path / "parts", DOCUMENTS)
    same(distributed.topk(client, paths, QUERIES, 5, device="auto"), nk.topk(QUERIES, DOCUMENTS, 5))
    with pytest.raises(nk.BackendUnavailable, match=r'worker tcp://.* has none: .*pass "auto" or "cpu"'):
        distributed.topk(client, paths, QUERIES, 5, device="cuda")


def test_a_shard_that_does_not_fit_beside_others_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory on a device: copies of other shards are let go, and the shards are scored again."""
    corpus = files.open_corpus(shards_on_disk(tmp_path / "parts", DOCUMENTS))
    shard = corpus.shards[0]
    calls = []

    def full(*arguments: Any) -> Any:
        calls.append([key[2] for key in files._files])
        if len(calls) == 1:
            raise MemoryError
        return "hits"

    monkeypatch.setattr(search, "get_worker", lambda: type("W", (), {"local_directory": tmp_path, "address": "here"}))
    monkeypatch.setattr(search, "_device", lambda question, address: "cuda")
    monkeypatch.setattr(search, "_to_device", lambda queries, device: queries)
    monkeypatch.setattr(search, "_score_on", full)
    files._files["other", "head", "cuda"] = files.file_here(shard.file, tmp_path, "cpu")
    job = search.Job("here", (shard,), 1, 0)
    question = search.Question(search.Queries(QUERIES, DEPTH, "f32"), 3, None, {}, "auto", None)
    assert search._score(job, question) == "hits"
    assert "cuda" in calls[0] and "cuda" not in calls[1]


# ------------------------------------------------------------------------------------------- files that are elsewhere


def test_an_archive_as_an_object_store(client: Client, tmp_path: Path) -> None:
    """Workers are processes of their own: each copies what it scores, once, and keeps it by its contents."""
    corpus = make_corpus(tmp_path / "corpus", DOCUMENTS, [f"document {i}" for i in range(120)])
    with zipfile.ZipFile(tmp_path / "corpus.zip", "w") as archive:
        for path in corpus.path.iterdir():
            archive.write(path, f"passages/{path.name}")
    url = f"zip://passages::file://{tmp_path}/corpus.zip"
    ids = corpus.ids
    for options in ({}, {"include": ids[3:40:2], "metric": "cosine"}, {"exclude": ids[:50]}):
        found = distributed.topk(client, url, QUERIES, 7, cache=tmp_path / "cache", **options)
        same(found, corpus.topk(QUERIES, 7, **options))
    copies = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert set(copies) == {f"{shard.file.entry.head}.safetensors" for shard in corpus.shards}
    distributed.topk(client, url, QUERIES, 7, cache=tmp_path / "cache")
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == copies


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Any]:
    """An object store in memory with packed files."""
    system = fsspec.filesystem("memory")
    for path in shards_on_disk(tmp_path / "parts", DOCUMENTS):
        system.pipe_file(f"/bucket/{Path(path).name}", Path(path).read_bytes())
    yield system
    system.rm("/bucket", recursive=True)


def test_a_copy_is_verified_before_it_is_used(local_client: Client, bucket: Any, tmp_path: Path) -> None:
    wanted = nk.topk(QUERIES, DOCUMENTS, 7)
    same(distributed.topk(local_client, "memory://bucket", QUERIES, 7), wanted)
    same(distributed.topk(local_client, "memory://bucket/*.safetensors", QUERIES, 7, cache=tmp_path / "one"), wanted)
    names = sorted(bucket.glob("/bucket/*"))
    same(distributed.topk(local_client, [f"memory://{name}" for name in names], QUERIES, 7), wanted)
    data = bytearray(bucket.cat_file(names[2]))
    data[-1] ^= 1
    bucket.pipe_file(names[2], bytes(data))
    files._files.clear()
    with pytest.raises(nk.CorruptFile, match=r"bucket/0034.safetensors.*hash of originals"):
        distributed.topk(local_client, "memory://bucket", QUERIES, 7, cache=tmp_path / "two")
    assert not any(path.name.endswith(".part") for path in (tmp_path / "two").iterdir())
    bucket.pipe_file(names[2], bytes(data[:-1]))
    with pytest.raises(nk.CorruptFile):
        distributed.topk(local_client, "memory://bucket", QUERIES, 7, cache=tmp_path / "two")
    bucket.pipe_file(names[2], b"something else")
    with pytest.raises(nk.CorruptFile, match="0034"):
        distributed.topk(local_client, "memory://bucket", QUERIES, 7)


def test_a_file_that_changes_between_the_listing_and_the_copy(bucket: Any, tmp_path: Path) -> None:
    corpus = files.open_corpus("memory://bucket")
    shard = corpus.shards[0]
    bucket.pipe_file(shard.file.name, bucket.cat_file(corpus.shards[1].file.name))
    with pytest.raises(nk.CorruptFile, match="not the one that it was"):
        files.file_here(shard.file, tmp_path / "cache", "cpu")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_names_the_shard_and_the_cache(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.shutil, "copyfileobj", full)
    shard = files.open_corpus("memory://bucket").shards[0]
    with pytest.raises(OSError, match=r"No space left.*0000.safetensors \(\d+ bytes\).*pass cache="):
        files.file_here(shard.file, tmp_path / "cache", "cpu")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_row_that_a_worker_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its shards are packed again once, into the cache, and mapped from there."""
    best = nk.find_kernel("pack", "f32").name
    if best == "serial":
        pytest.skip("this machine has one row only")
    corpus = files.open_corpus(shards_on_disk(tmp_path / "parts", DOCUMENTS))
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "serial")
    for shard in corpus.shards:
        here = shard.with_file(files.file_here(shard.file, tmp_path / "cache", "cpu"))
        assert here.open().backend == "serial" and here.path.parent == tmp_path / "cache"
    assert len(list((tmp_path / "cache").iterdir())) == len(corpus.shards)


def test_maps_are_kept_and_their_number_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "OPEN_FILES", 3)
    shards = files.open_corpus(shards_on_disk(tmp_path / "parts", DOCUMENTS)).shards
    first = files.file_here(pickle.loads(pickle.dumps(shards[0].file)), tmp_path, "cpu")
    assert files.file_here(shards[0].file, tmp_path, "cpu") is first
    for shard in shards:
        files.file_here(shard.file, tmp_path, "cpu")
    assert len(files._files) == 3 == len(files._making) and first not in files._files.values()


# ------------------------------------------------------------------------------------------- wrong use


def test_errors_name_the_argument_and_the_fix(client: Client, tmp_path: Path) -> None:
    paths = shards_on_disk(tmp_path / "parts", DOCUMENTS)
    found = files.open_corpus(paths)
    os.rename(paths[3], tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=r"worker tcp://.* does not see it.*0051"):
        distributed.topk(client, found, QUERIES, 3)
    os.rename(tmp_path / "elsewhere", paths[3])
    nk.pack([np.ones((2, DEPTH + 1), np.float32)]).save(tmp_path / "deep.safetensors")
    nk.pack([np.ones((2, DEPTH), np.float16)]).save(tmp_path / "half.safetensors")
    (tmp_path / "empty").mkdir()
    for corpus, error, message in (
        ([*paths, tmp_path / "deep.safetensors"], nk.ShapeMismatch, "deep.safetensors: depth 7, and .*0000"),
        ([*paths, tmp_path / "half.safetensors"], nk.UnsupportedDtype, "half.safetensors: f16, and .*0000"),
        (tmp_path / "empty", nk.InvalidArgument, "empty has no packed files"),
        (tmp_path / "missing", FileNotFoundError, "missing"),
        (__file__, nk.CorruptFile, "test_distributed.py"),
    ):
        with pytest.raises(error, match=message):
            distributed.topk(client, corpus, QUERIES, 3)
    for options, message in (({"device": "gpu"}, "'gpu', wanted one of"), ({"metric": "l2"}, "'l2', wanted one of")):
        with pytest.raises(nk.InvalidArgument, match=message):
            distributed.topk(client, paths, QUERIES, 3, **options)
    with pytest.raises(nk.InvalidArgument, match=r"a LocalCluster, wanted a distributed.Client"):
        distributed.topk(client.cluster, paths, QUERIES, 3)
    with pytest.raises(nk.ShapeMismatch, match="queries: depth 7, and the corpus has 6"):
        distributed.topk(client, paths, np.ones((2, DEPTH + 1), np.float32), 3)
    with pytest.raises(nk.UnsupportedDtype, match="queries: f16, and the corpus has f32"):
        distributed.topk(client, paths, nk.pack(np.ones((2, DEPTH), np.float16)), 3)


def test_no_workers_and_asynchronous_clients() -> None:
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as found,
        pytest.raises(nk.BackendUnavailable, match=r"no workers; .*wait_for_workers"),
    ):
        distributed.topk(found, [], QUERIES, 3)

    async def ask() -> None:
        async with Client(processes=False, n_workers=1, asynchronous=True, dashboard_address=":0") as found:
            distributed.topk(found, [], QUERIES, 3)

    with pytest.raises(nk.InvalidArgument, match=r"asynchronous; pass distributed.Client"):
        asyncio.run(ask())


# ------------------------------------------------------------------------------------------- packing


def padded() -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(document) for document in DOCUMENTS])
    array = np.full((len(DOCUMENTS), 5, DEPTH), np.inf, np.float32)
    for row, document in zip(array, DOCUMENTS):
        row[: len(document)] = document
    return array, lengths


def sources() -> dict[str, tuple[Any, dict[str, Any]]]:
    array, lengths = padded()
    mask = np.arange(5) < lengths[:, None]
    flat, offsets = np.concatenate(DOCUMENTS), np.concatenate([[0], np.cumsum(lengths)])
    split = [DOCUMENTS[begin : begin + 25] for begin in range(0, 120, 25)]
    return {
        "bag": (dask.bag.from_sequence(DOCUMENTS, npartitions=7), {}),
        "padded, lengths": (dask.array.from_array(array, chunks=(31, 2, -1)), {"lengths": lengths}),
        "padded, mask": (dask.array.from_array(array, chunks=(50, -1, 3)), {"mask": dask.array.from_array(mask)}),
        "offsets": (dask.array.from_array(flat, chunks=(77, -1)), {"offsets": offsets}),
        "delayed": ([delayed(list)(part) for part in split], {}),
        "data": (iter([split[0], {"x": array[25:60], "lengths": lengths[25:60]}, nk.pack(DOCUMENTS[60:])]), {}),
    }


@pytest.mark.parametrize("name", list(sources()))
def test_a_job_makes_the_corpus_that_append_makes(name: str, client: Client, tmp_path: Path) -> None:
    here = nk.Corpus.create(tmp_path / "here", DEPTH, "f32", shard_bytes=3000)
    there = nk.Corpus.create(tmp_path / "there", DEPTH, "f32", shard_bytes=3000)
    for corpus in (here, there):
        corpus.append(DOCUMENTS[:3], ids=[7, 3, 500])
    parts, ragged = sources()[name]
    wanted = here.append(DOCUMENTS)
    found = distributed.pack(client, parts, there, progress=False, **ragged)
    assert found.tolist() == wanted.tolist() == list(range(501, 621))
    for corpus in (there, nk.Corpus.open(there.path, verify="full")):
        assert corpus.ids.tolist() == here.ids.tolist()
        same(corpus.topk(QUERIES, 30), here.topk(QUERIES, 30))
    assert there.append(DOCUMENTS[:1]).tolist() == [621]


def test_ids_and_metadata_of_parts(client: Client, tmp_path: Path) -> None:
    corpus = nk.Corpus.create(tmp_path / "corpus", DEPTH, "f32")
    ids = [f"document {i}" for i in range(20)]
    rows = [
        {"id": name, "x": document, "metadata": {"year": i}} for i, (name, document) in enumerate(zip(ids, DOCUMENTS))
    ]
    found = distributed.pack(client, dask.bag.from_sequence(rows[:12], npartitions=3), tmp_path / "corpus")
    assert found.tolist() == ids[:12]
    pairs = dask.bag.from_sequence(list(zip(ids, DOCUMENTS))[12:20], npartitions=2)
    done: list[int] = []
    distributed.pack(client, pairs, corpus, progress=done.append)
    assert corpus.ids.tolist() == ids and sum(done) == 8
    assert corpus.metadata["year"].tolist() == [*range(12), *[None] * 8]
    with pytest.raises(nk.InvalidArgument, match="pass one for every document"):
        distributed.pack(client, [DOCUMENTS[:2]], corpus)
    for parts, error, message in (
        (
            [{"x": DOCUMENTS[:1], "ids": ["a"]}, {"x": DOCUMENTS[:1], "ids": ["a"]}],
            nk.DuplicateId,
            "'a' is given twice",
        ),
        ([{"x": DOCUMENTS[:1], "ids": ["document 3"]}], nk.DuplicateId, "'document 3' belongs"),
        ([{"x": DOCUMENTS[:2], "ids": ["a"]}], nk.ShapeMismatch, "ids"),
        ([{"x": DOCUMENTS[:1], "ids": [5]}], nk.UnsupportedDtype, "kind 'int'"),
        ([{"documents": DOCUMENTS[:1]}], nk.InvalidArgument, "'documents', wanted x"),
        ([{"x": [np.ones((1, 3), np.float32)], "ids": ["a"]}], nk.ShapeMismatch, "depth 3"),
        ([{"x": DOCUMENTS[:1], "ids": ["a"], "metadata": {"year": ["old"]}}], nk.UnsupportedDtype, "year"),
        (7, nk.InvalidArgument, "a int with nothing"),
    ):
        before = sorted(os.listdir(corpus.path))
        with pytest.raises(error, match=message):
            distributed.pack(client, parts, corpus)
        assert sorted(os.listdir(corpus.path)) == before
        assert nk.Corpus.open(corpus.path).ids.tolist() == ids


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_error_around_the_moment_of_publishing(
    moment: str, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All documents or none: files that the manifest names stay, whatever happens then."""
    corpus = make_corpus(tmp_path / "corpus", DOCUMENTS)
    ids = corpus.ids.tolist()
    publish = nk.Corpus._publish

    def interrupted(*arguments: Any) -> None:
        if moment == "after":
            publish(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(nk.Corpus, "_publish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distributed.pack(client, [DOCUMENTS[:9], DOCUMENTS[9:20]], corpus)
    found = nk.Corpus.open(corpus.path, verify="full")
    assert found.ids.tolist() == ids + (list(range(120, 140)) if moment == "after" else [])
    named = {shard.path.name for shard in found.shards}
    assert {name for name in os.listdir(corpus.path) if name.startswith("shard-")} == named


def test_columns_whose_kinds_differ_between_parts(client: Client, tmp_path: Path) -> None:
    corpus = nk.Corpus.create(tmp_path / "corpus", DEPTH, "f32")
    parts = [{"x": DOCUMENTS[:1], "metadata": {"year": [year]}} for year in (1999, "1999")]
    with pytest.raises(nk.UnsupportedDtype, match=r"year.*'str' in part 1, and 'int' before"):
        distributed.pack(client, parts, corpus)
    assert len(corpus.refresh()) == 0


def write_and_die(flag: str, documents: list[np.ndarray]) -> Any:
    """A part that is computed, written and, the first time, ends its worker before anybody hears of it."""
    from numkong_py.distributed import packing

    if not Path(flag).exists():
        discarding = packing.discarding

        def dying(shards: Any) -> Any:
            Path(flag).write_text("")
            flush = shards.flush
            shards.flush = lambda: (flush(), os.kill(os.getpid(), signal.SIGKILL))
            return discarding(shards)

        packing.discarding = dying
    return documents


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX")
def test_a_worker_killed_in_mid_packing(client: Client, tmp_path: Path) -> None:
    corpus = nk.Corpus.create(tmp_path / "corpus", DEPTH, "f32")
    pids = client.run(os.getpid).values()
    parts = [
        delayed(write_and_die)(str(tmp_path / "died"), DOCUMENTS[begin : begin + 20])
        if begin == 40
        else DOCUMENTS[begin : begin + 20]
        for begin in range(0, 120, 20)
    ]
    distributed.pack(client, parts, corpus)
    assert (tmp_path / "died").exists()
    assert corpus.ids.tolist() == list(range(120))
    same(nk.Corpus.open(corpus.path, verify="full").topk(QUERIES, 20), nk.topk(QUERIES, DOCUMENTS, 20))
    corpus.delete([0])  # the next writer removes what the dead one left
    named = {shard.path.name for shard in corpus.shards}
    assert {name for name in os.listdir(corpus.path) if name.startswith("shard-")} == named
    deadline = time.monotonic() + 60
    while len(client.nthreads()) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert set(client.run(os.getpid).values()) != set(pids)
