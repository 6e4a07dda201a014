"""Training on the CPU: a step (forward and backward) against torch and JAX, and the Chamfer distance against SciPy.

As a program it prints the extra peak memory of one step, for a process of its own: ``training.py WORKLOAD CONTENDER``.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ceilings import Ceilings
from contenders import OURS, version
from measure import Effort, extra_peak_bytes, interleave
from workloads import Inputs, Workload, make

import numkong_py as nk
from numkong_py import neighbours
from numkong_py.backends import select
from numkong_py.sides import side_of

TOLERANCE = 1e-5  # of a gradient's norm, against ours: float32 peers are held to it before they are timed
STEPS = (
    Workload("step 1x1000", dtypes=("f32", "bf16")),
    Workload("step 32x100", queries=32, documents=100, dtypes=("f32", "bf16")),
    Workload("step 4x4 pages", queries=4, query_tokens=1024, documents=4, lengths=(1024, 1024)),
)
Record = dict[str, Any]
Step = Callable[[], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Clouds:
    """Two point clouds of one size; `data` is "cube", "surface" (of dimension 2) or "real" (token vectors)."""

    name: str
    points: int
    depth: int
    data: str = "cube"

    def make(self) -> list[np.ndarray]:
        """Both clouds, always the same."""
        rng = np.random.default_rng(0)
        if self.data == "real":
            from numkong_py import demo

            tokens = rng.permutation(np.concatenate(demo.load().vectors))[:, : self.depth]
            return np.split(np.ascontiguousarray(tokens[: 2 * self.points]), 2)
        inner = self.depth if self.data == "cube" else 2
        clouds = [rng.random((self.points, inner), dtype=np.float32) for _ in range(2)]
        if self.data == "cube":
            return clouds
        directions = rng.standard_normal((inner, self.depth), dtype=np.float32)
        return [np.sin(3 * cloud @ directions) for cloud in clouds]


CLOUDS = (
    Clouds("chamfer 100k, 3", 100_000, 3),
    Clouds("chamfer 32k, 3", 32_768, 3),
    Clouds("chamfer 8k, 8", 8_192, 8),
    Clouds("chamfer 8k, 16", 8_192, 16),
    Clouds("chamfer 8k, 128", 8_192, 128),
    Clouds("chamfer 8k, 128, real", 8_192, 128, "real"),
    Clouds("chamfer 8k, 16, surface", 8_192, 16, "surface"),
)


# --------------------------------------------------------------------------------------------------- steps


def _ours(inputs: Inputs, upstream: np.ndarray, threads: int) -> Step:
    queries, documents = np.stack(inputs.queries), nk.collection(inputs.tokens, offsets=inputs.offsets)

    def step() -> tuple[np.ndarray, np.ndarray]:
        winners = nk.maxsim(queries, documents, return_argmax=True, threads=threads).argmax
        return nk.maxsim_grad(queries, documents, upstream, argmax=winners, threads=threads)

    return step


def _backward(inputs: Inputs, upstream: np.ndarray, threads: int) -> Step:
    queries, documents = np.stack(inputs.queries), nk.collection(inputs.tokens, offsets=inputs.offsets)
    winners = nk.maxsim(queries, documents, return_argmax=True, threads=threads).argmax
    return partial(nk.maxsim_grad, queries, documents, upstream, argmax=winners, threads=threads)


def _torch(inputs: Inputs, upstream: np.ndarray, threads: int) -> Step:
    import torch

    torch.set_num_threads(threads)
    dtype = torch.float32 if inputs.tokens.itemsize == 4 else torch.bfloat16
    arrays = np.stack(inputs.queries), inputs.padded()[0]
    queries, documents = (torch.from_numpy(array.astype(np.float32)).to(dtype).requires_grad_() for array in arrays)
    weights = torch.from_numpy(upstream.astype(np.float32))

    def step() -> tuple[np.ndarray, np.ndarray]:
        queries.grad = documents.grad = None
        scores = torch.einsum("aik,bjk->abij", queries, documents).amax(dim=3).float().sum(dim=2)
        (scores * weights).sum().backward()
        return queries.grad.float().numpy(), documents.grad.float().numpy()

    return step


def _jax(inputs: Inputs, upstream: np.ndarray, threads: int) -> Step:
    import jax
    import jax.numpy as jnp

    arrays = jnp.asarray(np.stack(inputs.queries)), jnp.asarray(inputs.padded()[0])

    def loss(queries: Any, documents: Any) -> Any:
        best = jnp.einsum("aik,bjk->abij", queries, documents).max(axis=3).astype(jnp.float32)
        return (best.sum(axis=2) * upstream).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return lambda: tuple(np.asarray(gradient, np.float32) for gradient in jax.block_until_ready(step(*arrays)))


CONTENDERS = {f"{OURS} step": _ours, f"{OURS} backward": _backward, "torch step": _torch, "jax step": _jax}


def _available(name: str) -> bool:
    package = name.split()[0]
    return package == OURS or bool(version(package))


def _upstream(inputs: Inputs) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((len(inputs.queries), len(inputs.offsets) - 1))


def _error(found: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> float:
    pairs = [(a.reshape(-1).astype(np.float64), b.reshape(-1).astype(np.float64)) for a, b in zip(found, expected)]
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def step_record(
    workload: Workload, dtype: str, threads: int, ceilings: Ceilings, effort: Effort, quick: bool
) -> Record:
    """Times of a training step, every contender's gradients compared with ours first; extra peak memory of each."""
    inputs = make(workload.smaller(10) if quick else workload).astype(dtype)
    upstream = _upstream(inputs)
    calls, found = {}, {}
    expected = _ours(inputs, upstream, threads)()
    for name, prepare in CONTENDERS.items():
        if not _available(name):
            continue
        call = prepare(inputs, upstream, threads)
        error = _error(call(), expected)
        if name.startswith(OURS) and error:
            sys.exit(f"{name} on {workload.name}: gradients differ from the step's; not timed")
        wrong = dtype == "f32" and error > TOLERANCE
        found[name] = {"gradient_error": error, "verdict": "wrong" if wrong else "float32" if error else "exact"}
        calls[name] = (call, None)
    seconds, rates = interleave(calls, ceilings, effort)
    for name, values in seconds.items():
        found[name]["seconds"] = [float(f"{value:.4g}") for value in values]
        if not quick and dtype == "f32":
            found[name]["extra_peak_bytes"] = _memory(workload.name, name)
    return {
        "kind": "training",
        "workload": workload.name,
        "dtype": dtype,
        "threads": threads,
        "shape": f"{workload.queries} x {workload.documents}, {workload.query_tokens} x {workload.lengths[0]}, "
        f"d = {workload.depth}",
        "output_bytes": sum(gradient.nbytes for gradient in expected),
        "ceilings": {name: [float(f"{value:.4g}") for value in values] for name, values in rates.items()},
        "contenders": found,
    }


def _memory(workload: str, contender: str) -> int:
    command = [sys.executable, str(Path(__file__)), workload, contender]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


# --------------------------------------------------------------------------------------------------- chamfer


def _differences(p: np.ndarray, q: np.ndarray, threads: int) -> list[Any]:
    row, sides = select("f32"), [side_of(nk.collection(cloud)) for cloud in (p, q)]
    return [row.nearest(*pair, threads) for pair in (sides, sides[::-1])]


def _trees(p: np.ndarray, q: np.ndarray, threads: int) -> list[Any]:
    from scipy.spatial import cKDTree

    return [cKDTree(others).query(points, workers=threads) for points, others in ((p, q), (q, p))]


def chamfer_record(clouds: Clouds, threads: int, ceilings: Ceilings, effort: Effort, quick: bool) -> Record:
    """Both directions: `nk.chamfer`, its differences alone, forward and gradient, and SciPy's tree."""
    p, q = (cloud[: len(cloud) // (10 if quick else 1)] for cloud in clouds.make())

    def step() -> Any:
        found = nk.chamfer(p, q, threads=threads, return_nearest=True)
        return nk.chamfer_grad(p, q, nearest=found[1:], threads=threads)

    calls = {
        OURS: (partial(nk.chamfer, p, q, threads=threads), None),
        f"{OURS} step": (step, None),
        f"{OURS} differences": (partial(_differences, p, q, threads), None),
    }
    if version("scipy"):
        calls["scipy cKDTree"] = (partial(_trees, p, q, threads), None)
        for (distances, _), (_, squares) in zip(_trees(p, q, threads), _differences(p, q, threads)):
            if not np.allclose(distances, np.sqrt(squares), rtol=1e-12):
                sys.exit(f"{clouds.name}: distances differ from SciPy's; not timed")
    seconds, rates = interleave(calls, ceilings, effort)
    return {
        "kind": "chamfer",
        "workload": clouds.name,
        "dtype": "f32",
        "depth": clouds.depth,
        "threads": threads,
        "points": len(p),
        "data": clouds.data,
        "tree": clouds.depth <= neighbours.TREE_DEPTH,
        "ceilings": {name: [float(f"{value:.4g}") for value in values] for name, values in rates.items()},
        "contenders": {n: {"seconds": [float(f"{value:.4g}") for value in v]} for n, v in seconds.items()},
    }


if __name__ == "__main__":
    chosen = make(next(workload for workload in STEPS if workload.name == sys.argv[1]))
    print(extra_peak_bytes(CONTENDERS[sys.argv[2]](chosen, _upstream(chosen), 1)))
