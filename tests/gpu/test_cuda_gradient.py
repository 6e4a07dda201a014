"""Gradients of MaxSim on a device against the float64 reference: layouts, types, metrics and rules of the contract."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import training

import numkong_py as nk
from numkong_py import reference

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
WHY_NOT = next((row.reason for row in nk.backends() if row.name == "sm80"), "no CUDA row")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=f"no CUDA device: {WHY_NOT}")

NUMPY = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
RAGGED = [0, 1, 63, 64, 65, 5, 130, 300, 0, 17]
DTYPES = list(NUMPY)


def make(lengths: list[int], depth: int, dtype: str, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((n, depth)) / depth**0.5).astype(NUMPY[dtype]) for n in lengths]


def upload(x: np.ndarray) -> Any:
    return cupy.asarray(x.view(np.uint16) if x.dtype == NUMPY["bf16"] else x)


def device(x: Any, dtype: str, **extras: Any) -> nk.arrays.Collection:
    """A collection of device arrays from a host array or a list of them."""
    on_device = [upload(one) for one in x] if isinstance(x, list) else upload(x)
    return nk.arrays.collection(on_device, dtype=dtype, **extras)


def host(x: Any, dtype: str) -> np.ndarray:
    x = x.get()
    return (x.view(NUMPY["bf16"]) if x.dtype == np.uint16 else x).astype(np.float64)


def winners(queries: list[np.ndarray], documents: list[np.ndarray], index: np.ndarray, seed: int) -> np.ndarray:
    """Winners drawn at random, so that a comparison does not hang on near ties; -1 where there is nothing."""
    rng = np.random.default_rng(seed)
    longest = max(map(len, queries))
    found = np.full((*index.shape, longest), -1, np.int32)
    for (i, k), b in np.ndenumerate(index):
        if 0 <= b < len(documents) and len(documents[b]):
            found[i, k, : len(queries[i])] = rng.integers(0, len(documents[b]), len(queries[i]))
    return found


def assert_close(found: Any, wanted: np.ndarray, dtype: str, limit: float = 1e-5) -> None:
    found = host(found, dtype)
    assert found.shape == wanted.shape
    assert np.isfinite(found).all()
    scale = np.linalg.norm(wanted)
    assert np.linalg.norm(found - wanted) <= limit * scale
    rows = np.linalg.norm(wanted.reshape(-1, wanted.shape[-1]), axis=1)
    errors = np.linalg.norm((found - wanted).reshape(-1, wanted.shape[-1]), axis=1)
    assert (errors <= 20 * limit * (rows + scale / max(len(rows), 1) ** 0.5)).all()
    assert (found.reshape(-1, wanted.shape[-1])[rows == 0] == 0).all()


@pytest.mark.parametrize("metric, reduction", [("dot", "sum"), ("cosine", "mean"), ("angular", "sum"), ("dot", "mean")])
@pytest.mark.parametrize(
    "dtype, depth",
    [("bf16", 128), ("f16", 128), ("f32", 128), ("bf16", 40), ("f16", 33), ("f32", 33), ("bf16", 300), ("f32", 260)],
)
def test_all_pairs_ragged(dtype: str, depth: int, metric: str, reduction: str) -> None:
    queries, documents = make([32, 5, 0, 70], depth, dtype, 1), make(RAGGED, depth, dtype, 2)
    index = np.tile(np.arange(len(documents)), (len(queries), 1))
    upstream = np.random.default_rng(3).standard_normal(index.shape)
    upstream[1, 3] = 0
    argmax = winners(queries, documents, index, 4)
    options = {"metric": metric, "reduction": reduction, "argmax": argmax}
    wanted = reference.maxsim_grad(queries, documents, upstream, **options)
    found = nk.maxsim_grad(device(queries, dtype), device(documents, dtype), upstream, **options)
    for one, exact in zip(found, wanted):
        assert_close(one, exact, dtype)
    rounded = nk.maxsim_grad(device(queries, dtype), device(documents, dtype), upstream, **options, grad_dtype=dtype)
    for one, full in zip(rounded, found):
        np.testing.assert_array_equal(host(one, dtype), full.get().astype(NUMPY[dtype]).astype(np.float64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("metric", ["dot", "cosine"])
def test_without_winners_runs_the_forward(dtype: str, metric: str) -> None:
    """With tokens on few directions all arithmetic agrees on the winners, ties among them: the lowest gets it all."""
    rng = np.random.default_rng(5)
    basis = np.eye(64)[:9].astype(NUMPY[dtype])
    queries, documents = (
        [basis[rng.integers(0, 9, 40)] for _ in range(3)],
        [basis[rng.integers(0, 9, n)] for n in (90, 7)],
    )
    upstream = rng.standard_normal((3, 2))
    wanted = reference.maxsim_grad(queries, documents, upstream, metric=metric)
    for one, exact in zip(
        nk.maxsim_grad(device(queries, dtype), device(documents, dtype), upstream, metric=metric), wanted
    ):
        assert_close(one, exact, dtype)


@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("count, slots, longest", [(3, 200, 32), (70, 40, 32), (40, 9, 300), (1, 1100, 20)])
def test_many_sources(count: int, slots: int, longest: int, metric: str) -> None:
    """Slices of the sum over slots, batches of sources, and tokens that won hundreds of them."""
    queries, documents = make([longest] * count, 128, "bf16", 6), make([150] * slots, 128, "bf16", 7)
    index = np.tile(np.arange(slots), (count, 1))
    argmax = winners(queries, documents, index, 8)
    argmax[:, 1], argmax[:, 2, ::2], argmax[::3, 3] = 149, 64, -1
    upstream = np.random.default_rng(9).standard_normal(index.shape)
    wanted = _chunked_reference(queries, documents, upstream, argmax, metric)
    q, d = device(np.stack(queries), "bf16"), device(np.stack(documents), "bf16")
    found = nk.maxsim_grad(q, d, upstream, argmax=argmax, metric=metric)
    assert_close(found[0].reshape(-1, 128), wanted[0], "bf16")
    assert_close(found[1].reshape(-1, 128), wanted[1], "bf16")
    for _ in range(19):
        for one, first in zip(nk.maxsim_grad(q, d, upstream, argmax=argmax, metric=metric), found):
            assert (one == first).all()


def _chunked_reference(
    queries: list[np.ndarray], documents: list[np.ndarray], upstream: np.ndarray, argmax: np.ndarray, metric: str
) -> tuple[np.ndarray, np.ndarray]:
    """What the reference does, for winners of -1 too, in whole arrays."""
    q, d = np.stack(queries).astype(np.float64), np.stack(documents).astype(np.float64)
    unit_q, unit_d = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, d))
    by_q, by_d = np.zeros_like(q), np.zeros_like(d)
    for b in range(len(d)):
        weight = upstream[:, b, None] * (argmax[:, b] >= 0)
        taken = np.maximum(argmax[:, b], 0)
        rows, others = (unit_d[b][taken], unit_q) if metric == "cosine" else (d[b][taken], q)
        if metric == "cosine":
            cosines = (rows * others).sum(-1, keepdims=True)
            to_query = (rows - cosines * others) / np.linalg.norm(q, axis=-1, keepdims=True)
            to_document = (others - cosines * rows) / np.linalg.norm(d[b], axis=-1)[taken][..., None]
        else:
            to_query, to_document = rows, others
        by_q += weight[..., None] * to_query
        np.add.at(by_d[b], taken, weight[..., None] * to_document)
    return by_q.reshape(-1, q.shape[-1]), by_d.reshape(-1, d.shape[-1])


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("metric", ["dot", "cosine"])
def test_pairs_and_candidates(dtype: str, metric: str) -> None:
    queries, documents = make([20, 5, 0, 33], 128, dtype, 10), make([64, 0, 7, 300], 128, dtype, 11)
    rng = np.random.default_rng(12)
    q, d = device(queries, dtype), device(documents, dtype)
    chosen = rng.integers(-1, 5, (4, 9))
    inside = np.where(chosen < 4, chosen, -1)
    argmax, upstream = winners(queries, documents, inside, 13), rng.standard_normal((4, 9))
    wanted = reference.maxsim_grad(queries, documents, upstream, argmax=argmax, candidates=inside, metric=metric)
    found = nk.maxsim_candidates_grad(q, d, cupy.asarray(chosen), upstream, argmax=argmax, metric=metric)
    for one, exact in zip(found, wanted):
        assert_close(one, exact, dtype)
    index = np.arange(4)[:, None]
    argmax = winners(queries, documents, index, 14)
    wanted = reference.maxsim_grad(queries, documents, upstream[:, 0], argmax=argmax, pairs=True, metric=metric)
    found = nk.maxsim_pairs_grad(q, d, upstream[:, 0], argmax=argmax[:, 0], metric=metric)
    for one, exact in zip(found, wanted):
        assert_close(one, exact, dtype)


@pytest.mark.parametrize("dtype, depth", [("bf16", 128), ("f32", 40)])
def test_padded_layouts_and_masks_with_holes(dtype: str, depth: int) -> None:
    rng = np.random.default_rng(15)
    queries, documents = np.stack(make([20] * 3, depth, dtype, 16)), np.stack(make([50] * 6, depth, dtype, 17))
    mask = rng.random((6, 50)) < 0.6
    mask[2] = mask[4, :7] = mask[5, 40:] = False
    query_mask = rng.random((3, 20)) < 0.7
    query_mask[1] = False
    ragged = [one[m] for one, m in zip(queries, query_mask)], [one[m] for one, m in zip(documents, mask)]
    index = np.tile(np.arange(6), (3, 1))
    argmax, upstream = winners(*ragged, index, 18), rng.standard_normal((3, 6))
    flat = nk.maxsim_grad(device(ragged[0], dtype), device(ragged[1], dtype), upstream, argmax=argmax)
    junk = queries.copy(), documents.copy()
    junk[0][~query_mask] = junk[1][~mask] = np.nan
    found = nk.maxsim_grad(
        device(junk[0], dtype, mask=query_mask), device(junk[1], dtype, mask=mask), upstream, argmax=argmax
    )
    for one, rows, valid, given in zip(found, flat, (query_mask, mask), junk):
        assert one.shape == given.shape
        np.testing.assert_array_equal(one.get()[valid], rows.get())
        assert (one.get()[~valid].view(np.uint32) == 0).all()
    lengths = np.array([50, 0, 7, 33, 1, 50])
    prefixes = [one[:n] for one, n in zip(documents, lengths)]
    argmax = winners(list(queries), prefixes, index, 19)
    flat = nk.maxsim_grad(device(queries, dtype), device(prefixes, dtype), upstream, argmax=argmax)
    found = nk.maxsim_grad(device(queries, dtype), device(documents, dtype, lengths=lengths), upstream, argmax=argmax)
    valid = np.arange(50) < lengths[:, None]
    np.testing.assert_array_equal(found[1].get()[valid], flat[1].get())
    assert (found[1].get()[~valid].view(np.uint32) == 0).all()
    query = device(queries[0], dtype)
    single = nk.maxsim_grad(query, device(prefixes, dtype), upstream[0], argmax=argmax[0])
    assert single[0].shape == (20, depth)


def test_bits_do_not_depend_on_neighbours_or_order() -> None:
    queries, documents = make([32] * 60, 128, "bf16", 20), make([200, 150, 300] * 3, 128, "bf16", 21)
    index = np.tile(np.arange(9), (60, 1))
    argmax, upstream = winners(queries, documents, index, 22), np.random.default_rng(23).standard_normal((60, 9))
    argmax[:, 4] = 77
    whole = nk.maxsim_grad(device(queries, "bf16"), device(documents, "bf16"), upstream, argmax=argmax)
    begins = np.concatenate([[0], np.cumsum([len(one) for one in documents])])
    order = np.random.default_rng(24).permutation(9)
    shuffled = nk.maxsim_grad(
        device(queries, "bf16"),
        device([documents[b] for b in order], "bf16"),
        upstream[:, order],
        argmax=argmax[:, order],
    )[1]
    at = 0
    for b in order:
        size = len(documents[b])
        assert (shuffled[at : at + size] == whole[1][begins[b] : begins[b + 1]]).all()
        at += size
        alone = nk.maxsim_grad(
            device(queries, "bf16"), device([documents[b]], "bf16"), upstream[:, [b]], argmax=argmax[:, [b]]
        )
        assert (alone[1] == whole[1][begins[b] : begins[b + 1]]).all()
    for first in (0, 17, 59):
        some = nk.maxsim_grad(
            device(queries[first : first + 3], "bf16"), device(documents, "bf16"), upstream[first : first + 3],
            argmax=argmax[first : first + 3],
        )[0]  # fmt: skip
        assert (some == whole[0][32 * first : 32 * first + len(some)]).all()


def test_upstream_of_every_kind() -> None:
    queries, documents = make([32] * 3, 128, "f16", 25), make(RAGGED, 128, "f16", 26)
    q, d = device(queries, "f16"), device(documents, "f16")
    index = np.tile(np.arange(len(documents)), (3, 1))
    argmax = winners(queries, documents, index, 27)
    row = np.random.default_rng(28).standard_normal(len(documents)).astype(np.float32)
    for upstream in (
        2.5,
        row,
        row[None],
        np.float64(row),
        cupy.asarray(row),
        cupy.asarray(row).astype(np.float16),
        [[1.0], [0.0], [2.0]],
    ):
        given = upstream.get() if hasattr(upstream, "get") else upstream
        wanted = reference.maxsim_grad(queries, documents, given, argmax=argmax)
        for one, exact in zip(nk.maxsim_grad(q, d, upstream, argmax=argmax), wanted):
            assert_close(one, exact, "f16")
    only = nk.maxsim_grad(q, d, row, argmax=argmax, need="documents")
    assert only[0] is None and (only[1] == nk.maxsim_grad(q, d, row, argmax=argmax)[1]).all()


def test_nothing_spreads_from_tokens_that_weigh_nothing() -> None:
    queries, documents = make([4, 4], 64, "f32", 29), make([6, 5, 3], 64, "f32", 30)
    queries[0][1], documents[1][2] = np.nan, np.inf
    argmax = np.zeros((2, 3, 4), np.int32)
    upstream = np.array([[0.0, 0.0, 0.0], [1.0, 0.0, -1.0]])
    for metric in ("dot", "cosine"):
        found = nk.maxsim_grad(device(queries, "f32"), device(documents, "f32"), upstream, argmax=argmax, metric=metric)
        wanted = reference.maxsim_grad(queries, documents, upstream, argmax=argmax, metric=metric)
        for one, exact in zip(found, wanted):
            assert_close(one, exact, "f32")
    argmax[1, 0, 0] = 99  # no such token: nothing
    assert np.isfinite(
        nk.maxsim_grad(device(queries, "f32"), device(documents, "f32"), upstream, argmax=argmax)[0].get()
    ).all()
    for q, d in ((make([0, 0], 64, "f32", 1), documents), (queries, make([0, 0], 64, "f32", 1))):
        for one in nk.maxsim_grad(device(q, "f32"), device(d, "f32"), 1.0):
            assert (one.get() == 0).all()


def test_packed_slices_and_capture() -> None:
    queries, documents = make([32] * 3, 128, "f16", 31), make(RAGGED, 128, "f16", 32)
    packed = nk.pack(device(documents, "f16"))
    index = np.tile(np.arange(4), (3, 1))
    argmax = cupy.asarray(winners(queries, documents[4:8], index, 33))
    upstream = cupy.asarray(np.random.default_rng(34).standard_normal((3, 4)).astype(np.float32))
    q = nk.pack(device(queries, "f16"))
    wanted = nk.maxsim_grad(q, device(documents[4:8], "f16"), upstream, argmax=argmax)
    for one, exact in zip(nk.maxsim_grad(q, packed[4:8], upstream, argmax=argmax), wanted):
        assert (one == exact).all()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        nk.maxsim_grad(q, packed[4:8], upstream, argmax=argmax)
        stream.synchronize()
        stream.begin_capture()
        captured = nk.maxsim_grad(q, packed[4:8], upstream, argmax=argmax)
        graph = stream.end_capture()
        for one in captured:
            one.fill(7)
        graph.launch(stream)
        stream.synchronize()
    for one, exact in zip(captured, wanted):
        assert (one == exact).all()


def test_training_loses_nothing_against_float64_gradients() -> None:
    """200 steps on real text, as on the host: the loss drifts by less than 0.001 %."""
    fused = training.train(training.through(cupy.asarray, cupy.asnumpy))
    exact = training.train(training.through_float64)
    drift = np.abs(fused.losses - exact.losses).max() / exact.losses.mean()
    print(f"loss drift {drift:.1e}")
    assert drift < 1e-5
    assert fused.losses[-20:].mean() < 0.5 * fused.losses[:20].mean()
