"""MaxSim as primitives of JAX: scores, their tangent, and the gradient of either side.

Why primitives and not ``custom_vjp``: `vmap` then batches the scores before they are differentiated, so that the
gradient of an operand that all of the batch shares is summed inside the kernel. With ``custom_vjp`` it is the backward
pass that gets batched: a gradient of the shared operand is written for every element of the batch, then all are added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..cpu import XLA_OUTPUTS
from ..errors import InvalidArgument
from .calls import backward, forward, listed, scores_at
from .folding import RANKS, VALID_RANKS, Folding
from .sides import Facts, Side, output_dtype, set_count
from .varying import abstract_like, vary_alike

__all__ = ["Spec", "define", "score", "zero_of"]


@dataclass(frozen=True)
class Spec:
    """What is static about a call.

    Attributes
    ----------
    queries, documents : Facts
    candidates : bool
        The last operand lists every query's documents.
    metric : str
    mean : bool
    empty : float or None
    outputs : tuple of str
        Beside the scores: "argmax", "token_scores", "bounds"; "places" makes argmax count rows of the input.
    output_dtype : str
        Of scores, token scores and bounds.
    """

    queries: Facts
    documents: Facts
    candidates: bool
    metric: str
    mean: bool
    empty: float | None
    outputs: tuple[str, ...]
    output_dtype: str

    def operands(self, flat: Any) -> Operands:
        """Name the operands of a primitive or a call."""
        return Operands.of(self, flat)

    @property
    def flags(self) -> int:
        """Bits of the attribute `outputs`."""
        return sum(XLA_OUTPUTS[name] for name in self.outputs)


TOKENS = {"queries": "query_tokens", "documents": "document_tokens"}  # what has a gradient


class Operands(NamedTuple):
    """The flat operands of a primitive by name."""

    query_tokens: Any
    query_valid: Any
    document_tokens: Any
    document_valid: Any
    candidates: Any

    @classmethod
    def of(cls, spec: Spec, flat: Any) -> Operands:
        """Name what `flat` gave out."""
        rest = iter(flat)
        pairs = [
            (next(rest), next(rest) if facts.layout in VALID_RANKS else None)
            for facts in (spec.queries, spec.documents)
        ]
        return cls(*pairs[0], *pairs[1], next(rest) if spec.candidates else None)

    def spread(self, name: str, lead: tuple[int, ...]) -> Operands:
        """Repeat tokens along batch axes that only their tangent or gradient has."""
        tokens = getattr(self, name)
        wanted = tuple(max(extents) for extents in zip(tokens.shape, lead)) + tokens.shape[len(lead) :]
        return self if wanted == tokens.shape else self._replace(**{name: jnp.broadcast_to(tokens, wanted)})

    def flat(self) -> list[Any]:
        """Without what is missing."""
        return [operand for operand in self if operand is not None]


def _leads(tokens: Any, valid: Any, facts: Facts) -> list[tuple[int, ...]]:
    """Leading axes of what belongs to one side."""
    found = [tokens.shape[: len(tokens.shape) - RANKS[facts.layout]]]
    if valid is not None:
        found.append(valid.shape[: len(valid.shape) - VALID_RANKS[facts.layout]])
    return found


def _folding(spec: Spec, operands: Operands) -> Folding:
    lists = operands.candidates
    return Folding.of(
        _leads(operands.query_tokens, operands.query_valid, spec.queries),
        _leads(operands.document_tokens, operands.document_valid, spec.documents),
        None if lists is None else lists.shape[:-2],
    )


class Folded(NamedTuple):
    """A call without batch axes, and how to undo it."""

    folding: Folding
    queries: int
    operands: Operands


def _fold(spec: Spec, operands: Operands) -> Folded:
    folding = _folding(spec, operands)
    queries = set_count(operands.query_tokens, operands.query_valid, spec.queries)
    lists = None if operands.candidates is None else folding.fold_lists(operands.candidates)
    folded = Operands(
        *folding.fold_queries(operands.query_tokens, operands.query_valid, spec.queries.layout),
        *folding.fold_documents(operands.document_tokens, operands.document_valid, spec.documents.layout),
        lists,
    )
    return Folded(folding, queries, folded)


# ------------------------------------------------------------------------------------- scores

score_p = Primitive("numkong_maxsim")
score_p.multiple_results = True


def _score_shapes(spec: Spec, operands: Operands) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sizes = _folding(spec, operands).sizes
    queries = set_count(operands.query_tokens, operands.query_valid, spec.queries)
    lists = operands.candidates
    columns = (
        set_count(operands.document_tokens, operands.document_valid, spec.documents)
        if lists is None
        else lists.shape[-1]
    )
    scores = (*sizes, queries, columns)
    return scores, (*scores, spec.queries.longest)


@score_p.def_abstract_eval
def _score_abstract(*avals: Any, spec: Spec) -> list[Any]:
    scores, by_token = _score_shapes(spec, Operands.of(spec, avals))
    outs = [abstract_like(avals[0], scores, spec.output_dtype)]
    if "argmax" in spec.outputs:
        outs.append(abstract_like(avals[0], by_token, np.int32))
    if "token_scores" in spec.outputs:
        outs.append(abstract_like(avals[0], by_token, spec.output_dtype))
    if "bounds" in spec.outputs:
        outs.append(abstract_like(avals[0], scores, spec.output_dtype))
    return outs


def _score(*flat: Any, spec: Spec) -> list[Any]:
    folding, queries, operands = _fold(spec, Operands.of(spec, flat))
    results = forward(spec, operands, folding.groups)
    return [folding.unfold_scores(result, queries) for result in results]


def _score_jvp(primals: Any, tangents: Any, *, spec: Spec) -> tuple[list[Any], list[Any]]:
    """The derivative at the forward's argmax, which is the only residual."""
    if set(spec.outputs) - {"argmax", "places"}:
        raise InvalidArgument(
            "return_token_scores and return_bounds have no derivative; ask for them in a call of their own"
        )
    with_places = replace(spec, outputs=("argmax", "places"))
    scores, places = score_p.bind(*primals, spec=with_places)
    operands, by_operand = Operands.of(spec, primals), Operands.of(spec, tangents)
    parts = []
    for side, tangent in (("queries", by_operand.query_tokens), ("documents", by_operand.document_tokens)):
        facts = getattr(spec, side)
        if type(tangent) is ad.Zero or facts.layout == "packed":
            continue
        parts.append(tangent_p.bind(tangent, places, *operands.flat(), spec=spec, side=side))
    outs, zeros = [scores], [sum(parts[1:], parts[0]) if parts else zero_of(scores)]
    if "argmax" in spec.outputs:
        masked = "mask" in (spec.queries.layout, spec.documents.layout)
        found = score_p.bind(*primals, spec=spec)[1] if masked else places
        outs.append(found)
        zeros.append(zero_of(found))
    return outs, zeros


# ------------------------------------------------------------------------------------- the tangent

tangent_p = Primitive("numkong_maxsim_tangent")


@tangent_p.def_abstract_eval
def _tangent_abstract(tangent: Any, places: Any, *avals: Any, spec: Spec, side: str) -> Any:
    lead = tangent.shape[: tangent.ndim - RANKS[getattr(spec, side).layout]]
    sizes = tuple(max(extents) for extents in zip(places.shape, lead))
    return abstract_like(places, (*sizes, *places.shape[len(lead) : -1]), spec.output_dtype)


def _tangent(tangent: Any, places: Any, *flat: Any, spec: Spec, side: str) -> Any:
    """Forward mode, in plain JAX: gathers the winners, so it takes memory for them."""
    layout, name = getattr(spec, side).layout, TOKENS[side]
    operands = Operands.of(spec, flat).spread(name, tangent.shape[: tangent.ndim - RANKS[layout]])
    folding, queries, folded = _fold(spec, operands)
    fold = folding.fold_queries if side == "queries" else folding.fold_documents
    tangent, _ = fold(tangent, None, layout)
    documents = set_count(folded.document_tokens, folded.document_valid, spec.documents)
    lists = listed(folded.candidates, queries * folding.copies, documents, folding.groups)

    def values(tokens: Any) -> Any:
        return scores_at(spec, folded._replace(**{name: tokens, "candidates": lists}), folding.fold_scores(places))

    _, out = jax.jvp(values, (getattr(folded, name),), (tangent,))
    return folding.unfold_scores(out, queries)


def _tangent_transpose(cotangent: Any, tangent: Any, places: Any, *flat: Any, spec: Spec, side: str) -> list[Any]:
    none = [None] * (1 + len(flat))
    if type(cotangent) is ad.Zero:
        return [ad.Zero(tangent.aval), *none]
    shape = tuple(tangent.aval.shape)
    return [gradient_p.bind(cotangent, places, *flat, spec=spec, side=side, shape=shape), *none]


# ------------------------------------------------------------------------------------- the gradient

gradient_p = Primitive("numkong_maxsim_gradient")


@gradient_p.def_abstract_eval
def _gradient_abstract(cotangent: Any, places: Any, *avals: Any, spec: Spec, side: str, shape: tuple[int, ...]) -> Any:
    operands = Operands.of(spec, avals)
    tokens = operands.query_tokens if side == "queries" else operands.document_tokens
    return abstract_like(tokens, shape, tokens.dtype)


def _gradient(cotangent: Any, places: Any, *flat: Any, spec: Spec, side: str, shape: tuple[int, ...]) -> Any:
    operands = Operands.of(spec, flat).spread(TOKENS[side], shape[: cotangent.ndim - 2])
    folding, _, folded = _fold(spec, operands)
    values = folding.fold_scores(cotangent), folding.fold_scores(places)
    found = backward(spec, folded, *values, side, folding.groups)
    axes = (*folding.both, *(folding.rows if side == "queries" else folding.columns))
    return folding.unfold_gradient(found, axes, shape)


# ------------------------------------------------------------------------------------- batching, lowering


def _prepend(spec: Spec, operands: Any, axes: Any) -> tuple[list[Any], int]:
    """Every operand with the batch axis in front, of length 1 where it is not mapped; and the batch's length."""
    size = next(operand.shape[axis] for operand, axis in zip(operands, axes) if axis is not None)
    moved = [
        jnp.expand_dims(operand, 0) if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes)
    ]
    count = 2 + spec.candidates + sum(facts.layout in VALID_RANKS for facts in (spec.queries, spec.documents))
    named = Operands.of(spec, moved[-count:])
    for facts, tokens in ((spec.queries, named.query_tokens), (spec.documents, named.document_tokens)):
        if facts.layout == "packed" and tokens.shape[0] != 1:
            raise InvalidArgument("a packed collection cannot be mapped over; pass in_axes=None for it")
    return moved, size


def _score_batch(operands: Any, axes: Any, *, spec: Spec) -> tuple[list[Any], list[int]]:
    moved, _ = _prepend(spec, operands, axes)
    outs = score_p.bind(*moved, spec=spec)
    return outs, [0] * len(outs)


def _tangent_batch(operands: Any, axes: Any, *, spec: Spec, side: str) -> tuple[Any, int]:
    moved, _ = _prepend(spec, operands, axes)
    return tangent_p.bind(*moved, spec=spec, side=side), 0


def _gradient_batch(operands: Any, axes: Any, *, spec: Spec, side: str, shape: tuple[int, ...]) -> tuple[Any, int]:
    moved, size = _prepend(spec, operands, axes)
    return gradient_p.bind(*moved, spec=spec, side=side, shape=(size, *shape)), 0


def zero_of(value: Any) -> Any:
    """The tangent of what does not depend on anything."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def define(primitive: Primitive, function: Any) -> None:
    """Lower a primitive as the JAX function that it stands for, and run it eagerly as a jitted one."""

    @lru_cache(maxsize=256)
    def compiled(**static: Any) -> Any:
        return jax.jit(partial(function, **static))

    # Calls are split over devices, so lowering must know them. JAX asks this of primitives that it finds in a program,
    # and has no public way to say so; custom_partitioning says it for itself, but is inside ours.
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    primitive.def_impl(lambda *operands, **static: compiled(**static)(*operands))
    lowering = mlir.lower_fun(function, multiple_results=primitive.multiple_results)
    mlir.register_lowering(primitive, lowering)


define(score_p, _score)
define(tangent_p, _tangent)
define(gradient_p, _gradient)
batching.primitive_batchers[score_p] = _score_batch
batching.primitive_batchers[tangent_p] = _tangent_batch
batching.primitive_batchers[gradient_p] = _gradient_batch
ad.primitive_jvps[score_p] = _score_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose


# ------------------------------------------------------------------------------------- the way in


def score(
    queries: Side,
    documents: Side,
    candidates: Any = None,
    *,
    metric: str,
    mean: bool,
    empty: float | None,
    outputs: tuple[str, ...] = (),
) -> list[Any]:
    """Scores ``[queries, columns]`` and the other outputs, in the order of `Spec`."""
    spec = Spec(
        queries.facts,
        documents.facts,
        candidates is not None,
        metric,
        mean,
        empty,
        outputs,
        output_dtype(queries.facts.dtype),
    )
    sides = queries.tokens, queries.valid, documents.tokens, documents.valid
    operands = Operands(*(None if x is None else jnp.asarray(x) for x in (*sides, candidates)))
    return score_p.bind(*vary_alike(operands.flat()), spec=spec)
