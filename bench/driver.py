"""The parts of a run, each a function that yields records, and the loop that writes them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from ceilings import Ceilings
from checks import judge, truth
from contenders import OURS, Contender, contenders, fits, our_rows, pack_ours, top_ours, version
from kernels import STREAMED_WINDOWS, RowKernels, operations
from measure import QUICK, Effort, extra_peak_bytes, interleave
from stamp import stamp
from tqdm import tqdm
from training import CLOUDS, STEPS, chamfer_record, step_record
from workloads import STAGED, WORKLOADS, Inputs, Workload, make

import numkong_py as nk
from numkong_py import cpu, demo
from numkong_py.packed import PRECISIONS

QUICK_FACTOR = 10
COLD_ROUNDS = 5
STAGED_NAMES = [workload.name for workload in STAGED]
Record = dict[str, Any]


# --------------------------------------------------------------------------------------------------- choosing


def chosen_workloads(options: argparse.Namespace) -> list[Workload]:
    """The workloads that were asked for, smaller ones in a quick run."""
    names = options.workload or list(WORKLOADS)
    known = [*WORKLOADS, *(other.name for other in (*STEPS, *CLOUDS))]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"--workload {', '.join(unknown)}: wanted some of {', '.join(map(repr, known))}")
    chosen = [WORKLOADS[name] for name in names if name in WORKLOADS]
    return [workload.smaller(QUICK_FACTOR) for workload in chosen] if options.quick else chosen


def chosen_rows(options: argparse.Namespace, workload: Workload, dtype: str) -> list[str]:
    """Rows of ours to measure."""
    rows = our_rows(dtype)
    if options.row and "all" not in options.row:
        return [row for row in rows if row in options.row]
    return rows if options.row or workload.every_row else rows[:1]


def _asked_for(contender: Contender, names: list[str] | None) -> bool:
    if names is None:
        return contender.always
    return contender.name in names or (contender.always and contender.package in names)


def chosen_contenders(options: argparse.Namespace, workload: Workload, inputs: Inputs, dtype: str) -> list[Contender]:
    """Ours by row, then the peers that were asked for and can do it."""
    ours = [f"{OURS}:{row}" for row in chosen_rows(options, workload, dtype)]
    return [
        contender
        for contender in contenders()
        if (contender.name in ours if contender.package == OURS else _asked_for(contender, options.contender))
        and fits(contender, workload, inputs, dtype)
    ]


# ----------------------------------------------------------------------------------------------------- scores


def _described(workload: Workload, inputs: Inputs, dtype: str, threads: int) -> Record:
    lengths = np.diff(inputs.offsets)
    return {
        "workload": workload.name,
        "queries": len(inputs.queries),
        "query_tokens": len(inputs.queries[0]),
        "documents": len(lengths),
        "lengths": [int(lengths.min()), round(float(lengths.mean()), 1), int(lengths.max())],
        "depth": inputs.tokens.shape[1],
        "data": workload.data,
        "dtype": dtype,
        "threads": threads,
        "operations": inputs.operations,
    }


def _rounded(seconds: Iterable[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in seconds]


@lru_cache(maxsize=1)
def _made(workload: Workload) -> Inputs:
    """The float32 inputs, kept for the next dtype."""
    return make(workload)


def score_record(
    workload: Workload, dtype: str, options: argparse.Namespace, ceilings: Ceilings, effort: Effort
) -> Record:
    """Judge every contender, then time all that return something."""
    inputs = _made(workload).astype(dtype)
    expected = truth(inputs, dtype)
    calls, found = {}, {}
    for contender in chosen_contenders(options, workload, inputs, dtype):
        if contender.activate:
            contender.activate()
        try:
            call = contender.prepare(inputs, options.threads)
            verdict = judge(call(), expected)
        except Exception as error:  # a peer that fails is a result too
            if contender.package == OURS:
                raise
            found[contender.name] = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
            continue
        if contender.package == OURS and verdict.verdict != "exact":
            sys.exit(f"{contender.name} on {workload.name}, {dtype}: not the reference's bits ({verdict}); not timed")
        found[contender.name] = asdict(verdict)
        calls[contender.name] = (call, contender.activate)
    seconds, rates = interleave(calls, ceilings, effort)
    for name, values in seconds.items():
        found[name]["seconds"] = _rounded(values)
    return {
        "kind": "scores",
        **_described(workload, inputs, dtype, options.threads),
        "checked_to_the_bit": len(expected.sample) * len(inputs.queries),
        "packed_bytes": pack_ours(our_rows(dtype)[0], inputs)[1].nbytes,
        "ceilings": {name: _rounded(values) for name, values in rates.items()},
        "contenders": found,
    }


def top_record(
    workload: Workload, dtype: str, options: argparse.Namespace, ceilings: Ceilings, effort: Effort
) -> Record:
    """The best k against all scores of the same row; the best k must be those of the sorted scores, to the bit."""
    inputs = _made(workload).astype(dtype)
    calls = {}
    for row in chosen_rows(options, workload, dtype):
        full = _full(row, inputs, options.threads)
        best = top_ours(row, workload.k, inputs, options.threads)
        scores, (top, indices) = np.atleast_2d(full()), best()
        order = np.argsort(-scores, axis=1, kind="stable")[:, : workload.k]
        right = np.array_equal(np.atleast_2d(indices), order)
        if not right or not np.array_equal(np.atleast_2d(top), np.take_along_axis(scores, order, axis=1)):
            sys.exit(f"{row} on {workload.name}, {dtype}: topk is not the sorted scores; not timed")
        calls |= {f"{OURS}:{row}": (full, None), f"{OURS}:{row} top-{workload.k}": (best, None)}
    seconds, rates = interleave(calls, ceilings, effort)
    return {
        "kind": "topk",
        **_described(workload, inputs, dtype, options.threads),
        "k": workload.k,
        "ceilings": {name: _rounded(values) for name, values in rates.items()},
        "contenders": {name: {"seconds": _rounded(values)} for name, values in seconds.items()},
    }


def _full(row: str, inputs: Inputs, threads: int) -> Callable[[], Any]:
    queries, documents = pack_ours(row, inputs)
    return partial(nk.maxsim_packed, queries, documents, threads=threads)


def staged_record(
    workload: Workload, dtype: str, options: argparse.Namespace, ceilings: Ceilings, effort: Effort
) -> Record:
    """Two stages (int8 in memory, exact in a mapped file) against the exact scan of that file: warm, and cold."""
    row = chosen_rows(options, workload, dtype)[0]
    inputs = _made(workload).astype(dtype)
    coarse = nk.pack(inputs.tokens, offsets=inputs.offsets, precision="int8", backend=row)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exact.safetensors"
        queries, exact = pack_ours(row, inputs)
        exact.save(path)
        exact = nk.open(path)
        call = partial(nk.topk_two_stage, queries, coarse, k=workload.k, threads=options.threads)
        scan = partial(nk.topk, queries, k=workload.k, threads=options.threads)
        found, expected = call(exact=exact), scan(docs=exact)
        if not all(map(np.array_equal, found, expected)):
            sys.exit(f"{row} on {workload.name}, {dtype}: two stages are not the top-{workload.k}; not timed")
        calls = {
            f"{OURS}:{row} top-{workload.k}": (partial(scan, docs=exact), None),
            f"{OURS}:{row} two stages": (partial(call, exact=exact), None),
            f"{OURS}:{row} coarse scores": (
                partial(nk.maxsim_packed, queries, coarse, threads=options.threads, return_bounds=True),
                None,
            ),
        }
        seconds, rates = interleave(calls, ceilings, effort)
        rounds = 1 if options.quick else COLD_ROUNDS
        cold = [
            [_cold(path, lambda docs: scan(docs=docs)), _cold(path, lambda docs: call(exact=docs))]
            for _ in range(rounds)
        ]
    names = list(calls)
    return {
        "kind": "two-stage",
        **_described(workload, inputs, dtype, options.threads),
        "k": workload.k,
        "refined": found.refined.tolist(),
        "ceilings": {name: _rounded(values) for name, values in rates.items()},
        "contenders": {name: {"seconds": _rounded(values)} for name, values in seconds.items()},
        "cold": {name: _rounded(values) for name, values in zip(names, zip(*cold))},
    }


def _cold(path: Path, search: Callable[[nk.PackedTensor], Any]) -> float:
    """Seconds, by the wall, of a search of a file of which nothing is in memory."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    exact = nk.open(path)
    begin = time.perf_counter()
    search(exact)
    return time.perf_counter() - begin


def _codebook(tokens: np.ndarray) -> nk.Codebook:
    """Of 2 bits, with tokens for centroids, which needs no k-means: what is lost is more than with a trained one."""
    tokens = np.asarray(tokens, np.float32)
    centroids, sample = tokens[:: max(1, len(tokens) // 1024)], tokens[1 :: max(2, len(tokens) // 2048)]
    nearest = nk.Codebook(centroids, np.float32([-1, 1])).nearest(sample)
    return nk.Codebook(centroids, np.quantile(sample - centroids[nearest], [0.125, 0.375, 0.625, 0.875]))


def loss_record() -> Record:
    """What every precision of the best row loses on the shipped corpus, whose relevant passages are known."""
    corpus = demo.load()
    relevance = np.array([[name in answers for name in corpus.ids] for answers in corpus.answers], float)
    row, books = our_rows("f32")[0], {"residual": _codebook(np.concatenate(list(corpus.vectors)))}
    reports = [
        nk.error_report(
            nk.pack(corpus.vectors, precision=precision, codebook=books.get(precision), backend=row),
            corpus.vectors,
            corpus.question_vectors,
            relevance=relevance,
        )
        for precision in PRECISIONS
    ]
    return {"kind": "loss", "row": row, "reports": [report.as_dict() for report in reports]}


def precision_record(
    workload: Workload, dtype: str, options: argparse.Namespace, ceilings: Ceilings, effort: Effort
) -> Record:
    """Every precision of the best row, and that row's int8 kernel alone; scores must be within their bounds."""
    row = chosen_rows(options, workload, dtype)[0]
    inputs = _made(workload).astype(dtype)
    expected, queries = truth(inputs, dtype), nk.pack(inputs.queries, backend=row)
    calls: dict[str, tuple[Callable[[], Any], None]] = {}
    found: dict[str, Record] = {}
    for precision in PRECISIONS:
        book = _codebook(inputs.tokens) if precision == "residual" else None
        documents = nk.pack(inputs.tokens, offsets=inputs.offsets, precision=precision, codebook=book, backend=row)
        result = nk.maxsim_packed(queries, documents, return_bounds=True)
        verdict = judge(result.scores, expected)
        within = (np.abs(result.scores - expected.scores) <= result.bounds).all()
        if not (verdict.verdict == "exact" if precision == "exact" else within):
            sys.exit(f"{row} on {workload.name}, {dtype}, {precision}: scores are out of bounds; not timed")
        calls[precision] = (partial(nk.maxsim_packed, queries, documents, threads=options.threads), None)
        found[precision] = {"error": verdict.error, "top10": verdict.top10}
        found[precision]["bytes_per_token"] = round(documents.nbytes / documents.tokens, 1)
        if precision == "binary":
            signs = nk.pack(inputs.queries, precision=precision, backend=row)
            calls["binary queries"] = (partial(nk.maxsim_packed, signs, documents, threads=options.threads), None)
            verdict = judge(nk.maxsim_packed(signs, documents), expected)
            found["binary queries"] = {"error": verdict.error, "top10": verdict.top10}
            found["binary queries"]["bytes_per_token"] = found[precision]["bytes_per_token"]
    if row != "serial" and not ceilings.reason:
        windows = 8 if options.quick else STREAMED_WINDOWS
        calls["int8 kernel"] = (RowKernels(row).call("int8", windows), None)
        found["int8 kernel"] = {"operations": operations(windows)}
    seconds, rates = interleave(calls, ceilings, effort)
    for name, values in seconds.items():
        found[name]["seconds"] = _rounded(values)
    return {
        "kind": "precision",
        **_described(workload, inputs, dtype, options.threads),
        "row": row,
        "ceilings": {name: _rounded(values) for name, values in rates.items()},
        "contenders": found,
    }


# ------------------------------------------------------------------------------------------------ inner kernels


def kernels_record(row: str, options: argparse.Namespace, ceilings: Ceilings, effort: Effort) -> Record:
    """A row's inner kernels alone: the window of a long query (all pairs, ColPali) and a stream of windows (rerank)."""
    kernels = RowKernels(row)
    dtypes = ("int8", *(dtype for dtype in ("f32", "bf16") if dtype == "f32" or kernels.halves(dtype)))
    calls, work = {}, {}
    for dtype in dtypes:
        for place, windows in (("in cache", 1), ("streamed", 8 if options.quick else STREAMED_WINDOWS)):
            calls[f"{dtype} {place}"] = (kernels.call(dtype, windows), None)
            work[f"{dtype} {place}"] = operations(windows)
    seconds, rates = interleave(calls, ceilings, effort)
    return {
        "kind": "kernels",
        "row": row,
        "ceilings": {name: _rounded(values) for name, values in rates.items()},
        "contenders": {name: {"seconds": _rounded(v), "operations": work[name]} for name, v in seconds.items()},
    }


# ----------------------------------------------------------------------------------- packing, overhead, memory


def packing_record(dtype: str, depth: int, options: argparse.Namespace, ceilings: Ceilings, effort: Effort) -> Record:
    """Seconds and bytes a token: one array of documents packed by every row, and by NumKong document by document."""
    documents = 10 if options.quick else 100
    inputs = make(Workload("packing", documents=documents, depth=depth)).astype(dtype)
    total = len(inputs.tokens)
    calls: dict[str, tuple[Callable[[], Any], None]] = {}
    bytes_: dict[str, float] = {}
    for row in our_rows(dtype):
        call = partial(nk.pack, inputs.tokens, offsets=inputs.offsets, backend=row)
        calls[f"{OURS}:{row}"], bytes_[f"{OURS}:{row}"] = (call, None), call().nbytes / total
    if version("numkong"):
        import numkong

        parts = inputs.documents
        bytes_["numkong"] = sum(numkong.maxsim_pack(part).nbytes for part in parts) / total
        calls["numkong"] = (lambda: [numkong.maxsim_pack(part) for part in parts], None)
    seconds, rates = interleave(calls, ceilings, effort)
    return {
        "kind": "packing",
        "dtype": dtype,
        "depth": depth,
        "tokens": total,
        "raw_bytes_per_token": depth * inputs.tokens.itemsize,
        "ceilings": {name: _rounded(values) for name, values in rates.items()},
        "contenders": {
            name: {"seconds_per_token": _rounded(np.array(values) / total), "bytes_per_token": round(bytes_[name], 1)}
            for name, values in seconds.items()
        },
    }


def c_call(queries: nk.PackedTensor, documents: nk.PackedTensor) -> Callable[[], int]:
    """The one C call behind `maxsim_packed`, its job made beforehand."""
    ffi, lib = cpu.ffi, cpu.lib
    scores = np.empty((len(queries), len(documents)), nk.output_dtype(documents.dtype))
    job = ffi.new("nk_maxsim_corpus_t *")
    job.queries, job.documents = queries.pointer, documents.pointer
    job.query_begin, job.query_end = queries.begin, queries.end
    job.document_begin, job.document_end = documents.begin, documents.end
    job.metric = cpu.METRICS["dot"]
    job.scores, job.score_stride = ffi.from_buffer(scores), len(documents)
    function, mask = getattr(lib, f"nk_maxsim_corpus_{documents.dtype}_best"), int(documents.row.required)
    if function(job, mask, ffi.NULL) or not np.array_equal(scores[0], nk.maxsim_packed(queries, documents)):
        sys.exit("overhead: the C call and maxsim_packed differ")
    return lambda: (function(job, mask, ffi.NULL), scores)[0]


def overhead_record(options: argparse.Namespace, effort: Effort) -> Record:
    """What `maxsim_packed` adds to its C call: ten small documents, so that the difference is not lost in the work."""
    row = our_rows("f32")[0]
    inputs = make(Workload("overhead", query_tokens=4, documents=10, lengths=(4, 4)))
    queries, documents = nk.pack(inputs.queries[0], backend=row), pack_ours(row, inputs)[1]
    calls = {
        "maxsim_packed": (partial(nk.maxsim_packed, queries, documents, threads=1), None),
        "maxsim_packed, threads=None": (partial(nk.maxsim_packed, queries, documents), None),
        "C call": (c_call(queries, documents), None),
    }
    seconds, _ = interleave(calls, None, replace(effort, most=101, seconds=max(effort.seconds, 1.0)))
    return {"kind": "overhead", "row": row, "contenders": {n: {"seconds": _rounded(v)} for n, v in seconds.items()}}


def memory_of(contender: str, workload: str, dtype: str, *, threads: int, quick: bool) -> int:
    """Bytes that one call needs at its peak beyond its prepared inputs; for a process of its own."""
    shape = WORKLOADS[workload].smaller(QUICK_FACTOR) if quick else WORKLOADS[workload]
    found = next(one for one in contenders() if one.name == contender)
    call = found.prepare(make(shape).astype(dtype), threads)
    return extra_peak_bytes(call)


def memory_record(workload: Workload, dtype: str, options: argparse.Namespace) -> Record:
    """Extra peak memory of every contender, each in a fresh process, first call (compilation included)."""
    inputs = make(workload).astype(dtype)
    found: dict[str, int] = {}
    for contender in chosen_contenders(options, replace(workload, every_row=False), inputs, dtype):
        command = [sys.executable, str(Path(__file__).with_name("run.py")), "--out", "-"]
        command += ["--threads", str(options.threads), *(["--quick"] if options.quick else [])]
        command += ["--memory-of", contender.name, workload.name, dtype]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[contender.name] = int(done.stdout.split()[-1])
    return {
        "kind": "memory",
        **_described(workload, inputs, dtype, options.threads),
        "input_bytes": inputs.tokens.nbytes,
        "extra_peak_bytes": found,
    }


# ------------------------------------------------------------------------------------------------------- a run


def jobs(options: argparse.Namespace, ceilings: Ceilings, effort: Effort) -> Iterator[tuple[str, Callable[[], Record]]]:
    """What a run does, one (label, job) after the other."""
    workloads = chosen_workloads(options)
    for workload in workloads:
        part, measure = ("topk", top_record) if workload.k else ("scores", score_record)
        measure = staged_record if workload.name in STAGED_NAMES else measure
        for dtype in options.dtype or workload.dtypes:
            if part in options.part and chosen_rows(options, workload, dtype):
                yield f"{workload.name}, {dtype}", partial(measure, workload, dtype, options, ceilings, effort)
    for workload in workloads:
        if "precision" in options.part and workload.name in ("rerank", "colpali"):
            for dtype in options.dtype or ("f32",):
                label = f"precisions, {workload.name}, {dtype}"
                yield label, partial(precision_record, workload, dtype, options, ceilings, effort)
    if "precision" in options.part:
        yield "loss", loss_record
    if "kernels" in options.part and not ceilings.reason:
        for row in our_rows("bf16"):
            if row != "serial" and (not options.row or {row, "all"} & set(options.row)):
                yield f"kernels, {row}", partial(kernels_record, row, options, ceilings, effort)
    yield from training_jobs(options, ceilings, effort)
    if "packing" in options.part:
        for dtype in options.dtype or ("f32", "bf16", "f16"):
            yield f"packing, {dtype}", partial(packing_record, dtype, 128, options, ceilings, effort)
    if "overhead" in options.part:
        yield "overhead", partial(overhead_record, options, effort)
    if "memory" in options.part:
        for workload in workloads:
            if workload.name in ("rerank", "colpali"):
                yield f"memory, {workload.name}", partial(memory_record, workload, "f32", options)


def training_jobs(
    options: argparse.Namespace, ceilings: Ceilings, effort: Effort
) -> Iterator[tuple[str, Callable[[], Record]]]:
    """Training steps and Chamfer distances that were asked for."""
    common = (options.threads, ceilings, effort, options.quick)
    for workload in STEPS:
        for dtype in options.dtype or workload.dtypes:
            if "training" in options.part and workload.name in (options.workload or [workload.name]):
                yield f"{workload.name}, {dtype}", partial(step_record, workload, dtype, *common)
    for clouds in CLOUDS:
        if "chamfer" in options.part and clouds.name in (options.workload or [clouds.name]):
            yield clouds.name, partial(chamfer_record, clouds, *common)


def summary(record: Record) -> str:
    """One line of a record, as ratios to the first contender of ours."""
    found = record.get("contenders", {})
    medians = {
        name: float(np.median(values))
        for name, entry in found.items()
        if (values := entry.get("seconds") or entry.get("seconds_per_token"))
    }
    if not medians:
        return ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in record.get("extra_peak_bytes", {}).items())
    first = next(iter(medians))
    flags = {name: "" if (found[name].get("verdict") or "exact") != "wrong" else " (wrong)" for name in medians}
    ratios = [f"{name}{flags[name]} {value / medians[first]:.2f}" for name, value in medians.items()]
    return f"{medians[first] * 1e3:.4g} ms | " + ", ".join(ratios)


def run(options: argparse.Namespace) -> None:
    """Do every job, writing each record as soon as it is there."""
    effort = QUICK if options.quick else Effort()
    if options.seconds:
        effort = replace(effort, seconds=options.seconds)
    if options.clock == "cpu":
        effort = replace(effort, clock=time.process_time)
    shown = {name: value for name, value in vars(options).items() if name not in ("out", "memory_of")}
    first = stamp(shown)
    ceilings = Ceilings(options.threads, effort.clock)
    if ceilings.reason:
        print(f"no ceilings: {ceilings.reason}", file=sys.stderr)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    begin, skipped = time.perf_counter(), []
    with options.out.open("a") as file, tqdm(disable=None, unit="job") as bar:

        def write(record: Record) -> None:
            file.write(json.dumps({**record, "run": first["run"]}) + "\n")
            file.flush()

        write(first)
        for label, job in jobs(options, ceilings, effort):
            if options.limit and time.perf_counter() - begin > options.limit:
                skipped.append(label)
                continue
            bar.set_description(label)
            record = job()
            write(record)
            bar.update()
            tqdm.write(f"{label}: {summary(record)}")
        if skipped:
            write({"kind": "skipped", "labels": skipped, "reason": f"--limit {options.limit:g}"})
            tqdm.write(f"skipped, out of time: {'; '.join(skipped)}")
