"""A small training run on real text, with the scores and gradients of any backend: what the convergence tests compare.

A linear projection of the demo corpus's token vectors is trained by inverse cloze: a stretch of a passage must find the
rest of it among the other passages of the batch. Weights, loss and optimiser are float64 and the same for everybody;
only scores and gradients come from the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import numkong_py as nk
from numkong_py import demo, reference

BATCH, QUERY_TOKENS, DEPTH = 8, 4, 24
TEMPERATURE, LEARNING_RATE, MOMENTUM = 0.05, 0.1, 0.9
OPTIONS = {"metric": "cosine", "reduction": "mean"}

Sets = list[np.ndarray]
Loss = Callable[[np.ndarray], tuple[float, np.ndarray]]
# Float64 query and document tokens and the loss go in; the loss's value and the gradients by all query tokens and by
# all document tokens, [tokens, depth] in host memory, come out.
Backend = Callable[[Sets, Sets, Loss], tuple[float, np.ndarray, np.ndarray]]


class Run(NamedTuple):
    """Loss before every step, and the weights after the last one."""

    losses: np.ndarray
    weights: np.ndarray


def in_batch_loss(scores: np.ndarray) -> tuple[float, np.ndarray]:
    """Cross-entropy of every query's own document among all of the batch, and its derivative by the scores."""
    logits = np.asarray(scores, np.float64) / TEMPERATURE
    logits -= logits.max(axis=1, keepdims=True)
    likelihood = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    own = np.arange(len(scores))
    upstream = likelihood.copy()
    upstream[own, own] -= 1.0
    return float(-np.log(likelihood[own, own]).mean()), upstream / (TEMPERATURE * len(scores))


def through(asarray: Callable[[np.ndarray], Any], to_host: Callable[[Any], np.ndarray], **options: Any) -> Backend:
    """The fused path: `nk.maxsim` and `nk.maxsim_grad` on float32 arrays of a library."""

    def backend(queries: Sets, documents: Sets, loss: Loss) -> tuple[float, np.ndarray, np.ndarray]:
        sides = [[asarray(tokens.astype(np.float32)) for tokens in sets] for sets in (queries, documents)]
        forward = nk.maxsim(*sides, return_argmax=True, **OPTIONS)
        value, upstream = loss(to_host(forward.scores))
        gradients = nk.maxsim_grad(*sides, upstream, argmax=forward.argmax, **options, **OPTIONS)
        return value, to_host(gradients[0]), to_host(gradients[1])

    return backend


def through_float64(queries: Sets, documents: Sets, loss: Loss) -> tuple[float, np.ndarray, np.ndarray]:
    """Similarities of all tokens in float64, and the reference's gradients."""
    q, d = reference.sets(queries), reference.sets(documents)
    units = [sets.tokens / np.linalg.norm(sets.tokens, axis=1, keepdims=True) for sets in (q, d)]
    cosines = units[0] @ units[1].T
    argmax = np.stack([part.argmax(axis=1) for part in np.split(cosines, d.offsets[1:-1], axis=1)], axis=1)
    best = np.stack([part.max(axis=1) for part in np.split(cosines, d.offsets[1:-1], axis=1)], axis=1)
    scores = np.stack([part.mean(axis=0) for part in np.split(best, q.offsets[1:-1])])
    winners = np.stack([part.T for part in np.split(argmax, q.offsets[1:-1])])
    value, upstream = loss(scores)
    return value, *reference.maxsim_grad(q, d, upstream, argmax=winners, **OPTIONS)


def _batch(rng: np.random.Generator, vectors: Sets) -> tuple[Sets, Sets]:
    """Stretches of passages, and what is left of the passages."""
    queries, documents = [], []
    for index in rng.choice(len(vectors), BATCH, replace=False):
        tokens = vectors[index].astype(np.float64)
        start = int(rng.integers(0, len(tokens) - QUERY_TOKENS))
        queries.append(tokens[start : start + QUERY_TOKENS])
        documents.append(np.delete(tokens, np.s_[start : start + QUERY_TOKENS], axis=0))
    return queries, documents


def train(backend: Backend, steps: int = 200, seed: int = 0) -> Run:
    """Train the projection by stochastic gradient descent with momentum, from the same start on the same batches."""
    vectors = [tokens for tokens in demo.load().vectors if len(tokens) > 2 * QUERY_TOKENS]
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((vectors[0].shape[1], DEPTH)) / np.sqrt(DEPTH)
    velocity = np.zeros_like(weights)
    losses = np.empty(steps)
    for step in range(steps):
        queries, documents = _batch(rng, vectors)
        projected = [[tokens @ weights for tokens in sets] for sets in (queries, documents)]
        losses[step], by_queries, by_documents = backend(*projected, in_batch_loss)
        slope = np.concatenate(queries).T @ by_queries + np.concatenate(documents).T @ by_documents
        velocity = MOMENTUM * velocity - LEARNING_RATE * slope
        weights = weights + velocity
    return Run(losses, weights)
