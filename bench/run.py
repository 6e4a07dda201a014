"""The bench, one driver: contenders take turns on workloads, right or wrong first, next to the machine's own ceilings.

    python bench/run.py --out bench/results/mine.jsonl            everything, one core: about ten minutes
    python bench/run.py --quick --out quick.jsonl                 a tenth of the documents, few rounds: a minute
    python bench/run.py --workload rerank --contender jax numkong --threads 2 --out rerank.jsonl

See bench/README.md. This file prepares the process, before anything that reads its environment is imported.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = ("scores", "topk", "precision", "kernels", "training", "chamfer", "packing", "overhead", "memory")
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Measure numkong_py and its peers.")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--workload", nargs="+", help="names of bench/workloads.py; default: all")
    parser.add_argument("--dtype", nargs="+", choices=("f32", "bf16", "f16"), help="default: those of each workload")
    parser.add_argument("--contender", nargs="*", help="peers, by name or package; none: only ours; default: all usual")
    parser.add_argument("--row", nargs="+", help="rows of ours, or all; default: the best, on some workloads all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a tenth of the documents, few rounds")
    parser.add_argument("--seconds", type=float, help="time to spend on rounds of each workload and dtype")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine with other work")
    parser.add_argument("--limit", type=float, help="seconds after which no workload is begun; the rest is recorded")
    parser.add_argument("--memory-of", nargs=3, metavar=("CONTENDER", "WORKLOAD", "DTYPE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.clock == "cpu" and options.threads > 1:
        parser.error("--clock cpu: counts the time of all threads together; wanted with --threads 1")
    return options


def limit_threads(threads: int) -> None:
    """Keep every library, ours included, to as many threads and processors; no library finds a GPU."""
    for name in THREAD_VARIABLES:
        os.environ[name] = str(threads)
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):  # they can force slower kernels than the machine has
        os.environ.pop(name, None)
    os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        if threads > len(allowed):
            sys.exit(f"--threads {threads}: this process may use {len(allowed)} processors")
        os.sched_setaffinity(0, allowed[:threads])


def run_on_cuda(arguments: list[str]) -> None:
    """Hand over to the bench of the GPU rows, which has its own workloads: theirs are named by a part of the name."""
    script = HERE / "cuda" / "forward.py"
    if not script.exists():
        sys.exit("--device cuda: bench/cuda/forward.py is not there")
    options = parse(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    sys.exit(subprocess.call([sys.executable, str(script), str(options.out), *(options.workload or [])]))


def main() -> None:
    """Run what the command line asks for."""
    arguments = sys.argv[1:]
    device = argparse.ArgumentParser(add_help=False)
    device.add_argument("--device")
    found, others = device.parse_known_args(arguments)
    if found.device == "cuda":
        run_on_cuda(others)
        return
    options = parse(arguments)
    limit_threads(options.threads)
    import driver

    if options.memory_of:
        print(driver.memory_of(*options.memory_of, threads=options.threads, quick=options.quick))
        return
    driver.run(options)


if __name__ == "__main__":
    main()
