"""The JAX primitives against the reference: every layout and type, gradients, batching, packed corpora, errors.

They run where JAX is installed; `test_jax_versions.py` runs them with the oldest and the newest one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import DTYPES, METRICS, ROOT, bits, lay_out, tokens

jax = pytest.importorskip("jax", reason="JAX is not installed; test_jax_versions.py brings it")
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

import numkong_py as nk  # noqa: E402
from numkong_py import jax as nkx  # noqa: E402
from numkong_py import reference  # noqa: E402
from numkong_py.cpu import xla_calls  # noqa: E402

DEPTH = 20
QUERY_LENGTHS = (5, 0, 7, 1)
DOCUMENT_LENGTHS = (9, 3, 0, 14, 1, 6)
LAYOUTS = ("one", "list", "offsets", "lengths", "mask", "packed", "pairs", "candidates")
CANDIDATES = np.int32([[0, 3, -1], [5, 5, 1], [2, 4, 3], [3, 0, 2]])
TOLERANCE = {"f32": 2.0**-22, "f16": 2.0**-10, "bf16": 2.0**-7}  # a gradient is rounded to its type; sums add one bit


@pytest.fixture
def x64() -> Any:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def sets(lengths: Any, dtype: str, seed: int) -> list[np.ndarray]:
    return [tokens("random", dtype, count, DEPTH, seed + at) for at, count in enumerate(lengths)]


def laid(parts: list[np.ndarray], layout: str, prefix: str) -> tuple[Any, dict[str, Any], reference.Sets]:
    """An argument, its keywords with a prefix, and its token sets."""
    if layout == "packed":
        return nkx.packed(nk.pack(parts)), {}, reference.sets(parts)
    found = lay_out(parts, layout, seed=3)
    keywords = {f"{prefix}_{name}": value for name, value in found.keywords.items()}
    return found.x, keywords, reference.sets(found.x, **found.keywords)


def call(layout: str, dtype: str) -> tuple[Any, Any, Any, Any, Any, dict[str, Any]]:
    """Function of both sides, its operands, the reference's, and how the reference differentiates it."""
    counts = QUERY_LENGTHS if layout != "one" else (6,)
    documents = DOCUMENT_LENGTHS[: len(counts)] if layout == "pairs" else DOCUMENT_LENGTHS
    plain = {"pairs": "lengths", "candidates": "mask", "one": "one", "packed": "lengths"}.get(layout, layout)
    q, q_keywords, queries = laid(sets(counts, dtype, 1), plain, "q")
    docs_layout = {"one": "lengths"}.get(plain, plain) if layout != "packed" else "packed"
    docs, d_keywords, stored = laid(sets(documents, dtype, 50), docs_layout, "docs")
    keywords = {**q_keywords, **d_keywords}
    if layout == "pairs":
        return lambda q, d, **o: nkx.maxsim_pairs(q, d, **keywords, **o), q, docs, queries, stored, {"pairs": True}
    if layout == "candidates":
        extra = {"candidates": CANDIDATES}
        return (
            lambda q, d, **o: nkx.maxsim_candidates(q, d, CANDIDATES, **keywords, **o),
            q,
            docs,
            queries,
            stored,
            extra,
        )
    return lambda q, d, **o: nkx.maxsim(q, d, **keywords, **o), q, docs, queries, stored, {}


def expected(queries: Any, documents: Any, extra: dict[str, Any], **options: Any) -> Any:
    if "pairs" in extra:
        return reference.maxsim_pairs(queries, documents, **options)
    if "candidates" in extra:
        return reference.maxsim_candidates(queries, documents, extra["candidates"], **options)
    return reference.maxsim(queries, documents, **options)


# ------------------------------------------------------------------------------------------------ scores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_the_reference_rounded_once(layout: str, dtype: str) -> None:
    function, q, docs, queries, documents, extra = call(layout, dtype)
    for metric in METRICS:
        options = {"metric": metric, "reduction": "mean" if metric == "cosine" else "sum"}
        found = jax.jit(lambda q, d, options=options: function(q, d, **options))(q, docs)
        wanted = expected(queries, documents, extra, **options).astype(np.float32)
        assert np.array_equal(bits(np.asarray(found)), bits(wanted)), (layout, dtype, metric)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_f32_scores_are_f64_bits_with_x64(layout: str, x64: None) -> None:
    function, q, docs, queries, documents, extra = call(layout, "f32")
    wanted = expected(queries, documents, extra)
    assert np.array_equal(bits(np.asarray(jax.jit(function)(q, docs))), bits(wanted))


@pytest.mark.parametrize("layout", ["lengths", "mask", "pairs", "candidates", "offsets"])
def test_argmax_token_scores_and_bounds(layout: str, x64: None) -> None:
    function, q, docs, queries, documents, extra = call(layout, "f32")
    asked = {"return_argmax": True, "return_token_scores": True, "return_bounds": True, "metric": "cosine"}
    found, wanted = function(q, docs, **asked), expected(queries, documents, extra, **asked)
    longest = wanted.argmax.shape[-1]
    assert np.array_equal(np.asarray(found.argmax)[..., :longest], wanted.argmax)
    assert (np.asarray(found.argmax)[..., longest:] == -1).all()
    assert np.array_equal(np.asarray(found.token_scores)[..., :longest], wanted.token_scores)
    assert np.array_equal(np.asarray(found.scores), wanted.scores)
    assert (np.asarray(found.bounds) >= 0).all() and (np.asarray(found.bounds) <= 1e-11).all()


def test_bounds_hold_after_rounding_to_f32() -> None:
    q, docs = sets((8, 3), "f32", 1), sets(DOCUMENT_LENGTHS, "f32", 9)
    found, exact = nkx.maxsim(q, docs, return_bounds=True), reference.maxsim(q, docs)
    finite = np.isfinite(exact)
    errors = np.abs(np.asarray(found.scores, np.float64) - exact)[finite]
    assert (errors <= np.asarray(found.bounds)[finite]).all() and errors.max() > 0


def test_nan_and_empty_keep_their_precedence() -> None:
    q = np.stack([np.full((2, 4), np.nan), np.ones((2, 4))]).astype(np.float32)
    docs = np.ones((3, 2, 4), np.float32)
    docs[2, 1, 0] = np.nan
    scores = np.asarray(nkx.maxsim(q, docs, q_lengths=np.int32([2, 2]), docs_lengths=np.int32([2, 0, 2])))
    assert np.isnan(scores[0, [0, 2]]).all() and scores[0, 1] == -np.inf
    assert scores[1, 0] == 8 and scores[1, 1] == -np.inf and np.isnan(scores[1, 2])
    assert nkx.maxsim(q[1], docs, docs_lengths=np.int32([0, 0, 0]), empty=7.0).tolist() == [7, 7, 7]
    assert nkx.maxsim(q[0], docs, q_lengths=np.int32([0])).tolist() == [0, 0, 0]


# --------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("dtype, metric", [*(("f32", metric) for metric in METRICS), ("f16", "dot"), ("bf16", "dot")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_jitted_gradients_are_the_reference_rounded(layout: str, dtype: str, metric: str) -> None:
    function, q, docs, queries, documents, extra = call(layout, dtype)
    options = {"metric": metric, "reduction": "mean" if dtype == "f16" else "sum"}
    weights = np.random.default_rng(5).standard_normal(function(q, docs, **options).shape).astype(np.float32)

    def loss(q: Any, docs: Any) -> Any:
        scores = function(q, docs, **options)
        return jnp.sum(jnp.where(jnp.isfinite(scores), scores * weights, 0))

    scores = expected(queries, documents, extra, **options)
    upstream = np.where(np.isfinite(scores), weights, 0)
    wanted = reference.maxsim_grad(queries, documents, upstream, **options, **extra)
    sides = (0,) if layout == "packed" else (0, 1)
    found = jax.jit(jax.grad(loss, sides))(q, docs)
    for gradient, exact in zip(found, wanted):
        gradient = np.concatenate(gradient) if isinstance(gradient, list) else np.asarray(gradient)
        error = np.abs(gradient.astype(np.float64) - exact)
        assert gradient.shape == exact.shape and gradient.dtype == DTYPES[dtype]
        limit = TOLERANCE[dtype] * np.abs(exact) + 2.0**-40 + (2.0**-24 if dtype == "f16" else 0)
        assert (error <= limit).all(), (layout, dtype, error.max())
        assert (gradient[exact == 0] == 0).all()


def test_gradients_repeat_to_the_bit_and_masked_tokens_get_plus_zero() -> None:
    function, q, docs, *_ = call("mask", "bf16")
    gradient = jax.jit(jax.grad(lambda q, d: jnp.where(jnp.isfinite(s := function(q, d)), s, 0).sum(), (0, 1)))
    first, second = gradient(q, docs), gradient(q, docs)
    assert all(np.array_equal(a.view(jnp.uint16), b.view(jnp.uint16)) for a, b in zip(first, second))
    assert not any(np.signbit(np.asarray(a, np.float32)[np.asarray(a) == 0]).any() for a in first)


def definition(q: Any, docs: Any) -> Any:
    """Float64 MaxSim in plain JAX: what the primitive differentiates."""
    return jnp.einsum("nid,bjd->nbij", q, docs).max(-1).sum(-1)


def test_check_grads_on_the_float64_definition_and_on_the_primitive(x64: None) -> None:
    rng = np.random.default_rng(2)
    q, docs = rng.standard_normal((2, 3, 5)), rng.standard_normal((3, 4, 5))
    check_grads(definition, (q, docs), order=1, modes=["rev"])
    q, docs = q.astype(np.float32), docs.astype(np.float32)
    weights = rng.standard_normal((2, 3))
    wanted = jax.grad(lambda q, d: (definition(q, d) * weights).sum(), (0, 1))(
        q.astype(np.float64), docs.astype(np.float64)
    )
    found = jax.grad(lambda q, d: (nkx.maxsim(q, d) * weights).sum(), (0, 1))(q, docs)
    for gradient, exact in zip(found, wanted):
        assert np.abs(gradient - exact).max() <= 2.0**-22 * np.abs(exact).max()
    for metric in ("dot", "cosine"):
        function = partial(nkx.maxsim, metric=metric)
        check_grads(function, (q, docs), order=1, modes=["rev", "fwd"], eps=2**-8, rtol=3e-3)


def test_outputs_without_a_derivative_refuse_one() -> None:
    q, docs = jnp.ones((2, 4)), jnp.ones((3, 2, 4))
    with pytest.raises(nk.InvalidArgument, match="return_token_scores and return_bounds"):
        jax.grad(lambda q: nkx.maxsim(q, docs, return_bounds=True).scores.sum())(q)
    found = jax.value_and_grad(
        lambda q: ((r := nkx.maxsim(q, docs, return_argmax=True)).scores.sum(), r.argmax), has_aux=True
    )(q)
    assert found[0][1].shape == (3, 2) and found[1].shape == q.shape


# ---------------------------------------------------------------------------------------------- batching


def calls_of(function: Any, *operands: Any) -> tuple[Any, int]:
    """What a compiled function returns, and how many handler calls that took."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*operands))
    before = xla_calls()[0]
    result = jax.block_until_ready(compiled(*operands))
    return result, xla_calls()[0] - before


@pytest.mark.parametrize("q_axis, docs_axis", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_vmap_is_one_call_with_the_bits_of_a_loop(q_axis: int | None, docs_axis: int | None) -> None:
    rng = np.random.default_rng(8)
    q = rng.standard_normal((4, 4, 5, 8)[0 if q_axis is not None else 1 :]).astype(np.float32)
    docs = rng.standard_normal((4, 6, 4, 8) if docs_axis == 2 else (4, 6, 7, 8)).astype(np.float32)
    if docs_axis is None:
        docs = docs[0]
    found, calls = calls_of(jax.vmap(nkx.maxsim, (q_axis, docs_axis)), q, docs)
    assert calls == 1
    for index, part in enumerate(found):
        one = q if q_axis is None else np.take(q, index, q_axis)
        many = docs if docs_axis is None else np.take(docs, index, docs_axis)
        assert np.array_equal(part, nkx.maxsim(one, many))


def test_nested_vmap_over_different_axes_with_masks_and_candidates_is_one_call() -> None:
    rng = np.random.default_rng(9)
    q, docs = rng.standard_normal((3, 2, 5, 8)).astype(np.float32), rng.standard_normal((4, 6, 7, 8)).astype(np.float32)
    mask, lengths = rng.random((3, 2, 5)) < 0.7, rng.integers(0, 8, (4, 6)).astype(np.int32)

    def one(q: Any, mask: Any, docs: Any, lengths: Any) -> Any:
        return nkx.maxsim(q, docs, mask, docs_lengths=lengths)

    found, calls = calls_of(jax.vmap(jax.vmap(one, (None, None, 0, 0)), (0, 0, None, None)), q, mask, docs, lengths)
    assert calls == 1 and found.shape == (3, 4, 2, 6)
    for i in range(3):
        for j in range(4):
            assert np.array_equal(found[i, j], one(q[i], mask[i], docs[j], lengths[j]))

    lists = rng.integers(-1, 6, (4, 2, 3)).astype(np.int32)
    found, calls = calls_of(jax.vmap(nkx.maxsim_candidates, (None, 0, 0)), q[0], docs, lists)
    assert calls == 1
    assert all(np.array_equal(found[j], nkx.maxsim_candidates(q[0], docs[j], lists[j])) for j in range(4))


def test_the_gradient_of_shared_documents_is_summed_in_one_call() -> None:
    rng = np.random.default_rng(10)
    q, docs = rng.standard_normal((6, 5, 8)).astype(np.float32), rng.standard_normal((4, 7, 8)).astype(np.float32)
    found, calls = calls_of(jax.grad(lambda d: jax.vmap(nkx.maxsim, (0, None))(q, d).sum()), docs)
    assert calls == 2  # forward and backward
    assert np.array_equal(found, jax.grad(lambda d: nkx.maxsim(q, d).sum())(docs))
    text = jax.jit(jax.grad(lambda d: jax.vmap(nkx.maxsim, (0, None))(q, d).sum())).lower(docs).as_text()
    assert "6x4x7x8" not in text, "a gradient for every query was written"


def test_per_example_gradients_and_jacobians() -> None:
    rng = np.random.default_rng(11)
    q, docs = rng.standard_normal((3, 5, 8)).astype(np.float32), rng.standard_normal((4, 7, 8)).astype(np.float32)

    def loss(q: Any, docs: Any) -> Any:
        return (nkx.maxsim(q, docs) ** 2).sum()

    found, calls = calls_of(jax.vmap(jax.grad(loss, (0, 1)), (0, None)), q, docs)
    assert calls == 3
    for index in range(3):
        for part, wanted in zip(found, jax.grad(loss, (0, 1))(q[index], docs)):
            assert np.allclose(part[index], wanted, rtol=2e-6, atol=1e-6)
    rows = jax.jacrev(lambda q: nkx.maxsim(q, docs))(q[0])
    columns = jax.jacfwd(lambda q: nkx.maxsim(q, docs))(q[0])
    assert rows.shape == (4, 5, 8) and np.allclose(rows, columns, rtol=1e-5, atol=1e-5)


def test_scan_checkpoint_and_value_and_grad_compose() -> None:
    rng = np.random.default_rng(12)
    q, docs = rng.standard_normal((3, 5, 8)).astype(np.float32), rng.standard_normal((4, 7, 8)).astype(np.float32)

    def scanned(docs: Any) -> Any:
        step = jax.checkpoint(lambda total, q: (total + nkx.maxsim(q, docs).sum(), None))
        return jax.lax.scan(step, jnp.float32(0), q)[0]

    value, gradient = jax.jit(jax.value_and_grad(scanned))(docs)
    wanted, exact = jax.value_and_grad(lambda d: nkx.maxsim(q, d).sum())(docs)
    assert np.allclose(value, wanted) and np.allclose(gradient, exact, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------------------- packed corpora


def test_a_packed_corpus_is_a_pytree_and_keeps_its_bits() -> None:
    parts = sets(DOCUMENT_LENGTHS, "f32", 4)
    tensor, q = nk.pack(parts), sets((5, 3), "f32", 1)
    corpus = nkx.packed(tensor)
    leaves, tree = jax.tree.flatten(corpus)
    assert len(leaves) == 1 and leaves[0].dtype == jnp.uint8 and hash(tree) == hash(jax.tree.structure(corpus))
    wanted = np.float32(nk.maxsim(q, tensor))
    assert np.array_equal(jax.jit(nkx.maxsim)(q, corpus), wanted)
    assert np.array_equal(jax.jit(nkx.maxsim)(q, tensor), wanted)  # a PackedTensor is a pytree too
    assert np.array_equal(jax.jit(lambda q: nkx.maxsim(q, corpus))(q), wanted)
    assert np.array_equal(nkx.maxsim(q, tensor[1:4]), wanted[:, 1:4])
    assert np.array_equal(
        nkx.maxsim_candidates(q, tensor[1:], [[0, -1], [4, 2]]),
        nk.maxsim_candidates(q, tensor[1:], [[0, -1], [4, 2]]).astype(np.float32),
    )
    assert np.array_equal(nkx.maxsim(nkx.packed(nk.pack(q)), corpus), wanted)
    with pytest.raises(nk.InvalidArgument, match="in_axes=None"):
        jax.vmap(lambda b: nkx.maxsim(q, nkx.Packed(b, corpus.facts, False)))(jnp.stack([corpus.buffer] * 2))


def test_a_damaged_packed_buffer_is_refused() -> None:
    corpus = nkx.packed(nk.pack(sets((4, 2), "f32", 4)))
    for buffer in (corpus.buffer.at[40].add(1), corpus.buffer[:-1]):
        with pytest.raises(Exception, match="pack_mismatch"):
            jax.block_until_ready(nkx.maxsim(sets((3,), "f32", 1), nkx.Packed(buffer, corpus.facts, False)))


def test_buffers_are_not_copied() -> None:
    tensor = nk.pack(sets((40, 30), "f32", 4))
    assert nkx.packed(tensor).buffer.unsafe_buffer_pointer() == tensor.buffer.ctypes.data
    q = jnp.asarray(np.ones((2, 8, DEPTH), np.float32))
    jax.block_until_ready(jax.jit(nkx.maxsim)(q, jnp.ones((3, 4, DEPTH))))
    assert xla_calls()[1] == q.unsafe_buffer_pointer()


def test_coded_packings_are_refused() -> None:
    coded, q = nk.pack(sets((4, 2), "f32", 4), precision="int8"), jnp.asarray(sets((5,), "f32", 1)[0])
    for call in (nkx.packed, lambda docs: nkx.maxsim(q, docs), lambda docs: nk.maxsim(q, docs)):
        with pytest.raises(nk.InvalidArgument, match="precision 'int8', and JAX scores exact packings"):
            call(coded)


# ----------------------------------------------------------------------------------------------- threads


def test_calls_cut_into_pieces_and_made_at_once_keep_their_bits() -> None:
    """Enough work for helpers on XLA's pool, in every shape of pieces, from several threads."""
    rng = np.random.default_rng(14)
    q = rng.standard_normal((24, 32, 64)).astype(np.float32)
    docs = rng.standard_normal((96, 90, 64)).astype(np.float32)  # 2.2 MB: several blocks
    lists = rng.integers(-1, 96, (24, 40)).astype(np.int32)
    lists[4:9] = lists[3]
    tensor = nk.pack(docs)
    work = {
        "all": (lambda: nkx.maxsim(q, docs), nk.maxsim(q, docs)),
        "few documents": (lambda: nkx.maxsim(q, docs[:2]), nk.maxsim(q, docs[:2])),
        "packed": (lambda: nkx.maxsim(q, tensor), nk.maxsim(q, tensor)),
        "pairs": (lambda: nkx.maxsim_pairs(docs, docs), nk.maxsim_pairs(docs, docs)),
        "lists": (lambda: nkx.maxsim_candidates(q, docs, lists), nk.maxsim_candidates(q, docs, lists)),
        "one list": (lambda: nkx.maxsim_candidates(q[0], docs, lists[0]), nk.maxsim_candidates(q[0], docs, lists[0])),
        "packed lists": (lambda: nkx.maxsim_candidates(q, tensor, lists), nk.maxsim_candidates(q, docs, lists)),
    }
    with ThreadPoolExecutor(4) as pool:
        futures = {name: [pool.submit(run) for _ in range(3)] for name, (run, _) in work.items()}
        for name, found in futures.items():
            for one in found:
                assert np.array_equal(one.result(timeout=120), work[name][1].astype(np.float32)), name
    found = jax.grad(lambda q, d: nkx.maxsim(q, d).sum(), (0, 1))(q, docs)
    for gradient, exact in zip(found, nk.maxsim_grad(q, docs, 1.0)):
        assert np.array_equal(gradient, exact)


# ------------------------------------------------------------------------------------------------- top-k


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("k", [1, 4, 9])
def test_topk_is_the_facades(metric: str, k: int) -> None:
    parts = sets((4, 0, 3, 0, 5, 2, 4), "f32", 4)
    parts[5] = parts[0].copy()  # a tie
    parts[6][0, 0] = np.nan
    q = sets((5, 3), "f32", 1)
    scores, indices = jax.jit(lambda q: nkx.topk(q, parts, k, metric=metric))(q)
    wanted = nk.topk(q, parts, k, metric=metric)
    assert np.array_equal(indices, wanted[1]) and np.array_equal(
        bits(np.asarray(scores)), bits(wanted[0].astype(np.float32))
    )
    lists = np.int32([[5, 0, -1, 6], [3, 1, 2, 4]])
    scores, indices = nkx.topk(q, parts, k, candidates=lists, metric=metric)
    wanted = nk.topk(q, parts, k, candidates=lists, metric=metric)
    assert np.array_equal(indices, wanted[1]) and np.array_equal(
        bits(np.asarray(scores)), bits(wanted[0].astype(np.float32))
    )


# ----------------------------------------------------------------------------------------------- chamfer


@pytest.mark.parametrize("squared, reduction", [(True, "mean"), (False, "sum")])
def test_chamfer_and_its_gradient_far_from_the_origin(squared: bool, reduction: str) -> None:
    rng = np.random.default_rng(3)
    p, q = (rng.standard_normal((3, n, 3)).astype(np.float32) + 1000 for n in (20, 31))
    lengths, mask = np.int32([20, 5, 0]), rng.random((3, 31)) < 0.5
    clouds = reference.sets(p, lengths=lengths), reference.sets(q, mask=mask)
    options = {"reduction": reduction, "squared": squared}

    def function(p: Any, q: Any) -> Any:
        return nkx.chamfer(p, q, None, mask, p_lengths=lengths, **options)

    assert np.allclose(jax.jit(function)(p, q), reference.chamfer(*clouds, **options), rtol=1e-6)
    found = jax.jit(jax.grad(lambda p, q: function(p, q)[:2].sum(), (0, 1)))(p, q)
    for gradient, exact in zip(found, reference.chamfer_grad(*clouds, np.float64([1, 1, 0]), **options)):
        assert np.abs(gradient - exact).max() <= 1e-6 * max(1, np.abs(exact).max())
    batched, calls = calls_of(jax.vmap(lambda p: nkx.chamfer(p, q[0], **options)), p)
    assert calls == 2 and np.allclose(batched, reference.chamfer(list(p), [q[0]] * 3, **options), rtol=1e-6)
    assert np.allclose(
        nkx.chamfer(list(p), [q[0][:4], q[1], q[2]], **options),
        reference.chamfer(list(p), [q[0][:4], q[1], q[2]], **options),
        rtol=1e-6,
    )


# ---------------------------------------------------------------------------------------------- the facade


def test_the_facade_sends_jax_arrays_here() -> None:
    rng = np.random.default_rng(13)
    q, docs = rng.standard_normal((3, 5, 8)).astype(np.float32), rng.standard_normal((3, 7, 8)).astype(np.float32)
    traced, tensor = jnp.asarray(q), nk.pack(docs)
    for found in (
        nk.maxsim(traced, docs),
        nk.maxsim(q, jnp.asarray(docs)),
        nk.maxsim(traced, tensor),
        nk.maxsim(list(traced), tensor),
    ):
        assert isinstance(found, jax.Array) and np.array_equal(found, nk.maxsim(q, docs).astype(np.float32))
    assert np.array_equal(jax.jit(nk.maxsim_pairs)(traced, docs), nk.maxsim_pairs(q, docs).astype(np.float32))
    assert nk.maxsim_candidates(traced, tensor, np.int32([[1], [0], [-1]])).shape == (3, 1)
    assert np.array_equal(nk.topk(traced, tensor, 2)[1], nk.topk(q, docs, 2)[1])
    assert np.array_equal(nk.maxsim(q, nkx.packed(tensor)), nk.maxsim(q, docs).astype(np.float32))
    assert isinstance(nk.maxsim(q, docs), np.ndarray)
    with pytest.raises(nk.InvalidArgument, match="threads: is not for JAX arrays"):
        nk.maxsim(traced, docs, threads=2)


# ------------------------------------------------------------------------------------- errors and the ABI


def test_static_errors_are_ours_and_runtime_errors_carry_our_message() -> None:
    q, docs = jnp.ones((2, 5, 8)), jnp.ones((3, 4, 8))
    with pytest.raises(nk.ShapeMismatch, match="depth 8, and docs: depth 7"):
        nkx.maxsim(q, docs[..., :7])
    with pytest.raises(nk.UnsupportedDtype, match=r"dtype f32, and docs: dtype bf16"):
        nkx.maxsim(q, docs.astype(jnp.bfloat16))
    with pytest.raises(nk.UnsupportedDtype, match="float64"):
        nkx.maxsim(np.ones((2, 8)), docs)
    with pytest.raises(nk.ShapeMismatch, match=r"docs_mask: shape \(3, 5\)"):
        nkx.maxsim(q, docs, None, np.ones((3, 5), bool))
    with pytest.raises(nk.InvalidArgument, match="mask and lengths"):
        nkx.maxsim(q, docs, np.ones((2, 5), bool), q_lengths=np.int32([1, 2]))
    with pytest.raises(nk.InvalidArgument, match="metric: 'euclid'"):
        nkx.maxsim(q, docs, metric="euclid")
    for run, message in (
        (lambda: nkx.maxsim(q, docs, docs_lengths=np.int32([1, 5, 2])), "docs_lengths: 5 at entry 1, wanted 0 to 4"),
        (lambda: nkx.maxsim(q, docs[0], docs_offsets=jnp.int32([0, 3, 2])), "docs_offsets: from 3 to 2 at entry 1"),
        (lambda: nkx.maxsim_candidates(q, docs, np.int32([[0], [3]])), r"candidates\[1, 0\]: 3, wanted 0 to 2"),
    ):
        with pytest.raises(Exception, match=message):
            jax.block_until_ready(run())


def test_the_program_calls_us_and_nothing_on_the_python_side() -> None:
    def loss(q: Any, docs: Any) -> Any:
        return nkx.maxsim(q, docs).sum() + nkx.chamfer(q, docs[:2]).sum()

    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(jnp.ones((2, 5, 8)), jnp.ones((3, 4, 8)))
    text = lowered.as_text() + lowered.compile().as_text()
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(jnp.ones((2, 5, 8)), jnp.ones((3, 4, 8)))
    for program in (text, traced.lower(lowering_platforms=("cuda",)).as_text()):  # without a GPU
        assert "callback" not in program
        assert all(name in program for name in ("nk_xla_maxsim", "nk_xla_maxsim_gradient", "nk_xla_nearest"))


def test_the_declared_abi_is_that_of_the_installed_header(tmp_path: Path) -> None:
    header = (ROOT / "include" / "numkong" / "xla_ffi.h").read_text()
    theirs = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    known = theirs.read_text()
    source = ["#include <numkong/xla_ffi.h>", '#include "xla/ffi/api/c_api.h"', "#include <stddef.h>"]
    for ours, name, fields in ABI:
        body = re.search(rf"struct {ours} \{{(.*?)\}} {ours};", header, re.S)
        assert body, ours
        for mine, other in fields.items():
            source.append(f'_Static_assert(offsetof({ours}, {mine}) == offsetof({name}, {other}), "{ours}.{mine}");')
            source.append(
                f'_Static_assert(sizeof((({ours} *)0)->{mine}) == sizeof((({name} *)0)->{other}), "{ours}.{mine}");'
            )
    for ours, other in ENUMERATORS.items():
        if other in known:
            source.append(f'_Static_assert((int){ours} == (int){other}, "{ours}");')
    (tmp_path / "abi.c").write_text("\n".join(source) + "\n")
    flags = ["-std=c11", "-fsyntax-only", f"-I{ROOT / 'include'}", f"-I{jax.ffi.include_dir()}"]
    done = subprocess.run(["cc", *flags, str(tmp_path / "abi.c")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "abi.c").write_text("\n".join(source).replace("stage) ==", "stage) + 8 ==") + "\n")
    done = subprocess.run(["cc", *flags, str(tmp_path / "abi.c")], capture_output=True, text=True, check=False)
    assert done.returncode != 0, "a wrong offset was not noticed"


BASE = {"struct_size": "struct_size", "extension_start": "extension_start"}
ABI = (  # ours, XLA's, and the fields that we use
    (
        "nk_xla_version_t",
        "XLA_FFI_Api_Version",
        {**BASE, "major_version": "major_version", "minor_version": "minor_version"},
    ),
    (
        "nk_xla_metadata_t",
        "XLA_FFI_Metadata",
        {"struct_size": "struct_size", "api_version": "api_version", "traits": "traits"},
    ),
    ("nk_xla_buffer_t", "XLA_FFI_Buffer", {**BASE, **{name: name for name in ("dtype", "data", "rank", "dims")}}),
    ("nk_xla_scalar_t", "XLA_FFI_Scalar", {"dtype": "dtype", "value": "value"}),
    ("nk_xla_span_t", "XLA_FFI_ByteSpan", {"ptr": "ptr", "len": "len"}),
    ("nk_xla_buffers_t", "XLA_FFI_Args", {**BASE, "size": "size", "types": "types", "buffers": "args"}),
    ("nk_xla_buffers_t", "XLA_FFI_Rets", {**BASE, "size": "size", "types": "types", "buffers": "rets"}),
    (
        "nk_xla_attributes_t",
        "XLA_FFI_Attrs",
        {**BASE, "size": "size", "types": "types", "names": "names", "attributes": "attrs"},
    ),
    ("nk_xla_error_create_t", "XLA_FFI_Error_Create_Args", {**BASE, "message": "message", "code": "errc"}),
    ("nk_xla_error_destroy_t", "XLA_FFI_Error_Destroy_Args", {**BASE, "error": "error"}),
    (
        "nk_xla_schedule_t",
        "XLA_FFI_ThreadPool_Schedule_Args",
        {**BASE, "context": "ctx", "task": "task", "data": "data"},
    ),
    (
        "nk_xla_thread_count_t",
        "XLA_FFI_ThreadPool_NumThreads_Args",
        {**BASE, "context": "ctx", "threads": "num_threads"},
    ),
    ("nk_xla_stream_t", "XLA_FFI_Stream_Get_Args", {**BASE, "context": "ctx", "stream": "stream"}),
    (
        "nk_xla_api_t",
        "XLA_FFI_Api",
        {
            **BASE,
            "api_version": "api_version",
            "internal_api": "internal_api",
            "error_create": "XLA_FFI_Error_Create",
            "error_destroy": "XLA_FFI_Error_Destroy",
            "stream_get": "XLA_FFI_Stream_Get",
            "memory_free": "XLA_FFI_DeviceMemory_Free",
            "schedule": "XLA_FFI_ThreadPool_Schedule",
            "thread_count": "XLA_FFI_ThreadPool_NumThreads",
        },
    ),
    (
        "nk_xla_call_frame_t",
        "XLA_FFI_CallFrame",
        {
            **BASE,
            "api": "api",
            "context": "ctx",
            "stage": "stage",
            "arguments": "args",
            "results": "rets",
            "attributes": "attrs",
        },
    ),
)
ENUMERATORS = {
    "nk_xla_stage_execute_k": "XLA_FFI_ExecutionStage_EXECUTE",
    "nk_xla_invalid_argument_k": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "nk_xla_resource_exhausted_k": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "nk_xla_internal_k": "XLA_FFI_Error_Code_INTERNAL",
    **{
        f"nk_xla_{name}_k": f"XLA_FFI_DataType_{name.upper()}"
        for name in ("pred", "s32", "s64", "u8", "f16", "f32", "f64", "bf16")
    },
}


# ---------------------------------------------------------------------------------------------- training


def test_the_training_example_reaches_the_float64_curve() -> None:
    pytest.importorskip("optax", reason="the example trains with optax, which is not installed")
    script = ROOT / "docs" / "examples" / "train_jax.py"
    command = [sys.executable, str(script), "--steps", "60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    last, first = map(float, re.search(r"last tenth ([\d.]+), first tenth ([\d.]+)", done.stdout).groups())
    assert float(re.search(r"drift ([\d.e+-]+)", done.stdout)[1]) < 1e-5 and last < first, done.stdout


# ---------------------------------------------------------------------------------------------- sharding

SHARDED = Path(__file__).parent / "jax_sharding.py"


def test_eight_virtual_devices() -> None:
    done = subprocess.run(
        [sys.executable, str(SHARDED)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
