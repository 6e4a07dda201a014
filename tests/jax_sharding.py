"""What `test_jax.py` runs in a process of its own with eight virtual CPU devices: shardings are kept, bits too."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from numkong_py import jax as nkx

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("rows", "columns"))
RANDOM = np.random.default_rng(0)
QUERIES = RANDOM.standard_normal((8, 5, 16)).astype(np.float32)
DOCUMENTS = RANDOM.standard_normal((16, 7, 16)).astype(np.float32)
DOCUMENTS[11] = DOCUMENTS[3]  # a tie across devices
LENGTHS = RANDOM.integers(0, 8, 16).astype(np.int32)
MASK = RANDOM.random((8, 5)) < 0.7
LISTS = RANDOM.integers(-1, 16, (8, 3)).astype(np.int32)


def put(x: Any, *spec: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))


def compiled(function: Any, *operands: Any) -> tuple[Any, str]:
    """Result of a jitted function that XLA was free to split, and the program that it became."""
    program = jax.jit(function).lower(*operands).compile()
    return program(*operands), program.as_text()


def same(found: Any, wanted: Any) -> None:
    assert np.array_equal(np.asarray(found), np.asarray(wanted))


def spec_of(x: jax.Array) -> tuple[Any, ...]:
    spec = tuple(x.sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def test_jit_keeps_scores_where_their_sides_are() -> None:
    def scores(q: Any, d: Any, mask: Any, lengths: Any) -> Any:
        return nkx.maxsim(q, d, mask, docs_lengths=lengths)

    wanted = scores(QUERIES, DOCUMENTS, MASK, LENGTHS)
    for rows, columns in ((None, "columns"), ("rows", None), ("rows", "columns"), (("rows", "columns"), None)):
        operands = put(QUERIES, rows), put(DOCUMENTS, columns), put(MASK, rows), put(LENGTHS, columns)
        found, text = compiled(scores, *operands)
        same(found, wanted)
        assert spec_of(found) == (rows, columns) and "all-gather" not in text


def test_jit_splits_pairs_and_candidates() -> None:
    found, text = compiled(nkx.maxsim_pairs, put(QUERIES, "columns"), put(DOCUMENTS[:8], "columns"))
    same(found, nkx.maxsim_pairs(QUERIES, DOCUMENTS[:8]))
    assert spec_of(found) == ("columns",) and "all-gather" not in text
    found, text = compiled(nkx.maxsim_candidates, put(QUERIES, "rows"), put(DOCUMENTS), put(LISTS, "rows"))
    same(found, nkx.maxsim_candidates(QUERIES, DOCUMENTS, LISTS))
    assert spec_of(found) == ("rows", None) and "all-gather" not in text
    found, text = compiled(nkx.chamfer, put(QUERIES, "rows"), put(DOCUMENTS[:8], "rows"))
    assert np.allclose(found, nkx.chamfer(QUERIES, DOCUMENTS[:8])) and "all-gather" not in text


def test_jit_refuses_to_gather() -> None:
    for function, operands in (
        (nkx.maxsim_candidates, (put(QUERIES, "rows"), put(DOCUMENTS, "columns"), put(LISTS, "rows"))),
        (nkx.maxsim, (put(QUERIES, None, None, "rows"), put(DOCUMENTS, "columns"))),
        (nkx.maxsim, (put(QUERIES, ("rows", "columns")), put(DOCUMENTS, "columns"))),
        (
            lambda q, d: nkx.maxsim(q, d, docs_offsets=jnp.int32([0, 3, 112])),
            (put(QUERIES), put(DOCUMENTS.reshape(-1, 16), "columns")),
        ),
    ):
        try:
            compiled(function, *operands)
        except Exception as error:
            assert "gathered silently" in str(error), error
        else:
            raise AssertionError("a sharded operand was gathered")


def loss(q: Any, docs: Any) -> Any:
    return (nkx.maxsim(q, docs, metric="cosine") ** 2).sum()


def test_gradients_of_a_split_call() -> None:
    wanted = jax.grad(loss, (0, 1))(QUERIES, DOCUMENTS)
    found, text = compiled(jax.grad(loss, (0, 1)), put(QUERIES, "rows"), put(DOCUMENTS, "columns"))
    assert "all-gather" not in text and "all-reduce" in text
    for gradient, exact, axis in zip(found, wanted, ("rows", "columns")):
        assert spec_of(gradient) == (axis, None, None)
        assert np.allclose(gradient, exact, rtol=1e-5, atol=1e-6)


def topk(q: Any, docs: Any, lengths: Any) -> Any:
    return nkx.topk(q, docs, 5, docs_lengths=lengths, axis_name="columns")


def test_topk_over_sharded_documents_is_the_one_devices_to_the_bit() -> None:
    specs = P(), P("columns"), P("columns")
    wanted = nkx.topk(QUERIES, DOCUMENTS, 5, docs_lengths=LENGTHS)
    sharded = jax.shard_map(topk, mesh=MESH, in_specs=specs, out_specs=(P(), P()))
    found, text = compiled(sharded, put(QUERIES), put(DOCUMENTS, "columns"), put(LENGTHS, "columns"))
    same(found[0], wanted[0])
    same(found[1], wanted[1])
    assert "f32[16,7,16]" not in text, "documents were gathered"
    both = jax.shard_map(
        lambda q, d: nkx.topk(q, d, 5, axis_name=("rows", "columns")),
        mesh=MESH,
        in_specs=(P(), P(("rows", "columns"))),
        out_specs=(P(), P()),
    )
    for part, exact in zip(jax.jit(both)(QUERIES, DOCUMENTS), nkx.topk(QUERIES, DOCUMENTS, 5)):
        same(part, exact)


def test_training_in_shard_map_over_queries_sums_the_shared_gradient() -> None:
    def local(q: Any, docs: Any) -> Any:
        return jax.lax.psum(loss(q, docs), "rows")

    total = jax.shard_map(local, mesh=MESH, in_specs=(P("rows"), P()), out_specs=P())
    wanted = jax.value_and_grad(loss, (0, 1))(QUERIES, DOCUMENTS)
    value, found = jax.jit(jax.value_and_grad(total, (0, 1)))(put(QUERIES, "rows"), put(DOCUMENTS))
    assert np.allclose(value, wanted[0])
    for gradient, exact in zip(found, wanted[1]):
        assert np.allclose(gradient, exact, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(name)
