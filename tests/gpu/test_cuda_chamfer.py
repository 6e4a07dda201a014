"""The Chamfer distance on a device against float64, near and far from the origin, and its gradient."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import numkong_py as nk
from numkong_py import reference

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
WHY_NOT = next((row.reason for row in nk.backends() if row.name == "sm80"), "no CUDA row")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no CUDA device: {WHY_NOT}")

NUMPY = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
SIZES = [(70, 300), (1, 1), (1025, 33), (0, 5), (5, 0), (0, 0), (500, 2100), (32, 32)]


def clouds(sizes: list[int], depth: int, dtype: str, seed: int, offset: float = 0.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((n, depth)) + offset).astype(NUMPY[dtype]) for n in sizes]


def device(x: list[np.ndarray], dtype: str) -> Any:
    return nk.arrays.collection(
        [cupy.asarray(one.view(np.uint16) if dtype == "bf16" else one) for one in x], dtype=dtype
    )


def f32_neighbours(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The kernel's choice: f32 squared distances by multiply-adds in ascending order."""
    p, q = p.astype(np.float32), q.astype(np.float32)
    total = np.zeros((len(p), len(q)), np.float32)
    for k in range(p.shape[1]):
        difference = (p[:, None, k] - q[None, :, k]).astype(np.float64)
        total = (difference * difference + total).astype(np.float32)
    return np.argmin(total, 1) if len(q) else np.full(len(p), -1)


@pytest.mark.parametrize("dtype", list(NUMPY))
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 70])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_ragged_batches(dtype: str, depth: int, offset: float) -> None:
    p, q = (
        clouds([a for a, _ in SIZES], depth, dtype, 1, offset),
        clouds([b for _, b in SIZES], depth, dtype, 2, offset),
    )
    on_p, on_q = device(p, dtype), device(q, dtype)
    choice = np.concatenate([f32_neighbours(a, b) for a, b in zip(p, q)])
    for squared, reduction, both in ((True, "mean", True), (False, "sum", True), (True, "sum", False)):
        options = {"squared": squared, "reduction": reduction, "both": both}
        found = nk.chamfer(on_p, on_q, return_nearest=True, **options)
        wanted = reference.chamfer(p, q, **options)
        np.testing.assert_allclose(found.distances.get(), wanted, rtol=2 * (depth + 3) * 2.0**-24, atol=1e-30)
        np.testing.assert_array_equal(found.nearest_of_p.get(), choice)
        assert (found.nearest_of_q is None) == (not both)


@pytest.mark.parametrize("dtype", list(NUMPY))
@pytest.mark.parametrize("depth", [3, 20])
def test_gradients(dtype: str, depth: int) -> None:
    p, q = clouds([a for a, _ in SIZES], depth, dtype, 3), clouds([b for _, b in SIZES], depth, dtype, 4)
    on_p, on_q = device(p, dtype), device(q, dtype)
    upstream = np.random.default_rng(5).standard_normal(len(p))
    upstream[0] = 0
    for squared, reduction, both in ((True, "mean", True), (False, "sum", True), (True, "sum", False)):
        options = {"squared": squared, "reduction": reduction, "both": both}
        wanted = reference.chamfer_grad(p, q, upstream, **options)
        forward = nk.chamfer(on_p, on_q, return_nearest=True, **options)
        first = nk.chamfer_grad(on_p, on_q, upstream, **options)
        again = nk.chamfer_grad(on_p, on_q, upstream, nearest=(forward.nearest_of_p, forward.nearest_of_q), **options)
        for one, other, exact in zip(first, again, wanted):
            assert (one == other).all()
            assert np.linalg.norm(one.get() - exact) <= 1e-5 * np.linalg.norm(exact)
            assert one.dtype == np.float32


def test_far_from_the_origin_nothing_is_lost() -> None:
    """The same clouds around (1024, 1024, 1024), where f32 still holds them exactly: the same bits."""
    rng = np.random.default_rng(6)
    p, q = (rng.integers(-4096, 4096, (n, 3)) / np.float32(4096) for n in (5000, 4000))
    p, q = p.astype(np.float32), q.astype(np.float32)
    near = nk.chamfer(cupy.asarray(p), cupy.asarray(q), return_nearest=True)
    far = nk.chamfer(cupy.asarray(p + np.float32(1024)), cupy.asarray(q + np.float32(1024)), return_nearest=True)
    for one, other in zip(near, far):
        assert (one == other).all()
    near, far = (nk.chamfer_grad(cupy.asarray(p + np.float32(o)), cupy.asarray(q + np.float32(o))) for o in (0, 1024))
    for one, other in zip(near, far):
        assert (one == other).all()


def test_ties_duplicates_and_clusters() -> None:
    rng = np.random.default_rng(7)
    p = rng.integers(0, 4, (3000, 3)).astype(np.float32)
    q = np.concatenate([rng.integers(0, 4, (2000, 3)), np.full((1500, 3), 2)]).astype(np.float32)
    q[::9] += 1e6
    found = nk.chamfer(cupy.asarray(p), cupy.asarray(q), return_nearest=True)
    np.testing.assert_array_equal(found.nearest_of_p.get(), f32_neighbours(p, q))
    np.testing.assert_array_equal(found.nearest_of_q.get(), f32_neighbours(q, p))
    wanted = reference.chamfer_grad(p[:500], q[:400])
    for one, exact in zip(nk.chamfer_grad(cupy.asarray(p[:500]), cupy.asarray(q[:400])), wanted):
        assert np.linalg.norm(one.get() - exact) <= 1e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("depth", [3, 8])
def test_nan_and_infinity(depth: int) -> None:
    p, q = clouds([100, 100, 100], depth, "f32", 8), clouds([400, 400, 400], depth, "f32", 9)
    q[0][300, 1] = q[0][290, 0] = np.nan
    q[1][17, 0] = np.inf
    p[1][5, 0] = np.inf
    found = nk.chamfer(device(p, "f32"), device(q, "f32"), both=False, return_nearest=True)
    nearest = found.nearest_of_p.get().reshape(3, 100)
    assert (nearest[0] == 290).all()
    assert nearest[1][5] == 17 and (nearest[1][np.arange(100) != 5] != 17).all()
    assert np.isnan(found.distances.get()[:2]).all() and np.isfinite(found.distances.get()[2])


@pytest.mark.parametrize("depth", [3, 16])
def test_bits_repeat(depth: int) -> None:
    p, q = clouds([20000], depth, "f32", 10)[0], clouds([15000], depth, "f32", 11)[0]
    p, q = cupy.asarray(p), cupy.asarray(q)
    first = nk.chamfer(p, q), *nk.chamfer_grad(p, q)
    for _ in range(19):
        again = nk.chamfer(p, q), *nk.chamfer_grad(p, q)
        assert all((one == other).all() for one, other in zip(first, again))
    alone = nk.chamfer(device([p.get()[:999], p.get()], "f32"), device([q.get()[:999], q.get()], "f32"))
    assert alone[1] == first[0]
