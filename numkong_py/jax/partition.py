"""How a call without batch axes is split over a mesh, where `jit` is left to choose: nothing is gathered silently.

Query sets and documents are independent of each other, so scores are split the way their rows and columns are, and a
gradient is summed over the devices that hold the other side. What cannot be split (rows of ragged sets that all
documents share, packed bytes, the tokens of one set, documents that any query may list as candidates) must lie whole on
every device; an operand that does not is refused, because XLA would gather it without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental.custom_partitioning import CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ..errors import DeviceMismatch

__all__ = ["DOCUMENTS", "QUERIES", "Split", "split"]

QUERIES, DOCUMENTS = "queries", "documents"  # what an axis counts; None: it is never split


@dataclass(frozen=True)
class Split:
    """What the axes of a call's operands and results count.

    Attributes
    ----------
    operands, results : tuple of tuple
        For every axis QUERIES, DOCUMENTS or None.
    names : tuple of str
        Of the operands, for messages; empty for those that may be gathered (they are small).
    groups : int
        More than 1: query sets and documents come in this many groups, which see only each other and are split
        together; the second axis of scores then counts the documents of one group.
    summed : str or None
        Axis of the operands that the results do not have: its devices' results are added.
    """

    operands: tuple[tuple[str | None, ...], ...]
    results: tuple[tuple[str | None, ...], ...]
    names: tuple[str, ...]
    groups: int = 1
    summed: str | None = None


def _entries(sharding: Any, rank: int) -> tuple[Any, ...]:
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    return spec + (None,) * (rank - len(spec))


def _flat(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _choose(plan: Split, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> dict[str | None, Any]:
    """Mesh axes for query sets and for documents: those of the first array that has any."""
    chosen: dict[str | None, tuple[str, ...]] = {None: (), QUERIES: (), DOCUMENTS: ()}
    sizes: dict[str, int] = {}
    for axes, array in [*zip(plan.operands, operands), *zip(plan.results, results)]:
        for kind, extent, entry in zip(axes, array.shape, _entries(array.sharding, len(array.shape))):
            if kind is None:
                continue
            sizes[kind] = math.gcd(sizes.get(kind, 0), extent)
            chosen[kind] = chosen[kind] or _flat(entry)
    if plan.groups > 1:
        chosen[QUERIES] = chosen[DOCUMENTS] = chosen[QUERIES] or chosen[DOCUMENTS]
        sizes = dict.fromkeys(sizes, plan.groups)
    elif set(chosen[QUERIES]) & set(chosen[DOCUMENTS]):
        chosen[DOCUMENTS] = ()
    for kind in (QUERIES, DOCUMENTS):
        if sizes.get(kind, 1) % math.prod(mesh.shape[axis] for axis in chosen[kind]):
            chosen[kind] = ()
    return {kind: axes or None for kind, axes in chosen.items()}


def _refuse_gathers(plan: Split, operands: Sequence[Any], chosen: dict[str | None, Any]) -> None:
    for name, axes, array in zip(plan.names, plan.operands, operands):
        if not name:
            continue
        for axis, (kind, entry) in enumerate(zip(axes, _entries(array.sharding, len(array.shape)))):
            if _flat(entry) and not set(_flat(entry)) <= set(_flat(chosen[kind])):
                raise DeviceMismatch(
                    f"{name}: shape {array.shape}, axis {axis} is sharded along {entry!r}, and the call needs it "
                    "whole; nothing is gathered silently: shard whole sets, use shard_map, or pass "
                    f"jax.lax.with_sharding_constraint({name}, PartitionSpec())"
                )


def _rule(plan: Split, shapes: Sequence[tuple[int, ...]], result_shapes: Sequence[tuple[int, ...]]) -> SdyShardingRule:
    """The same for Shardy, which propagates shardings before the call is split."""
    sizes: dict[str, int] = {}

    def mapping(place: int, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
        factors: list[Any] = []
        for axis, (kind, extent) in enumerate(zip(axes, shape)):
            if kind is None:
                factors.append(f"x{place}_{axis}")
            elif plan.groups == extent:
                factors.append("groups")
            elif plan.groups > 1:
                sizes["groups"], sizes[kind] = plan.groups, extent // plan.groups
                factors.append(CompoundFactor("groups", kind))
            else:
                factors.append(kind)
        return tuple(factors)

    operands = tuple(mapping(place, axes, shape) for place, (axes, shape) in enumerate(zip(plan.operands, shapes)))
    results = tuple(
        mapping(len(shapes) + place, axes, shape)
        for place, (axes, shape) in enumerate(zip(plan.results, result_shapes))
    )
    if any("groups" in factors for factors in operands):  # its size is known from a whole axis
        sizes.pop("groups", None)
    return SdyShardingRule(operands, results, **sizes)


def split(plan: Split, call: Callable[..., list[Any]], operands: list[Any]) -> list[Any]:
    """Run a call that XLA may split as the plan says; on one device it is the call and nothing else."""

    @custom_partitioning
    def run(*operands: Any) -> list[Any]:
        return call(*operands)

    def shardings(mesh: Any, arrays: Sequence[Any], results: Sequence[Any]) -> tuple[Any, Any, dict[str | None, Any]]:
        chosen = _choose(plan, mesh, arrays, results)

        def named(axes: tuple[str | None, ...]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(chosen[kind] for kind in axes)))

        return tuple(named(axes) for axes in plan.operands), [named(axes) for axes in plan.results], chosen

    def infer(mesh: Any, arrays: Sequence[Any], results: Sequence[Any]) -> Any:
        unknown = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
        return shardings(mesh, arrays, unknown)[1]

    def partition(mesh: Any, arrays: Sequence[Any], results: Sequence[Any]) -> Any:
        of_operands, of_results, chosen = shardings(mesh, arrays, results)
        _refuse_gathers(plan, arrays, chosen)

        def local(*operands: Any) -> list[Any]:
            found = call(*operands)
            axes = _flat(chosen[plan.summed])
            return [jax.lax.psum(x, axes) for x in found] if axes and plan.groups == 1 else found

        return mesh, local, of_results, of_operands

    def rule(mesh: Any, operand_types: Any, result_types: Any) -> SdyShardingRule:
        return _rule(plan, [tuple(x.shape) for x in operand_types], [tuple(x.shape) for x in result_types])

    run.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)
    return run(*operands)
