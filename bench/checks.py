"""Right or wrong, before anything is timed: ours to the bit, the peers' errors against what rounding can explain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from workloads import Inputs

import numkong_py as nk

SAMPLE_PRODUCTS = 30_000_000  # that the reference evaluates
HALF_UNITS = {"f32": 2.0**-24, "bf16": 2.0**-9, "f16": 2.0**-12}


@dataclass(frozen=True)
class Truth:
    """Scores to hold contenders against.

    Attributes
    ----------
    scores : array
        ``[queries, documents]``, from float64 matrix products: within 1e-12 of exact in units of `scale`.
    scale : array
        ``[queries, 1]``, the sum of the query tokens' norms times the longest document token: what errors grow with.
    sample : array
        Documents that the reference scored.
    reference : array
        ``[queries, sampled]``, to the bit what every row of ours must return.
    dtype : str
    depth : int
    """

    scores: np.ndarray
    scale: np.ndarray
    sample: np.ndarray
    reference: np.ndarray
    dtype: str
    sums: int


def _matrix_scores(query: np.ndarray, inputs: Inputs, norms: list[float]) -> np.ndarray:
    """Float64 scores of one query, some documents at a time; notes the longest token."""
    scores = np.empty(len(inputs.offsets) - 1)
    at_once = max(1, 50_000 // max(1, int(np.diff(inputs.offsets).max())))
    for first in range(0, len(scores), at_once):
        offsets = inputs.offsets[first : first + at_once + 1]
        tokens = inputs.tokens[offsets[0] : offsets[-1]].astype(np.float64)
        norms.append(float(np.sqrt((tokens * tokens).sum(axis=1).max())))
        best = np.maximum.reduceat(query @ tokens.T, offsets[:-1] - offsets[0], axis=1)
        scores[first : first + at_once] = best.sum(axis=0)
    return scores


def truth(inputs: Inputs, dtype: str) -> Truth:
    """Score a workload in float64, all of it by matrix products and a sample by the reference."""
    norms: list[float] = []
    queries = [query.astype(np.float64) for query in inputs.queries]
    scores = np.stack([_matrix_scores(query, inputs, norms) for query in queries])
    scale = np.array([[np.linalg.norm(query, axis=1).sum() * max(norms)] for query in queries])
    documents = len(inputs.offsets) - 1
    count = int(np.clip(2 * SAMPLE_PRODUCTS * documents // inputs.operations, 1, documents))
    sample = np.sort(np.random.default_rng(1).choice(documents, min(count, 200), replace=False))
    parts = [inputs.tokens[inputs.offsets[b] : inputs.offsets[b + 1]] for b in sample]
    reference = nk.reference.maxsim(inputs.queries, parts)
    sums = inputs.tokens.shape[1] + len(inputs.queries[0])
    return Truth(scores, scale, sample, reference, dtype, sums)


@dataclass(frozen=True)
class Verdict:
    """How right a contender is.

    Attributes
    ----------
    verdict : str
        ``"exact"``: the reference's bits. ``"float32"``: within what float32 sums can be off. ``"16-bit"``: within what
        similarities rounded to the inputs' dtype can be off. ``"wrong"``: neither.
    error : float
        Largest error of a score over its query's scale.
    top10 : float
        Part of the true ten best documents that are among its ten best, for the worst query.
    """

    verdict: str
    error: float
    top10: float


def _top(scores: np.ndarray, k: int) -> set[int]:
    return set(np.argsort(-scores, kind="stable")[:k].tolist())


def judge(scores: np.ndarray, expected: Truth) -> Verdict:
    """Classify scores; a float32 sum of so many numbers is off by at most that many half units of `scale`."""
    scores = np.asarray(scores, np.float64)
    error = float(np.max(np.abs(scores - expected.scores) / expected.scale))
    rounding = expected.sums * HALF_UNITS["f32"]
    same = np.array_equal(scores[:, expected.sample], np.asarray(expected.reference, np.float64))
    output = 1e-12 if expected.dtype == "f32" else HALF_UNITS["f32"]
    if same and error <= 2 * output:
        verdict = "exact"
    elif error <= rounding:
        verdict = "float32"
    elif error <= rounding + HALF_UNITS[expected.dtype]:
        verdict = "16-bit"
    else:
        verdict = "wrong"
    k = min(10, scores.shape[1])
    overlap = min(len(_top(a, k) & _top(b, k)) / k for a, b in zip(scores, expected.scores))
    return Verdict(verdict, error, overlap)
