"""What a Dask cluster costs beside the scoring: seconds a query and a shard, on processes of this machine.

    python bench/cluster.py --out bench/results/cluster/mine.jsonl        two minutes
    python bench/cluster.py --workers 3 --shards 3 12 48 --rounds 15 --out mine.jsonl

Shards are tiny, so that scoring them is nothing and what is left is the cluster. In every round three things take turns
for each number of shards: `cluster` (numkong_py.distributed.topk), `here` (the same shards in this process) and `dask`
(as many empty tasks, one hop, which is the least that Dask takes). On a machine with other work the fastest round tells
most; processor time (client, scheduler and workers together, less what they burn when idle) tells the rest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, LocalCluster
from stamp import stamp

import numkong_py as nk
from numkong_py import distributed

DEPTH, DOCUMENTS, TOKENS, QUERY_TOKENS, BEST = 128, 20, 8, 32, 10


def make_shards(folder: Path, count: int) -> list[str]:
    """Packed files of a few small documents."""
    rng = np.random.default_rng(count)
    paths = []
    for number in range(count):
        documents = rng.standard_normal((DOCUMENTS, TOKENS, DEPTH)).astype(np.float32)
        paths.append(str(folder / f"{number:04}.safetensors"))
        nk.pack(documents).save(paths[-1])
    return paths


def same(value: int) -> int:
    return value


def processor_seconds(client: Client) -> float:
    """Of the client, the scheduler (in this process) and the workers, since they started."""
    return time.process_time() + sum(client.run(time.process_time).values())


def spent(client: Client, call: Callable[[], Any], rounds: int, idle: float) -> float:
    """Processor seconds of a call, less what an idle cluster burns in that time."""
    begin, before = time.perf_counter(), processor_seconds(client)
    for _ in range(rounds):
        call()
    used = processor_seconds(client) - before
    return max(0.0, used - idle * (time.perf_counter() - begin)) / rounds


def measure(client: Client, count: int, rounds: int, idle: float) -> dict[str, Any]:
    """Seconds of a query over so many shards, round by round."""
    query = np.random.default_rng(0).standard_normal((QUERY_TOKENS, DEPTH)).astype(np.float32)
    workers = list(client.nthreads())
    with tempfile.TemporaryDirectory() as folder:
        corpus = distributed.open_corpus(make_shards(Path(folder), count))

        def dask() -> None:
            tasks = [
                client.submit(same, i, workers=[workers[i % len(workers)]], allow_other_workers=True, pure=False)
                for i in range(count)
            ]
            client.gather(tasks)

        calls = {
            "cluster": lambda: distributed.topk(client, corpus, query, BEST),
            "here": lambda: corpus.topk(query, BEST),
            "dask": dask,
        }
        found, wanted = calls["cluster"](), calls["here"]()
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted)), "not the bits of one process"
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                begin = time.perf_counter()
                call()
                seconds[name].append(round(time.perf_counter() - begin, 6))
        processor = {name: round(spent(client, call, rounds, idle), 6) for name, call in calls.items()}
    return {"kind": "cluster", "shards": count, "seconds": seconds, "processor_seconds": processor}


def line(counts: list[int], values: list[float]) -> tuple[float, float]:
    """Milliseconds a query and milliseconds a shard: a straight line through what so many shards cost."""
    slope, start = np.polyfit(counts, values, 1)
    return 1e3 * float(start), 1e3 * float(slope)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--shards", type=int, nargs="+", default=[3, 12, 48])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    records = []
    with (
        LocalCluster(n_workers=options.workers, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        before = processor_seconds(client)
        time.sleep(3)
        idle = (processor_seconds(client) - before) / 3
        head = stamp({"workers": options.workers, "rounds": options.rounds, "idle": round(idle, 3)})
        records = [{**measure(client, count, options.rounds, idle), "run": head["run"]} for count in options.shards]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        for record in [head, *records]:
            file.write(json.dumps(record) + "\n")
    for title, cost in (
        ("fastest round", lambda record: min(record["seconds"]["cluster"]) - min(record["seconds"]["here"])),
        ("median round", lambda r: float(np.median(r["seconds"]["cluster"]) - np.median(r["seconds"]["here"]))),
        ("empty tasks, fastest", lambda record: min(record["seconds"]["dask"])),
        ("processor", lambda r: r["processor_seconds"]["cluster"] - r["processor_seconds"]["here"]),
    ):
        start, slope = line(options.shards, [cost(record) for record in records])
        each = " ".join(f"{1e3 * cost(record) / record['shards']:.2f}" for record in records)
        print(f"{title:<22} {start:7.2f} ms a query and {slope:6.2f} ms a shard; in all, by shard: {each}")


if __name__ == "__main__":
    main()
