"""Calls without batch axes: what the handlers get, how they may be split; and in plain JAX, for forward mode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cpu import METRICS, XLA_LAYOUTS
from .partition import DOCUMENTS, QUERIES, Split, split
from .sides import Facts, set_count
from .targets import foreign_call

__all__ = ["backward", "forward", "listed", "scores_at"]


def _axes_of_side(facts: Facts, kind: str) -> list[tuple[str | None, ...]]:
    """What the axes of a side's tokens, and of its lengths, mask or spans, count."""
    return {
        "full": [(kind, None, None)],
        "lengths": [(kind, None, None), (kind,)],
        "mask": [(kind, None, None), (kind, None)],
        "spans": [(None, None), (None, None)],
        "packed": [(None,)],
    }[facts.layout]


def _plan(spec: Any, groups: int, values: tuple[tuple[int, ...], ...], results: tuple[str, ...]) -> Split:
    """How a call is split; `values` are shapes of what comes before the sides, results "scores", "tokens" or a side."""
    splits = [facts.layout not in ("spans", "packed") for facts in (spec.queries, spec.documents)]
    if groups > 1 and not all(splits):
        splits = [False, False]
    rows = QUERIES if splits[0] else None
    documents = DOCUMENTS if splits[1] and (groups > 1 or not spec.candidates) else None
    columns = None if groups > 1 or spec.candidates else documents
    queries = [tuple(rows if kind else None for kind in axes) for axes in _axes_of_side(spec.queries, QUERIES)]
    docs = [tuple(documents if kind else None for kind in axes) for axes in _axes_of_side(spec.documents, DOCUMENTS)]
    lists = [(rows, None)] if spec.candidates else []
    scores = [(rows, columns, *(None for _ in shape[2:])) for shape in values]
    names = [""] * len(values) + ["q"] + [""] * (len(queries) - 1) + ["docs"] + [""] * (len(docs) - 1 + len(lists))
    of_results = {
        "scores": (rows, columns),
        "tokens": (rows, columns, None),
        QUERIES: queries[0],
        DOCUMENTS: docs[0],
    }
    summed = {QUERIES: columns, DOCUMENTS: rows}.get(results[0])
    return Split(
        (*scores, *queries, *docs, *lists), tuple(of_results[name] for name in results), tuple(names), groups, summed
    )


def listed(lists: Any, queries: int, documents: int, groups: int) -> Any:
    """Candidates as the handler takes them: those given, or all documents of one's own group; None for all pairs."""
    if groups == 1:
        return lists
    rows, columns = queries // groups, documents // groups
    first = jnp.repeat(jnp.arange(groups, dtype=np.int32) * columns, rows)[:, None]
    if lists is None:
        return first + jnp.arange(columns, dtype=np.int32)
    return jnp.where(lists < 0, lists, lists + first.astype(lists.dtype))


def _options(spec: Any, documents: int, candidates: Any) -> dict[str, Any]:
    return {
        "q_layout": XLA_LAYOUTS[spec.queries.layout],
        "docs_layout": XLA_LAYOUTS[spec.documents.layout],
        "q_begin": spec.queries.begin,
        "docs_begin": spec.documents.begin,
        "documents": documents,
        "has_candidates": candidates is not None,
        "metric": METRICS[spec.metric],
        "mean": spec.mean,
        "empty": spec.empty,
    }


def _local(spec: Any, group_rows: int, flat: Any) -> tuple[list[Any], int, int, dict[str, Any]]:
    """Operands of the handler on one device, its queries and columns, and its options."""
    operands = spec.operands(flat)
    queries = set_count(operands.query_tokens, operands.query_valid, spec.queries)
    documents = set_count(operands.document_tokens, operands.document_valid, spec.documents)
    groups = queries // group_rows if group_rows else 1
    candidates = listed(operands.candidates, queries, documents, groups)
    columns = documents if candidates is None else candidates.shape[1]
    # Ragged rows travel with an axis of one in front: jaxlib 0.6.2 aborts while it compiles a program of nothing but a
    # concatenation and a custom call that takes it as it is.
    ragged = {
        name: getattr(operands, name)[None]
        for name, facts in (("query_tokens", spec.queries), ("document_tokens", spec.documents))
        if facts.layout == "spans"
    }
    return (
        operands._replace(candidates=candidates, **ragged).flat(),
        queries,
        columns,
        _options(spec, documents, candidates),
    )


def forward(spec: Any, operands: Any, groups: int) -> list[Any]:
    """Scores ``[queries, columns]``, then argmax and token scores ``[queries, columns, longest]``, then bounds.

    With more than one group the columns are the documents of a query's own group.
    """
    queries = set_count(operands.query_tokens, operands.query_valid, spec.queries)
    group_rows = queries // groups if groups > 1 else 0

    def call(*flat: Any) -> list[Any]:
        arrays, rows, columns, options = _local(spec, group_rows, flat)
        scores = jax.ShapeDtypeStruct((rows, columns), spec.output_dtype)
        shapes = {
            "argmax": jax.ShapeDtypeStruct((rows, columns, spec.queries.longest), np.int32),
            "token_scores": jax.ShapeDtypeStruct((rows, columns, spec.queries.longest), spec.output_dtype),
            "bounds": scores,
        }
        results = [scores, *(shape for name, shape in shapes.items() if name in spec.outputs)]
        return foreign_call("nk_xla_maxsim", arrays, results, {**options, "outputs": spec.flags})

    kinds = {"argmax": "tokens", "token_scores": "tokens", "bounds": "scores"}
    results = ("scores", *(kind for name, kind in kinds.items() if name in spec.outputs))
    return split(_plan(spec, groups, (), results), call, operands.flat())


def backward(spec: Any, operands: Any, upstream: Any, places: Any, side: str, groups: int) -> Any:
    """Gradient of one side's tokens, in their layout and type.

    `upstream` is ``[queries, columns]``, `places` the winners' rows ``[queries, columns, longest]``.
    """
    queries = set_count(operands.query_tokens, operands.query_valid, spec.queries)
    group_rows = queries // groups if groups > 1 else 0

    def call(upstream: Any, places: Any, *flat: Any) -> list[Any]:
        arrays, _, _, options = _local(spec, group_rows, flat)
        local = spec.operands(flat)
        tokens = local.query_tokens if side == QUERIES else local.document_tokens
        results = [jax.ShapeDtypeStruct(tokens.shape, tokens.dtype)]
        options = {**options, "of_documents": side == DOCUMENTS}
        return foreign_call("nk_xla_maxsim_gradient", [upstream, places, *arrays], results, options)

    plan = _plan(spec, groups, (upstream.shape, places.shape), (side,))
    return split(plan, call, [upstream, places, *operands.flat()])[0]


# ------------------------------------------------------------------------------------- plain JAX


def _query_rows(tokens: Any, valid: Any, facts: Facts) -> tuple[Any, Any]:
    """Query tokens ``[queries, longest, depth]``, and the number of valid ones of each query."""
    longest = facts.longest
    if facts.layout == "spans":
        rows = jnp.minimum(valid[:, :1] + jnp.arange(longest), tokens.shape[0] - 1)
        return tokens[rows], valid[:, 1] - valid[:, 0]
    if facts.layout == "mask":
        return tokens, valid.sum(-1)
    return tokens, jnp.full(len(tokens), longest) if valid is None else valid


def _unit(vectors: Any) -> Any:
    squares = jnp.sum(vectors * vectors, -1, keepdims=True)
    safe = jnp.where(squares == 0, 1, squares)
    return jnp.where(squares == 0, 0, vectors / jnp.sqrt(safe))


def scores_at(spec: Any, operands: Any, places: Any) -> Any:
    """Scores with the winners given, ``places`` ``[queries, columns, longest]`` rows of documents.

    The winners are gathered, so this takes memory for ``[queries, columns, longest, depth]``.
    """
    if "packed" in (spec.queries.layout, spec.documents.layout):
        raise NotImplementedError("forward-mode derivatives of packed collections; use jax.grad or jax.vjp")
    tokens, counts = _query_rows(operands.query_tokens, operands.query_valid, spec.queries)
    documents, valid = operands.document_tokens, operands.document_valid
    flat = documents.reshape(-1, documents.shape[-1])
    first = valid[:, 0] if spec.documents.layout == "spans" else jnp.arange(documents.shape[0]) * documents.shape[1]
    columns = jnp.arange(len(first))[None] if operands.candidates is None else operands.candidates
    won = places >= 0
    winners = flat[jnp.where(won, first[columns][..., None] + places, 0)].astype(spec.output_dtype)
    queries = tokens.astype(spec.output_dtype)[:, None]
    if spec.metric != "dot":
        queries, winners = _unit(queries), _unit(winners)
    values = jnp.where(won, jnp.sum(queries * winners, -1), 0)
    sums = jnp.sum(values, -1) * (-1 if spec.metric == "angular" else 1)
    return sums / jnp.maximum(counts, 1)[:, None] if spec.mean else sums
