"""Who is measured: this library, row by row, and what a user would pick instead, each the way its users call it.

A contender prepares its own layout of the inputs (packed, padded, on its tensors) and returns a call without arguments
that gives the scores ``[queries, documents]``. Only the call is timed. None of these libraries is needed to run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from workloads import UNNORMALISED, Inputs, Workload

import numkong_py as nk

Scores = Callable[[], Any]
OURS = "numkong_py"
LONGEST_ROW = 2e9  # operations past which the portable row would take most of the time of a run


@dataclass(frozen=True)
class Contender:
    """Something that scores.

    Attributes
    ----------
    name : str
        ``numkong_py:<row>`` for ours.
    package : str
        What it imports; it takes part only where that is installed.
    dtypes : tuple of str
    prepare : callable
        ``(inputs, threads) -> call``.
    activate : callable or None
        Set what is global to its process before its turn.
    takes : callable
        Whether it can do a workload at all.
    normalised : bool
        It computes cosines: a score of unnormalised vectors is not comparable.
    always : bool
        Takes part without being named.
    """

    name: str
    package: str
    dtypes: tuple[str, ...]
    prepare: Callable[[Inputs, int], Scores]
    activate: Callable[[], None] | None = None
    takes: Callable[[Workload, Inputs], bool] = lambda workload, inputs: True
    normalised: bool = False
    always: bool = True


def version(package: str) -> str | None:
    """Installed version of a package, None where it cannot be imported."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return getattr(importlib.import_module(package), "__version__", "unknown")


# ------------------------------------------------------------------------------------------------------ ours


def pack_ours(row: str, inputs: Inputs) -> tuple[nk.PackedTensor, nk.PackedTensor]:
    """Both sides packed by a row."""
    return nk.pack(inputs.queries, backend=row), nk.pack(inputs.tokens, offsets=inputs.offsets, backend=row)


def _ours(row: str, inputs: Inputs, threads: int) -> Scores:
    queries, documents = pack_ours(row, inputs)
    return partial(nk.maxsim_packed, queries, documents, threads=threads)


def top_ours(row: str, k: int, inputs: Inputs, threads: int) -> Scores:
    """The best k of every query: a call that returns scores and indices."""
    queries, documents = pack_ours(row, inputs)
    return partial(nk.topk, queries, documents, k, threads=threads)


def our_rows(dtype: str) -> list[str]:
    """Available CPU rows with a dtype, best first."""
    return [row.name for row in nk.backends() if row.device == "cpu" and row.available and dtype in row.dtypes]


def _takes_ours(row: str, workload: Workload, inputs: Inputs) -> bool:
    return row != "serial" or inputs.operations <= LONGEST_ROW


# ----------------------------------------------------------------------------------------------------- numpy


def _numpy_loop(inputs: Inputs, threads: int) -> Scores:
    """A matrix product and its row maxima, document by document."""
    documents = inputs.documents

    def call() -> np.ndarray:
        return np.array([[(query @ tokens.T).max(axis=1).sum() for tokens in documents] for query in inputs.queries])

    return call


def _numpy_reduceat(inputs: Inputs, threads: int) -> Scores:
    """One matrix product over all tokens, then maxima by document."""
    starts = inputs.offsets[:-1]

    def call() -> np.ndarray:
        return np.array(
            [np.maximum.reduceat(query @ inputs.tokens.T, starts, axis=1).sum(0) for query in inputs.queries]
        )

    return call


# ------------------------------------------------------------------------------------------------------- jax


def _jax_arrays(inputs: Inputs) -> tuple[Any, Any, Any]:
    import jax

    documents, valid = inputs.padded()
    queries = np.stack(inputs.queries)
    return tuple(jax.device_put(x, jax.devices("cpu")[0]) for x in (queries, documents, valid))


def _jax_call(of_document: Callable, outer: str, inputs: Inputs) -> Scores:
    import jax

    queries, documents, valid = _jax_arrays(inputs)
    over = {"map": lambda f, xs: jax.lax.map(f, xs), "vmap": lambda f, xs: jax.vmap(f)(xs)}[outer]
    compiled = jax.jit(lambda q, d, v: over(lambda one: of_document(q, *one), (d, v)).T)
    return lambda: np.asarray(compiled(queries, documents, valid))


def _jax(outer: str, inputs: Inputs, threads: int) -> Scores:
    """Similarities in float32, padding masked, for one document at a time or for all at once."""
    import jax.numpy as jnp

    def of_document(queries: Any, document: Any, valid: Any) -> Any:
        similarity = jnp.einsum("qid,jd->qij", queries, document, preferred_element_type=jnp.float32)
        return jnp.where(valid, similarity, -jnp.inf).max(-1).sum(-1)

    return _jax_call(of_document, outer, inputs)


# ----------------------------------------------------------------------------------------------------- torch


def _tensor(array: np.ndarray) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _torch_einsum(compiled: bool, inputs: Inputs, threads: int) -> Scores:
    """The usual three lines: einsum over padded documents, maximum, sum; similarities in the inputs' dtype."""
    import torch

    torch.set_num_threads(threads)
    documents, valid = inputs.padded()
    padding = None if valid.all() else ~_tensor(valid)
    queries, documents = _tensor(np.stack(inputs.queries)), _tensor(documents)

    def score(queries: Any, documents: Any) -> Any:
        similarity = torch.einsum("qid,bjd->qbij", queries, documents)
        if padding is not None:
            similarity = similarity.masked_fill(padding[None, :, None, :], float("-inf"))
        return similarity.amax(-1).sum(-1, dtype=torch.float32)

    score = torch.compile(score) if compiled else score

    def call() -> np.ndarray:
        with torch.inference_mode():
            return score(queries, documents).numpy()

    return call


def _torch_mm(inputs: Inputs, threads: int) -> Scores:
    """One matrix product over all tokens, then maxima by document."""
    import torch

    torch.set_num_threads(threads)
    queries, tokens = [_tensor(query) for query in inputs.queries], _tensor(inputs.tokens)
    lengths = torch.from_numpy(np.diff(inputs.offsets))
    same = int(lengths[0]) if (lengths == lengths[0]).all() else 0

    def maxima(similarity: Any) -> Any:
        if same:
            return similarity.view(len(similarity), -1, same).amax(-1)
        return torch.stack([part.amax(-1) for part in similarity.split(lengths.tolist(), dim=1)], dim=1)

    def call() -> np.ndarray:
        with torch.inference_mode():
            return torch.stack([maxima(query @ tokens.T).sum(0, dtype=torch.float32) for query in queries]).numpy()

    return call


# -------------------------------------------------------------------------------------------------- packages

# Kernel families of NumKong 7 with MaxSim for a part of the types; for others they fall back to portable code.
NUMKONG_FAMILY_DTYPES = {"genoa": ("bf16",), "icelake": ("f32", "f16")}


def _numkong_activate(only: str | None) -> None:
    """Let NumKong use everything again, or one kernel family and the portable one."""
    import numkong

    for name, available in _numkong_available().items():
        if available and name != "serial":
            (numkong.enable_capability if only in (None, name) else numkong.disable_capability)(name)


def _numkong_available(found: dict[str, bool] = {}) -> dict[str, bool]:  # noqa: B006, the mask as it was at first
    import numkong

    if not found:
        found.update(numkong.get_capabilities())
    return found


def _numkong(only: str | None, inputs: Inputs, threads: int) -> Scores:
    """Packed once; a call per pair; documents split over threads by the caller. Its angular distance, turned."""
    import numkong

    _numkong_activate(only)
    queries, documents = ([numkong.maxsim_pack(x) for x in side] for side in (inputs.queries, inputs.documents))
    cuts = np.linspace(0, len(documents), threads + 1).astype(int)
    pieces = [documents[begin:end] for begin, end in pairwise(cuts)]
    packed, count = numkong.maxsim_packed, len(inputs.queries[0])
    pool = ThreadPoolExecutor(threads)

    def piece(documents: list) -> list:
        return [[packed(query, document) for document in documents] for query in queries]

    def call() -> np.ndarray:
        parts = map(piece, pieces) if threads == 1 else pool.map(piece, pieces)
        return count - np.concatenate([np.asarray(part) for part in parts], axis=1)

    return call


def numkong_families() -> Iterator[str]:
    """Kernel families of the installed NumKong that this machine has and that a row of ours answers to."""
    if version("numkong") is None:
        return
    rows = {row.name for row in nk.backends() if row.device == "cpu"} - {"serial"}
    yield from (name for name, available in _numkong_available().items() if available and name in rows)


def _maxsim_cpu(package: str, inputs: Inputs, threads: int) -> Scores:
    module = importlib.import_module(package)
    lengths = np.diff(inputs.offsets)
    if (lengths == lengths[0]).all():
        documents = inputs.tokens.reshape(len(lengths), lengths[0], -1)
        return lambda: np.stack([module.maxsim_scores(query, documents) for query in inputs.queries])
    documents = [np.ascontiguousarray(tokens) for tokens in inputs.documents]
    return lambda: np.stack([module.maxsim_scores_variable(query, documents) for query in inputs.queries])


# Elements of a query past which maxsim-cpu 0.1.0 gives wrong results or crashes.
LIBXSMM_REACH = 4096


def _takes_maxsim_cpu(workload: Workload, inputs: Inputs) -> bool:
    return inputs.queries[0].size <= LIBXSMM_REACH


# ------------------------------------------------------------------------------------------------- the list


def contenders() -> list[Contender]:
    """Everyone who can take part here, ours first."""
    everything = ("f32", "bf16", "f16")
    ours = [
        Contender(
            f"{OURS}:{row.name}", OURS, row.dtypes, partial(_ours, row.name), takes=partial(_takes_ours, row.name)
        )
        for row in nk.backends()
        if row.device == "cpu" and row.available
    ]
    peers = [
        Contender("numpy loop", "numpy", ("f32",), _numpy_loop),
        Contender("numpy reduceat", "numpy", ("f32",), _numpy_reduceat),
        Contender("jax map", "jax", everything, partial(_jax, "map")),
        Contender("jax vmap", "jax", everything, partial(_jax, "vmap")),
        Contender("torch einsum", "torch", everything, partial(_torch_einsum, False)),
        Contender("torch mm", "torch", everything, _torch_mm),
        Contender("torch.compile", "torch", everything, partial(_torch_einsum, True), always=False),
        Contender(
            "numkong", "numkong", everything, partial(_numkong, None), partial(_numkong_activate, None), normalised=True
        ),
        *(
            Contender(
                f"numkong:{family}",
                "numkong",
                NUMKONG_FAMILY_DTYPES.get(family, everything),
                partial(_numkong, family),
                partial(_numkong_activate, family),
                normalised=True,
                always=False,
            )
            for family in numkong_families()
        ),
        Contender("maxsim-cpu", "maxsim_cpu", ("f32",), partial(_maxsim_cpu, "maxsim_cpu"), takes=_takes_maxsim_cpu),
        Contender("fast-maxsim", "fast_maxsim", ("f32",), partial(_maxsim_cpu, "fast_maxsim"), takes=_takes_maxsim_cpu),
    ]
    return ours + [peer for peer in peers if version(peer.package) is not None]


def fits(contender: Contender, workload: Workload, inputs: Inputs, dtype: str) -> bool:
    """Whether a contender can do a workload in a dtype with comparable scores."""
    if dtype not in contender.dtypes or (contender.normalised and workload.data in UNNORMALISED):
        return False
    return contender.takes(workload, inputs)
