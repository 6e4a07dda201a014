"""The Chamfer distance: neighbours are found by a custom call, what is differentiated is plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from ..cpu import XLA_LAYOUTS
from ..errors import InvalidArgument, ShapeMismatch, UnsupportedDtype
from .partition import QUERIES, Split, split
from .primitives import define, zero_of
from .sides import Facts, Side, output_dtype, read_side
from .targets import foreign_call
from .varying import abstract_like, vary_alike

__all__ = ["chamfer"]

nearest_p = Primitive("numkong_nearest")


@nearest_p.def_abstract_eval
def _nearest_abstract(points: Any, *others: Any, facts: tuple[Facts, Facts]) -> Any:
    return abstract_like(points, points.shape[:2], np.int32)


def _nearest(*flat: Any, facts: tuple[Facts, Facts]) -> Any:
    def call(*operands: Any) -> list[Any]:
        options = {
            "q_layout": XLA_LAYOUTS[facts[0].layout],
            "docs_layout": XLA_LAYOUTS[facts[1].layout],
            "documents": operands[0].shape[0],
        }
        result = jax.ShapeDtypeStruct(operands[0].shape[:2], np.int32)
        return foreign_call("nk_xla_nearest", list(operands), [result], options)

    axes = tuple((QUERIES, *(None for _ in operand.shape[1:])) for operand in flat)
    names = tuple({0: "p"}.get(place, "q" if operand.ndim == 3 else "") for place, operand in enumerate(flat))
    return split(Split(axes, ((QUERIES, None),), names), call, list(flat))[0]


def _nearest_batch(operands: Any, axes: Any, *, facts: tuple[Facts, Facts]) -> tuple[Any, int]:
    """Clouds of the batch are more clouds."""
    size = next(operand.shape[axis] for operand, axis in zip(operands, axes) if axis is not None)
    moved = [
        jnp.broadcast_to(operand, (size, *operand.shape)) if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes)
    ]
    found = nearest_p.bind(*(x.reshape(-1, *x.shape[2:]) for x in moved), facts=facts)
    return found.reshape(size, -1, found.shape[-1]), 0


def _nearest_jvp(primals: Any, tangents: Any, *, facts: tuple[Facts, Facts]) -> tuple[Any, Any]:
    found = nearest_p.bind(*primals, facts=facts)
    return found, zero_of(found)


define(nearest_p, _nearest)
batching.primitive_batchers[nearest_p] = _nearest_batch
ad.primitive_jvps[nearest_p] = _nearest_jvp


def _read_clouds(x: Any, argument: str, mask: Any, lengths: Any) -> Side:
    """Padded clouds; a list is padded here."""
    if isinstance(x, (list, tuple)) and len(x) and not isinstance(x[0], (int, float)):
        counts = [len(cloud) for cloud in x]
        padded = [jnp.pad(jnp.asarray(cloud), ((0, max(counts) - len(cloud)), (0, 0))) for cloud in x]
        return read_side(jnp.stack(padded), argument, lengths=np.int32(counts))
    side = read_side(x, argument, mask=mask, lengths=lengths)
    if side.facts.layout in ("spans", "packed"):
        raise InvalidArgument(
            f"{argument}: ragged or packed; wanted [points, depth], padded [count, longest, depth], or a list"
        )
    return side


def _valid(side: Side) -> Any:
    """Which points are valid, bool [clouds, longest]."""
    if side.facts.layout == "mask":
        return side.valid
    if side.facts.layout == "lengths":
        return jnp.arange(side.facts.longest) < side.valid[:, None]
    return jnp.ones(side.tokens.shape[:2], bool)


def _one_way(points: Side, others: Side, mean: bool, squared: bool) -> Any:
    """Distances from the points of one cloud to those of the other, summed or averaged: [clouds]."""
    flat = [x for x in (points.tokens, points.valid, others.tokens, others.valid) if x is not None]
    nearest = nearest_p.bind(*vary_alike(flat), facts=(points.facts, others.facts))
    wide = output_dtype(points.facts.dtype)
    neighbours = jnp.take_along_axis(others.tokens, jnp.maximum(nearest, 0)[..., None], axis=1)
    found = nearest >= 0
    steps = jnp.where(found[..., None], points.tokens.astype(wide) - neighbours.astype(wide), 0)
    values = jnp.sum(steps * steps, -1)
    if not squared:  # the derivative where two points coincide is 0
        apart = values > 0
        values = jnp.where(apart, jnp.sqrt(jnp.where(apart, values, 1)), values)
    counts = jnp.sum(_valid(points), -1)
    sums = jnp.sum(values, -1)
    sums = sums / jnp.maximum(counts, 1) if mean else sums
    alone = (counts > 0) & ~jnp.any(_valid(others), -1)
    return jnp.where(alone, jnp.inf, sums)


def chamfer(
    p: Any,
    q: Any,
    p_mask: Any = None,
    q_mask: Any = None,
    *,
    p_lengths: Any = None,
    q_lengths: Any = None,
    reduction: str = "mean",
    squared: bool = True,
    both: bool = True,
) -> jax.Array:
    """Chamfer distance between point clouds: how far every point is from the nearest one of the other cloud.

    ``sum_i min_j |p_i - q_j|^2 + sum_j min_i |p_i - q_j|^2`` (Fan, Su and Guibas, CVPR 2017, equation 2), each sum
    divided by its count for ``"mean"``. Distances are sums of squared differences, so clouds far from the origin
    lose nothing.

    Parameters
    ----------
    p, q : array or list of arrays
        One cloud ``[points, depth]`` each, or equally many: ``[clouds, longest, depth]`` or a list (which is padded).
    p_mask, q_mask : bool array, optional
        ``[clouds, longest]``: true where a point is valid.
    p_lengths, q_lengths : int array, optional
        ``[clouds]``: only the first points are valid.
    reduction : {"mean", "sum"}
    squared : bool
        False takes plain distances.
    both : bool
        False leaves out the distances from the points of `q`.

    Returns
    -------
    array
        float32 (float64 for float32 points with ``jax_enable_x64``): a number for two 2-D arrays, else ``[clouds]``. An
        empty cloud is 0 from its own points and +inf from the points of another.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, InvalidArgument

    Examples
    --------
    >>> float(chamfer(jnp.asarray([[0.0, 0.0], [1.0, 0.0]]), jnp.asarray([[0.0, 1.0]])))
    2.5
    """
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(f"reduction: {reduction!r}, wanted one of mean, sum")
    points, others = _read_clouds(p, "p", p_mask, p_lengths), _read_clouds(q, "q", q_mask, q_lengths)
    if points.facts.dtype != others.facts.dtype:
        raise UnsupportedDtype(
            f"p: {points.facts.dtype}, and q: {others.facts.dtype}; wanted one type; convert one of them"
        )
    if points.sets != others.sets or points.facts.depth != others.facts.depth:
        raise ShapeMismatch(
            f"p: shape {points.tokens.shape}, and q: shape {others.tokens.shape}; wanted as many clouds of one depth"
        )
    distances = _one_way(points, others, reduction == "mean", squared)
    if both:
        distances = distances + _one_way(others, points, reduction == "mean", squared)
    return distances[0] if points.single and others.single else distances
