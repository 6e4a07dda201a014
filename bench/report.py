"""Tables and plots of docs/performance.md, made anew from bench/results/*.jsonl: no number in it is typed by hand.

    python bench/report.py            every results file
    python bench/report.py a.jsonl    these files only

Ratios are medians of ratios within a round, in which the two sides ran one after the other on the same machine.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"
GPU_DOCUMENT = "performance-gpu.md"  # beside it
NUMERICS, LOSS_MARKS = "numerics.md", ("<!-- bench/report.py: loss -->", "<!-- end -->")
PACKAGE = "numkong_py"
OURS = f"{PACKAGE}:"  # and a row
RIGHT = ("exact", "float32", "16-bit")
# Ceilings of a product, best first, and of the units that a row multiplies with.
PRODUCTS = {
    "f32": ("f32_fma_512", "f32_fma_256"),
    "bf16": ("amx_bf16", "bf16_dot_512"),
    "int8": ("amx_int8", "int8_dot_512", "int8_dot_256", "int8_maddubs_256"),
}
WIDE = {"int8": "int8_dot_512", "f32": "f32_fma_512", "bf16": "bf16_dot_512"}
UNITS = {
    "sapphireamx": {**WIDE, "int8": "amx_int8", "bf16": "amx_bf16"},
    "genoa": WIDE,
    "icelake": WIDE,
    "alder": {"int8": "int8_dot_256", "f32": "f32_fma_256"},
    "haswell": {"int8": "int8_maddubs_256", "f32": "f32_fma_256"},
}
Record = dict[str, Any]


# ------------------------------------------------------------------------------------------------- reading


@dataclass
class Machine:
    """What was measured on one kind of machine; a later record of the same thing replaces an earlier one."""

    model: str
    runs: list[Record] = field(default_factory=list)
    records: dict[tuple, Record] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        own = {"skipped": ("run",), "kernels": ("row",)}
        names = ("kind", "workload", "dtype", "depth", "threads", *own.get(record["kind"], ()))
        self.records[tuple(record.get(name) for name in names)] = record

    def of(self, kind: str, threads: int | None = None) -> list[Record]:
        """Records of a kind, in the order in which they were first measured."""
        found = [record for record in self.records.values() if record["kind"] == kind]
        return [record for record in found if threads is None or record.get("threads") == threads]

    def one(self, kind: str, workload: str, dtype: str, threads: int = 1) -> Record | None:
        """The record of a workload, if there is one."""
        found = [r for r in self.of(kind, threads) if r["workload"] == workload and r["dtype"] == dtype]
        return found[-1] if found else None

    @property
    def slug(self) -> str:
        """Name for files."""
        return re.sub(r"[^a-z0-9]+", "-", self.model.lower()).strip("-")


def read(paths: Iterable[Path], quick: bool = False) -> list[Machine]:
    """Read results; runs with --quick are left out unless asked for."""
    machines: dict[str, Machine] = {}
    for path in paths:
        runs: dict[str, Machine] = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "kind" not in record:  # of a GPU bench
                continue
            if record["kind"] == "run":
                if record["options"]["quick"] and not quick:
                    continue
                about = record["machine"]
                family, number_, _ = about["family"].split("/")
                kind = f"family {family}, model {number_}, " if family else ""
                model = f"{about['model']} ({kind}{about['cores']} cores)"
                runs[record["run"]] = machines.setdefault(model, Machine(model))
                runs[record["run"]].runs.append(record)
            elif record["run"] in runs:
                runs[record["run"]].add(record)
    return list(machines.values())


def read_gpu(paths: Iterable[Path]) -> dict[str, list[Record]]:
    """Records of bench/cuda by machine; a later one of a workload and contender replaces an earlier one."""
    machines: dict[str, dict[tuple[str, str], Record]] = {}
    for path in paths:
        for record in map(json.loads, path.read_text().splitlines()):
            if "kind" not in record and "error" not in record:
                key = record["workload"], record.get("contender", "")
                machines.setdefault(record["machine"], {})[key] = record
    return {name: list(records.values()) for name, records in machines.items()}


# ------------------------------------------------------------------------------------------------ arithmetic


def times(record: Record, name: str) -> np.ndarray:
    """Seconds of a contender, round by round."""
    return np.array(record["contenders"][name]["seconds"])


def median_ms(record: Record, name: str) -> float:
    return float(np.median(times(record, name))) * 1e3


def ratio(record: Record, name: str, other: str) -> float:
    """Median over the rounds of one contender's time over another's."""
    return float(np.median(times(record, name) / times(record, other)))


def timed(record: Record) -> list[str]:
    return [name for name, entry in record["contenders"].items() if "seconds" in entry]


def ours(record: Record, row: str | None = None) -> str | None:
    """Our contender: of a row, or the first one, which is the row that a user gets."""
    names = [name for name in timed(record) if name.startswith(OURS)]
    return next((name for name in names if row is None or name == OURS + row), None)


def best_peer(record: Record) -> str | None:
    """The fastest peer whose scores are right."""
    peers = [n for n in timed(record) if not n.startswith(OURS) and record["contenders"][n]["verdict"] in RIGHT]
    return min(peers, key=lambda name: median_ms(record, name), default=None)


def ceiling(record: Record, product: str) -> tuple[str, np.ndarray] | None:
    """The machine's best loop for a product, with its rates round by round."""
    names = [name for name in PRODUCTS.get(product, (product,)) if record["ceilings"].get(name)]
    return (names[0], np.array(record["ceilings"][names[0]])) if names else None


def share(record: Record, name: str, product: str) -> float | None:
    """Median over the rounds of a contender's rate over a ceiling: 2 means twice as fast as that unit could be."""
    found = ceiling(record, product)
    if found is None:
        return None
    return float(np.median(record["operations"] * 1e-9 / times(record, name) / found[1]))


# -------------------------------------------------------------------------------------------------- tables


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits."""
    if value is None:
        return "-"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    text = f"{value:.{digits}g}"
    return f"{float(text):g}" if "e" not in text else f"{value:.0f}"


def table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def shape(record: Record) -> str:
    """Queries x documents, query tokens x document tokens, depth."""
    least, mean, most = record["lengths"]
    lengths = f"{most}" if least == most else f"{least}..{most} (mean {number(mean)})"
    return f"{record['queries']} x {record['documents']}, {record['query_tokens']} x {lengths}, d = {record['depth']}"


def scores_table(machine: Machine, threads: int) -> str:
    rows = []
    for record in machine.of("scores", threads):
        name = ours(record)
        if name is None:
            continue
        peer, numkong = best_peer(record), "numkong" if "numkong" in timed(record) else None
        rows.append(
            [
                record["workload"],
                record["dtype"],
                shape(record),
                f"{number(median_ms(record, name))} ({name.removeprefix(OURS)})",
                *(number(share(record, name, product)) for product in ("f32", "bf16", "int8")),
                f"{number(ratio(record, name, peer))} ({peer})" if peer else "-",
                f"{number(ratio(record, name, numkong))} ({record['contenders']['numkong']['verdict']})"
                if numkong
                else "-",
            ]
        )
    headers = ["workload", "type", "shape", "ms (row)", "of f32", "of bf16", "of int8", "to the best right peer"]
    return table([*headers, "to numkong"], rows) if rows else ""


def rows_table(machine: Machine) -> str:
    rows = []
    for record in machine.of("scores", 1):
        names = [name for name in timed(record) if name.startswith(OURS)]
        if len(names) < 2:
            continue
        for name in names:
            row = name.removeprefix(OURS)
            peer = f"numkong:{row}" if f"numkong:{row}" in timed(record) else None
            rate = record["operations"] / median_ms(record, name) * 1e-6
            rows.append(
                [
                    record["workload"],
                    record["dtype"],
                    row,
                    number(median_ms(record, name)),
                    number(rate),
                    f"{number(share(record, name, UNITS[row]['int8']))} of {UNITS[row]['int8']}"
                    if row in UNITS
                    else "-",
                    number(ratio(record, name, peer)) if peer else "-",
                    number(_reading_ms(record)) if ceiling(record, "memory_read") else "-",
                ]
            )
    headers = ["workload", "type", "row", "ms", "GOP/s", "of its int8 unit", "to numkong's kernel of that name"]
    return table([*headers, "codes read once, ms"], rows) + READING if rows else ""


READING = (
    "\nThe last column is what reading the int8 codes once takes at the measured rate of memory, a byte an element: no "
    "score\ncomes sooner from a corpus that is in no cache.\n"
)


def _reading_ms(record: Record) -> float:
    """The time that memory takes for a byte of every element of the documents."""
    elements = record["operations"] / (2 * record["queries"] * record["query_tokens"])
    return elements / float(np.median(record["ceilings"]["memory_read"])) * 1e-6


def kernels_table(machine: Machine) -> str:
    rows = []
    for record in machine.of("kernels"):
        for name, entry in record["contenders"].items():
            dtype, place = name.split(" ", 1)
            unit = UNITS[record["row"]][dtype]
            rates = entry["operations"] * 1e-9 / times(record, name)
            of_unit = float(np.median(rates / np.array(record["ceilings"][unit])))
            kernel = "screen" if dtype == "int8" else "direct"
            rows.append([record["row"], kernel, dtype, place, number(float(np.median(rates))), number(of_unit), unit])
    headers = ["row", "kernel", "type", "documents", "GOP/s", "of its unit", "unit"]
    return table(headers, rows) if rows else ""


def precision_table(machine: Machine) -> str:
    rows = []
    for record in machine.of("precision"):
        kernel = record["contenders"].get("int8 kernel")
        for name, entry in record["contenders"].items():
            if entry is kernel:
                continue
            alone = kernel and ratio(record, name, "int8 kernel") * kernel["operations"] / record["operations"]
            rows.append(
                [
                    f"{record['workload']}, {record['row']}",
                    record["dtype"],
                    shape(record),
                    str(record["threads"]),
                    name,
                    number(median_ms(record, name)),
                    number(ratio(record, name, "exact")),
                    number(alone),
                    number(entry["bytes_per_token"]),
                    number(entry["error"]),
                    number(entry["top10"]),
                ]
            )
    headers = ["workload, row", "type", "shape", "threads", "precision", "ms", "to exact", "to the int8 kernel alone"]
    return table([*headers, "bytes a token", "error over the norms", "best ten kept"], rows) if rows else ""


def staged_table(machine: Machine) -> str:
    rows = []
    for record in machine.of("two-stage"):
        scan, staged, coarse = record["contenders"]
        cold = [np.median(record["cold"][name]) for name in (scan, staged)]
        rows.append(
            [
                record["workload"],
                record["dtype"],
                shape(record),
                str(record["threads"]),
                str(record["k"]),
                f"{np.mean(record['refined']):.0f}",
                number(median_ms(record, scan)),
                number(ratio(record, coarse, scan)),
                number(ratio(record, staged, scan)),
                number(1e3 * cold[0]),
                number(float(np.median(np.divide(*(record["cold"][name] for name in (staged, scan)))))),
            ]
        )
    headers = ["workload", "type", "shape", "threads", "k", "documents refined", "ms of the exact scan, warm"]
    headers += ["coarse scores alone over it", "two stages over it", "ms of the exact scan, from the disk"]
    return table([*headers, "two stages over it, from the disk"], rows) if rows else ""


def loss_table(machines: Iterable[Machine]) -> str:
    """What precisions lose on the shipped corpus, for docs/numerics.md; rows of equal results stand together."""
    rows = {}
    for machine in machines:
        for record in machine.of("loss"):
            for facts in record["reports"]:
                cells = [facts["precision"], f"{facts['bytes_per_token']:.0f}"]
                cells += [
                    number(facts[name]) for name in ("max_error", "mean_error", "max_bound", "max_error_of_bound")
                ]
                cells += [f"{facts[name]:.2%}" for name in ("argmax_agreement", "topk_overlap")]
                cells += [f"{facts['spearman']:.6f}", f"{facts['ndcg']:.4f}"]
                rows.setdefault(tuple(cells), []).append(record["row"])
    headers = ["precision", "row", "bytes a token", "largest error", "mean error", "largest bound", "error over bound"]
    headers += ["same best token", "top-20 overlap", "Spearman", "nDCG@20"]
    cells = [[first, ", ".join(dict.fromkeys(names)), *others] for (first, *others), names in rows.items()]
    return table(headers, cells) if cells else ""


def put_loss(machines: Iterable[Machine], path: Path) -> None:
    """Replace the table between the marks of docs/numerics.md."""
    text, found = path.read_text(), loss_table(machines)
    before, mark, rest = text.partition(LOSS_MARKS[0])
    _, end, after = rest.partition(LOSS_MARKS[1])
    if found and mark and end:
        path.write_text(f"{before}{mark}\n{found}\n{end}{after}")


def peers_table(machine: Machine) -> str:
    rows = []
    for record in machine.of("scores", 1):
        name = ours(record)
        if record["workload"] not in ("rerank", "ragged", "colpali") or name is None:
            continue
        for peer, entry in record["contenders"].items():
            if "failed" in entry:
                rows.append([record["workload"], record["dtype"], peer, "-", f"failed: {entry['failed']}", "-", "-"])
                continue
            if peer.startswith(OURS) and peer != name:
                continue
            rows.append(
                [
                    record["workload"],
                    record["dtype"],
                    peer,
                    number(ratio(record, peer, name)),
                    entry["verdict"],
                    number(entry["error"], 2),
                    number(entry["top10"], 2),
                ]
            )
    headers = ["workload", "type", "contender", "time over ours", "verdict", "error", "true top 10 found"]
    return table(headers, rows) if rows else ""


def topk_table(machine: Machine) -> str:
    rows = []
    for record in machine.of("topk"):
        full = ours(record)
        top = f"{full} top-{record['k']}"
        rows.append(
            [
                record["workload"],
                record["dtype"],
                shape(record),
                str(record["threads"]),
                number(median_ms(record, full)),
                number(median_ms(record, top)),
                number(ratio(record, top, full)),
            ]
        )
    headers = ["workload", "type", "shape", "threads", "all scores, ms", "best k, ms", "ratio"]
    return table(headers, rows) if rows else ""


def threads_table(machine: Machine) -> str:
    rows = []
    for record in machine.of("scores"):
        single = machine.one("scores", record["workload"], record["dtype"])
        name = ours(record)
        if record["threads"] == 1 or single is None or name not in timed(single):
            continue
        speedup = median_ms(single, name) / median_ms(record, name)
        most, once = ceiling(record, "int8"), ceiling(single, "int8")
        limit = float(np.median(most[1]) / np.median(once[1])) if most and once else None
        rows.append(
            [
                record["workload"],
                record["dtype"],
                str(record["threads"]),
                number(median_ms(record, name)),
                number(speedup),
                f"{number(limit)} ({most[0]})" if limit else "-",
                number(speedup / limit) if limit else "-",
            ]
        )
    headers = ["workload", "type", "threads", "ms", "speed-up", "ceiling's own", "of the ceiling's"]
    return table(headers, rows) if rows else ""


def ceilings_table(machine: Machine) -> str:
    rates: dict[tuple[str, int], list[float]] = {}
    for record in [*machine.of("scores"), *machine.of("topk")]:
        for name, values in record["ceilings"].items():
            rates.setdefault((name, record["threads"]), []).extend(values)
    rows = [
        [name, str(threads), number(float(np.median(v))), number(min(v)), number(max(v)), str(len(v))]
        for (name, threads), v in sorted(rates.items(), key=lambda item: (item[0][1], item[0][0]))
    ]
    headers = ["loop", "threads", "median, GOP/s or GB/s", "least", "most", "samples"]
    return table(headers, rows) if rows else ""


def packing_table(machine: Machine) -> str:
    rows = []
    for record in machine.of("packing"):
        for name, entry in record["contenders"].items():
            microseconds = float(np.median(entry["seconds_per_token"])) * 1e6
            raw = str(record["raw_bytes_per_token"])
            rows.append(
                [
                    record["dtype"],
                    str(record["depth"]),
                    name,
                    number(microseconds),
                    number(entry["bytes_per_token"], 4),
                    raw,
                ]
            )
    headers = ["type", "depth", "contender", "us a token", "bytes a token", "raw bytes"]
    return table(headers, rows) if rows else ""


def overhead_table(machine: Machine) -> str:
    rows = []
    for record in machine.of("overhead"):
        bare = "C call"
        for name in timed(record):
            extra = float(np.median(times(record, name) - times(record, bare))) * 1e6
            rows.append([name, number(median_ms(record, name) * 1e3), number(extra)])
    return table(["call, 1 x 10 documents", "us", "us above the C call"], rows) if rows else ""


def training_table(machine: Machine) -> str:
    """A step and what of it is the backward pass; a peer's time and memory over ours."""
    rows = []
    for record in machine.of("training"):
        ours, back = f"{PACKAGE} step", f"{PACKAGE} backward"
        row = [record["workload"], record["dtype"], record["shape"], str(record["threads"])]
        row += [number(median_ms(record, ours)), number(median_ms(record, back))]
        for peer in ("torch step", "jax step"):
            found = record["contenders"].get(peer)
            row.append(
                "-"
                if found is None
                else number(ratio(record, peer, ours)) + ("" if found["verdict"] != "wrong" else " (wrong)")
            )
        for name in (ours, "torch step", "jax step"):
            size = record["contenders"].get(name, {}).get("extra_peak_bytes")
            row.append("-" if size is None else number(size / 2**20))
        rows.append(row)
    headers = ["workload", "type", "shape", "threads", "step, ms", "backward alone, ms", "torch / ours", "jax / ours"]
    headers += ["extra peak, MiB", "torch", "jax"]
    return table(headers, rows) if rows else ""


def chamfer_table(machine: Machine) -> str:
    """Both directions; the others' time over ours."""
    rows = []
    for record in machine.of("chamfer"):
        row = [record["workload"], record["data"], str(record["points"]), str(record["depth"]), str(record["threads"])]
        row += [number(median_ms(record, PACKAGE)), number(ratio(record, f"{PACKAGE} step", PACKAGE))]
        row += [
            number(ratio(record, name, PACKAGE)) if name in record["contenders"] else "-"
            for name in (f"{PACKAGE} differences", "scipy cKDTree")
        ]
        rows.append(row)
    headers = ["workload", "data", "points", "depth", "threads", "ms", "with gradients", "differences alone", "cKDTree"]
    return table(headers, rows) if rows else ""


def memory_table(machine: Machine) -> str:
    rows = [
        [record["workload"], record["dtype"], name, number(size / 2**20), number(size / record["input_bytes"], 2)]
        for record in machine.of("memory")
        for name, size in record["extra_peak_bytes"].items()
    ]
    return (
        table(["workload", "type", "contender", "extra peak, MiB", "over the documents' bytes"], rows) if rows else ""
    )


# -------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Target:
    """Something that the project promised to reach, how it is measured, and the extension that it was promised for."""

    text: str
    limit: float
    measure: Callable[[Machine], float | None]
    needs: str = ""


def _against(workload: str, dtype: str, peer: str | None = None, row: str | None = None) -> Callable:
    """Our time over a peer's, or over the best right peer's."""

    def measure(machine: Machine) -> float | None:
        record = machine.one("scores", workload, dtype)
        name = ours(record, row) if record else None
        other = peer or (best_peer(record) if record else None)
        return ratio(record, name, other) if name and other in timed(record) else None

    return measure


def _of_roofline(workload: str) -> Callable:
    """Our time over that of float32 products at the ceiling, which no direct float32 kernel beats."""

    def measure(machine: Machine) -> float | None:
        record = machine.one("scores", workload, "f32")
        found = share(record, ours(record), "f32") if record else None
        return 1 / found if found else None

    return measure


def _of_full(workload: str) -> Callable:
    def measure(machine: Machine) -> float | None:
        record = machine.one("topk", workload, "f32")
        return ratio(record, f"{ours(record)} top-{record['k']}", ours(record)) if record else None

    return measure


def _packing(dtype: str, key: str, scale: float) -> Callable:
    def measure(machine: Machine) -> float | None:
        found = [r for r in machine.of("packing") if r["dtype"] == dtype and r["depth"] == 128]
        entry = next(iter(found[-1]["contenders"].values())) if found else None
        return float(np.median(entry[key])) * scale if entry else None

    return measure


def _overhead(machine: Machine) -> float | None:
    for record in machine.of("overhead"):
        return float(np.median(times(record, "maxsim_packed") - times(record, "C call"))) * 1e6
    return None


VNNI, AMX = "avx512_vnni", "numkong:sapphireamx"
TARGETS = (
    Target("rerank, f32, over the best right peer", 0.25, _against("rerank", "f32"), VNNI),
    Target("rerank, f32, over numkong", 0.35, _against("rerank", "f32", "numkong"), VNNI),
    Target("ragged, f32, over the best right peer", 0.19, _against("ragged", "f32"), VNNI),
    Target("colpali, f32, over the best right peer", 0.31, _against("colpali", "f32"), VNNI),
    Target("16x1000, f32, over the best right peer", 0.36, _against("16x1000", "f32"), VNNI),
    Target("rerank, bf16, over the best right peer", 0.36, _against("rerank", "bf16"), VNNI),
    Target("rerank, bf16, over numkong", 0.45, _against("rerank", "bf16", "numkong"), VNNI),
    Target("d768, f32, over the best right peer", 0.38, _against("d768", "f32"), VNNI),
    Target("1x10, f32, over the best right peer", 0.45, _against("1x10", "f32"), VNNI),
    Target("top-10 of random documents over all scores", 1.05, _of_full("top-10: random")),
    Target("top-10 of related documents over all scores", 0.75, _of_full("top-10: related")),
    Target("real tokens, f32, over float32 products at the ceiling", 0.5, _of_roofline("data: real"), VNNI),
    Target("heavy tails, over float32 products at the ceiling", 0.55, _of_roofline("data: heavy-tailed"), VNNI),
    Target("near-duplicates, over float32 products at the ceiling", 0.55, _of_roofline("data: near-duplicates"), VNNI),
    Target("clustered 0.05, over float32 products at the ceiling", 1.1, _of_roofline("data: clustered 0.05"), VNNI),
    Target("haswell row, rerank, f32, over numkong's", 0.5, _against("rerank", "f32", "numkong:haswell", "haswell")),
    Target("alder row, rerank, f32, over numkong's", 1 / 3, _against("rerank", "f32", "numkong:alder", "alder")),
    Target("icelake row, rerank, f32, over numkong's", 1 / 3, _against("rerank", "f32", "numkong:icelake", "icelake")),
    *(
        Target(
            f"AMX row, {workload}, {dtype}, over numkong's", 1 / limit, _against(workload, dtype, AMX, "sapphireamx")
        )
        for workload, dtype, limit in (
            ("rerank", "bf16", 3),
            ("colpali", "bf16", 1.7),
            ("rerank", "f32", 4),
            ("colpali", "f32", 2.5),
        )
    ),
    Target("packing, f32, us a token", 0.3, _packing("f32", "seconds_per_token", 1e6)),
    Target("packed f32 token, bytes", 700, _packing("f32", "bytes_per_token", 1)),
    Target("packed bf16 token, bytes", 420, _packing("bf16", "bytes_per_token", 1)),
    Target("maxsim_packed above its C call, us", 15, _overhead),
)


def targets_table(machine: Machine) -> str:
    rows = []
    for target in TARGETS:
        value = None
        if not target.needs or target.needs in machine.runs[-1]["machine"]["flags"]:
            value = target.measure(machine)
        if value is not None:
            met = "yes" if value <= target.limit else "no"
            rows.append([target.text, number(value), number(target.limit), met])
    return table(["figure", "measured", "at most", "met"], rows) if rows else ""


# ---------------------------------------------------------------------------------------------------- plots


def _figure(width: float, height: float) -> tuple[Any, Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "numkong_py", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    return plt, figure, axes


def _save(plt: Any, figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def plot_roofline(machine: Machine, path: Path) -> bool:
    """Rate against operations for a byte of the documents, under the measured ceilings, one core."""
    points = [(record, ours(record)) for record in machine.of("scores", 1) if ours(record)]
    points = [(record, name) for record, name in points if "packed_bytes" in record and ceiling(record, "memory_read")]
    if not points:
        return False
    plt, figure, axes = _figure(8, 5)
    xs = np.geomspace(1, 1e5, 200)
    bandwidth = np.median([np.median(ceiling(record, "memory_read")[1]) for record, _ in points])
    for name in sorted({name for record, _ in points for name in record["ceilings"]} - {"memory_read"}):
        rate = np.median([np.median(record["ceilings"][name]) for record, _ in points if record["ceilings"].get(name)])
        axes.plot(xs, np.minimum(rate, bandwidth * xs), linewidth=0.8, label=f"{name} {number(float(rate))} GOP/s")
    markers = {"f32": "o", "bf16": "s", "f16": "^"}
    for dtype, marker in markers.items():
        found = [(record, name) for record, name in points if record["dtype"] == dtype]
        if not found:
            continue
        axes.scatter(
            [record["operations"] / record["packed_bytes"] for record, _ in found],
            [record["operations"] / median_ms(record, name) * 1e-6 for record, name in found],
            s=18,
            marker=marker,
            color="black",
            label=f"numkong_py {dtype}, exact",
        )
    for record, name in points:
        if record["dtype"] == "f32" and not record["workload"].startswith("data:"):
            at = (record["operations"] / record["packed_bytes"], record["operations"] / median_ms(record, name) * 1e-6)
            axes.annotate(record["workload"], at, fontsize=7, xytext=(3, 3), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlabel="operations for a packed byte of the documents", ylabel="GOP/s")
    axes.set_title(f"One core of {machine.model}; memory {number(float(bandwidth))} GB/s")
    axes.legend(fontsize=7, loc="lower right")
    axes.grid(True, which="major", linewidth=0.3)
    _save(plt, figure, path)
    return True


def plot_ratios(machine: Machine, path: Path) -> bool:
    """How many times as long the peers take, one core."""
    records = [
        r for r in machine.of("scores", 1) if ours(r) and len(timed(r)) > 1 and not r["workload"].startswith("data")
    ]
    bars = []
    for record in records:
        name = ours(record)
        peer = best_peer(record)
        entry = (f"{record['workload']}, {record['dtype']}", ratio(record, peer, name) if peer else np.nan, peer or "")
        wrong = ratio(record, "numkong", name) if "numkong" in timed(record) else np.nan
        bars.append((*entry, wrong))
    if not bars:
        return False
    plt, figure, axes = _figure(8, 0.6 + 0.36 * len(bars))
    places = np.arange(len(bars))[::-1]
    axes.barh(places + 0.2, [bar[1] for bar in bars], 0.38, label="best right peer", color="#4477aa")
    axes.barh(
        places - 0.2,
        [bar[3] for bar in bars],
        0.38,
        label="numkong (scores right or wrong: see the table)",
        color="#ccbb44",
    )
    for place, bar in zip(places, bars):
        if bar[2]:
            axes.annotate(f" {bar[1]:.1f} {bar[2]}", (bar[1], place + 0.2), va="center", fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(places, [bar[0] for bar in bars])
    axes.set(xlabel="time over ours (exact)", title=f"One core of {machine.model}")
    axes.margins(x=0.15)
    axes.legend(fontsize=7, loc="lower right")
    _save(plt, figure, path)
    return True


# ------------------------------------------------------------------------------------------------- document

INTRODUCTION = """# Performance

Made by `python bench/report.py` from `bench/results/*.jsonl`; `bench/README.md` says how to measure. Do not edit.

Every time is a median. Every ratio is the median of ratios within a round, in which the contenders ran one after the
other; so are the shares of the ceilings, which the bench measures in the same round with loops that do nothing else.
Ours is checked before it is timed: a sample of the documents must have the reference's bits, and all must agree with
float64 matrix products. "of f32 2" means twice as fast as float32 multiplications could run at the machine's best.

Verdicts on peers: *exact*, the reference's bits; *float32*, within what float32 sums can be off; *16-bit*, within what
similarities rounded to the inputs' type can be off; *wrong*, neither. Errors are relative to the sum of the query
tokens' norms times the longest document token. Wrong ones are timed for comparison, not as equals.
"""


def about(machine: Machine) -> str:
    last = machine.runs[-1]
    facts = last["machine"]
    caches = ", ".join(f"{name} {size}" for name, size in facts["caches"].items())
    versions = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    loads = [run["load"] for run in machine.runs]
    clocks = {run["options"].get("clock", "wall") for run in machine.runs}
    commits = sorted({str(run["commit"]) for run in machine.runs})
    return "\n".join(
        [
            f"- {facts['cores']} cores{' of a virtual machine' if 'hypervisor' in facts['flags'] else ''}, "
            f"{number(facts['memory_gib'])} GiB; {caches}; {' '.join(facts['flags'])}",
            f"- {facts['system']}, Python {facts['python']}, {versions}",
            f"- {len(machine.runs)} runs, {min(run['date'] for run in machine.runs)} to "
            f"{max(run['date'] for run in machine.runs)} UTC, "
            f"{' and '.join(sorted(clocks))} clock, load average at the start "
            f"{number(min(loads))} to {number(max(loads))}, commits {', '.join(commits)}, sources "
            f"{', '.join(sorted({run['source'] for run in machine.runs}))}",
            "",
        ]
    )


def section(machine: Machine, folder: Path, plots: bool) -> str:
    """Everything about one machine."""
    threads = sorted({record["threads"] for record in machine.of("scores")})
    parts = [(f"## {machine.model}", about(machine))]
    if plots:
        made = [
            f"![{title}]({path.name})\n"
            for title, draw, path in (
                ("Ratios to the peers", plot_ratios, folder / f"performance-{machine.slug}-ratios.svg"),
                ("Roofline", plot_roofline, folder / f"performance-{machine.slug}-roofline.svg"),
            )
            if draw(machine, path)
        ]
        parts.append(("", "\n".join(made)))
    parts += [(f"### Scores, {_threads(count)}", scores_table(machine, count)) for count in threads]
    parts += [
        ("### Targets", targets_table(machine)),
        ("### Precisions", precision_table(machine)),
        ("### Rows", rows_table(machine)),
        ("### Inner kernels alone", kernels_table(machine)),
        ("### Top-k", topk_table(machine)),
        ("### Two-stage top-k", staged_table(machine)),
        ("### Threads", threads_table(machine)),
        ("### Training steps", training_table(machine)),
        ("### Chamfer distance", chamfer_table(machine)),
        ("### Packing", packing_table(machine)),
        ("### Overhead of a call", overhead_table(machine)),
        ("### Extra peak memory of a call", memory_table(machine)),
        ("### Peers", peers_table(machine)),
        ("### Ceilings", ceilings_table(machine)),
    ]
    measured = {
        f"{record.get('workload', record['kind'])}, {record.get('dtype')}" for record in machine.records.values()
    }
    skipped = {label: None for record in machine.of("skipped") for label in record["labels"] if label not in measured}
    if skipped:
        parts.append(("### Not measured, for want of time", "; ".join(skipped) + "\n"))
    return "\n".join(f"{title}\n\n{text}" if title else text for title, text in parts if text)


def _threads(count: int) -> str:
    return "one thread" if count == 1 else f"{count} threads"


GPU_INTRODUCTION = """# Measured on GPUs

Written by `python bench/report.py` from the records of `bench/cuda` in `bench/results`: no number is typed by hand.

- **kernel**: device time of all kernels of a call, by replaying a CUDA graph; **call**: the whole Python call, enqueued
  back to back, with a query that is a plain array; **packed**: `nk.maxsim` with a packed one. Document sets rotate, so
  that the cache holds none of them. Medians of CUDA events.
- **floor**: the larger of operations over the rate of a matrix product and bytes over the rate of a device copy, both
  measured in the same run. Cards are limited by power: compare ratios across runs, not milliseconds.
- Shapes are queries x documents, query tokens x document tokens, depth, type.
"""


def _cells(record: Record, *keys: str) -> list[str]:
    return [record["workload"].partition(",")[2], *(number(record.get(key)) for key in keys)]


def _gpu_scores(records: list[Record]) -> str:
    rows = [
        [
            record["workload"],
            *(number(record.get(key)) for key in ("kernel_ms", "call_ms", "packed_call_ms", "argmax_kernel_ms")),
            number(record["tflops"]),
            number(record["of_matmul"]),
            f"{number(record['of_floor'])} ({record['bound']})",
            ", ".join(map(number, record["most_ms"])) or "-",
        ]
        for record in records
    ]
    headers = [
        "workload",
        "kernel, ms",
        "call, ms",
        "packed, ms",
        "with argmax, ms",
        "TFLOP/s",
        "of the matrix product",
    ]
    return "\n### Scores\n\n" + table([*headers, "of the floor", "at most, ms"], rows)


def _gpu_peers(records: list[Record], ours: dict[str, Record]) -> str:
    names = list(dict.fromkeys(record["contender"] for record in records))
    versions = {record["contender"]: record.get("version", "") for record in records}
    workloads = dict.fromkeys(record["workload"] for record in records)
    found = {(record["workload"], record["contender"]): record for record in records}

    def cell(record: Record | None) -> str:
        return "-" if record is None else f"{number(record['kernel_ms'])} / {number(record['call_ms'])}"

    rows = [[w, cell(ours.get(w)), *(cell(found.get((w, name))) for name in names)] for w in workloads]
    headers = ["kernel / call, ms", "numkong_py", *(f"{name} {versions[name]}".strip() for name in names)]
    return "\n### Beside other libraries, in the same run\n\n" + table(headers, rows)


def _gpu_facts(records: list[Record]) -> list[str]:
    """Tables of what is not speed: bytes, memory, first calls, streaming."""
    kinds = [
        (
            "bytes,",
            "Bytes through device memory (hardware counters), MB",
            {"input_mb": "inputs", "read_mb": "read", "written_mb": "written", "l2_mb": "through the L2 cache"},
        ),
        (
            "memory,",
            "Device memory of a call beyond its inputs and scores",
            {
                "corpus_gb": "corpus, GB",
                "norms_mb": "norms kept with it, MB",
                "later_call_mb": "a call, MB",
                "similarities_mb": "similarities never stored, MB",
                "call_ms": "the call, ms",
            },
        ),
        (
            "first call,",
            "First call of a process",
            {"first_call_s": "seconds", "other_shapes_s": "three more shapes, seconds"},
        ),
        (
            "stream,",
            "Streaming from host memory, device pool limited to 8 GB",
            {
                "corpus_gb": "corpus, GB",
                "documents_per_second": "documents/s",
                "gbps": "GB/s",
                "of_copy": "of a pinned copy",
                "device_pool_gb": "device pool, GB",
            },
        ),
    ]
    parts = []
    for prefix, title, columns in kinds:
        rows = [_cells(record, *columns) for record in records if record["workload"].startswith(prefix)]
        if rows:
            parts.append(f"\n### {title}\n\n" + table(["workload", *columns.values()], rows))
    return parts


def gpu_section(name: str, records: list[Record]) -> str:
    """Everything that was measured on one kind of GPU."""
    scored = [record for record in records if "kernel_ms" in record and "contender" not in record]
    peers = [record for record in records if "contender" in record]
    last = records[-1]
    versions = ", ".join(f"{key} {last[key]}" for key in ("driver", "nvrtc", "cupy", "python") if key in last)
    commits = ", ".join(sorted({record["commit"] or "-" for record in records}))
    parts = [f"\n## {name}\n\n- {versions}, commits {commits}\n"]
    if scored:
        rates = [f"{number(record['matmul_tflops'])} TFLOP/s, {number(record['copy_tbps'])} TB/s" for record in scored]
        parts.append(f"- measured ceilings (a bf16 matrix product, a device copy): {'; '.join(dict.fromkeys(rates))}\n")
        parts.append(_gpu_scores(scored))
    if peers:
        parts.append(_gpu_peers(peers, {record["workload"]: record for record in scored}))
    return "".join([*parts, *_gpu_facts(records)])


def gpu_document(gpus: dict[str, list[Record]]) -> str:
    """docs/performance-gpu.md."""
    return "".join([GPU_INTRODUCTION, *(gpu_section(*gpu) for gpu in gpus.items())])


def document(machines: list[Machine], folder: Path, plots: bool = True) -> str:
    """The whole document; plots are written beside it."""
    return "\n".join([INTRODUCTION, *(section(machine, folder, plots) for machine in machines)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/performance.md from measured results.")
    parser.add_argument("results", nargs="*", type=Path, help="JSONL files; default: bench/results/*.jsonl")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    parser.add_argument("--quick", action="store_true", help="let quick runs in")
    parser.add_argument("--no-plots", action="store_true")
    options = parser.parse_args()
    paths = options.results or sorted(RESULTS.glob("*.jsonl"))
    machines, gpus = read(paths, options.quick), read_gpu(paths)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if machines:
        options.out.write_text(document(machines, options.out.parent, not options.no_plots))
        if (options.out.parent / NUMERICS).exists():
            put_loss(machines, options.out.parent / NUMERICS)
    if gpus:
        (options.out.parent / GPU_DOCUMENT).write_text(gpu_document(gpus))


if __name__ == "__main__":
    main()
