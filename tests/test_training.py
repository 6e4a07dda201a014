"""Convergence on real text: 200 steps through the fused path lose nothing against float64 gradients."""

from __future__ import annotations

import numpy as np
import pytest
import training
from oracle import assert_same_bits

import numkong_py as nk
from numkong_py import reference

STEPS = 200
DRIFT = 1e-5  # of the loss: 0.001 %


@pytest.fixture(scope="module")
def fused() -> training.Run:
    return training.train(training.through(np.asarray, np.asarray), STEPS)


@pytest.fixture(scope="module")
def exact() -> training.Run:
    return training.train(training.through_float64, STEPS)


def test_loss_curves_agree(fused: training.Run, exact: training.Run) -> None:
    drift = np.abs(fused.losses - exact.losses).max() / exact.losses.mean()
    assert drift < DRIFT
    assert np.linalg.norm(fused.weights - exact.weights) < DRIFT * np.linalg.norm(exact.weights)


def test_it_learns(fused: training.Run) -> None:
    assert fused.losses[-20:].mean() < 0.5 * fused.losses[:20].mean()


def test_a_run_repeats_to_the_bit_on_any_number_of_threads(fused: training.Run) -> None:
    again = training.train(training.through(np.asarray, np.asarray, threads=5), 20)
    assert_same_bits(again.losses, fused.losses[:20], "losses")


def test_the_float64_path_is_the_reference() -> None:
    rng = np.random.default_rng(1)
    queries, documents = ([rng.standard_normal((n, 6)) for n in counts] for counts in ((4, 4), (4, 1, 9)))

    def loss(scores: np.ndarray) -> tuple[float, np.ndarray]:
        np.testing.assert_allclose(scores, reference.maxsim(queries, documents, **training.OPTIONS), rtol=1e-13)
        return 0.0, scores

    _, *found = training.through_float64(queries, documents, loss)
    scores = reference.maxsim(queries, documents, **training.OPTIONS)
    for actual, wanted in zip(found, reference.maxsim_grad(queries, documents, scores, **training.OPTIONS)):
        np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-15)


def test_loss_falls_along_the_gradient_of_nk_maxsim() -> None:
    """The whole chain, by a central difference in float64 of the reference."""
    rng = np.random.default_rng(2)
    query, document = (rng.standard_normal((n, 5)).astype(np.float32) for n in (3, 7))
    gradient, _ = nk.maxsim_grad(query, [document], 1.0, metric="cosine")
    for i, k in ((0, 0), (1, 3), (2, 4)):
        step = np.zeros_like(query, np.float64)
        step[i, k] = 1e-5
        up, down = (
            reference.maxsim(query + sign * step, [document.astype(np.float64)], metric="cosine")[0] for sign in (1, -1)
        )
        np.testing.assert_allclose(gradient[i, k], (up - down) / 2e-5, rtol=1e-4, atol=1e-6)
