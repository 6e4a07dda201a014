"""Train a projection of the demo's token vectors with optax, through the fused MaxSim and through float64 definitions.

A stretch of a passage must find the rest of it among the passages of its batch (inverse cloze, in-batch negatives).
Weights are float64 in both runs; the fused one scores float32 tokens. It needs ``pip install "numkong-py[jax]" optax``,
and prints both loss curves and how far they drift apart.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from numkong_py import demo
from numkong_py import jax as nkx

BATCH, QUERY_TOKENS, DEPTH, TEMPERATURE, LEARNING_RATE = 8, 4, 24, 0.05, 0.01

jax.config.update("jax_enable_x64", True)


class Batch(NamedTuple):
    """Queries ``[BATCH, QUERY_TOKENS, depth]``; padded documents ``[BATCH, longest, depth]`` and their lengths."""

    queries: Any
    documents: Any
    lengths: Any


def make_batches(steps: int, seed: int = 0) -> Batch:
    """All batches of a run, the steps in front: `jax.lax.scan` goes through them."""
    passages = [tokens for tokens in demo.load().vectors if len(tokens) > 2 * QUERY_TOKENS]
    longest = max(len(tokens) for tokens in passages) - QUERY_TOKENS
    rng = np.random.default_rng(seed)
    depth = passages[0].shape[1]
    queries = np.zeros((steps, BATCH, QUERY_TOKENS, depth), np.float32)
    documents = np.zeros((steps, BATCH, longest, depth), np.float32)
    lengths = np.zeros((steps, BATCH), np.int32)
    for step in range(steps):
        for row, index in enumerate(rng.choice(len(passages), BATCH, replace=False)):
            tokens = passages[index]
            start = int(rng.integers(0, len(tokens) - QUERY_TOKENS))
            rest = np.delete(tokens, np.s_[start : start + QUERY_TOKENS], axis=0)
            queries[step, row] = tokens[start : start + QUERY_TOKENS]
            documents[step, row, : len(rest)] = rest
            lengths[step, row] = len(rest)
    return Batch(queries, documents, lengths)


def fused(queries: Any, documents: Any, lengths: Any) -> Any:
    """Scores of float32 tokens: the similarities are never stored, in either direction."""
    narrow = queries.astype(jnp.float32), documents.astype(jnp.float32)
    return nkx.maxsim(*narrow, docs_lengths=lengths, metric="cosine", reduction="mean")


def exact(queries: Any, documents: Any, lengths: Any) -> Any:
    """The same by definition, in float64: all similarities at once."""
    squares = [jnp.sum(x * x, -1, keepdims=True) for x in (queries, documents)]
    units = [x / jnp.sqrt(jnp.where(s == 0, 1, s)) for x, s in zip((queries, documents), squares)]  # padding is zero
    cosines = jnp.einsum("qid,bjd->qbij", *units)
    valid = jnp.arange(documents.shape[1]) < lengths[:, None]
    return jnp.where(valid[None, :, None], cosines, -jnp.inf).max(-1).mean(-1)


def loss(weights: Any, batch: Batch, score: Callable[..., Any]) -> Any:
    """Cross-entropy of every query's own document among all of the batch."""
    wide = batch.queries.astype(jnp.float64), batch.documents.astype(jnp.float64)
    scores = score(*(tokens @ weights for tokens in wide), batch.lengths)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores.astype(jnp.float64) / TEMPERATURE)))


def train(score: Callable[..., Any], steps: int) -> np.ndarray:
    """Loss before every step of Adam."""
    batches = make_batches(steps)
    optimiser = optax.adam(LEARNING_RATE)
    depth = batches.queries.shape[-1]
    weights = np.random.default_rng(1).standard_normal((depth, DEPTH)) / np.sqrt(DEPTH)

    def step(state: Any, batch: Batch) -> tuple[Any, Any]:
        weights, moments = state
        value, slope = jax.value_and_grad(partial(loss, score=score))(weights, batch)
        updates, moments = optimiser.update(slope, moments)
        return (optax.apply_updates(weights, updates), moments), value

    start = jnp.asarray(weights), optimiser.init(jnp.asarray(weights))
    return np.asarray(jax.jit(partial(jax.lax.scan, step))(start, batches)[1])


def main() -> None:
    """Print both curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    curves = train(fused, steps), train(exact, steps)
    for step in range(0, steps, max(1, steps // 10)):
        print(f"step {step:4}  fused {curves[0][step]:.9f}  float64 {curves[1][step]:.9f}")
    print(f"last tenth {curves[0][-(steps // 10) :].mean():.4f}, first tenth {curves[0][: steps // 10].mean():.4f}")
    print(f"drift {np.abs(curves[0] - curves[1]).max() / curves[1].mean():.2e} of the mean loss")


if __name__ == "__main__":
    main()
