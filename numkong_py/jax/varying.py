"""What `shard_map` tracks about values: along which mesh axes they differ. JAX spells it differently by version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["abstract_like", "vary_alike"]


def _axes(x: Any) -> frozenset[Any]:
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return aval.manual_axis_type.varying
    return getattr(aval, "vma", frozenset())


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, each declared to differ along every mesh axis that any of them differs along.

    The transpose of that is a sum over the axes: so the gradient of what all devices share is summed over them.
    """
    every = frozenset().union(*(_axes(x) for x in arrays))
    cast = getattr(jax.lax, "pcast", None)
    varied = []
    for x in arrays:
        missing = tuple(every - _axes(x))
        if missing:
            x = cast(x, missing, to="varying") if cast else jax.lax.pvary(x, missing)
        varied.append(x)
    return varied


def abstract_like(aval: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Abstract value of another shape and type that differs along the same mesh axes."""
    mesh = aval.sharding.mesh
    if mesh.empty:
        return jax.core.ShapedArray(shape, np.dtype(dtype))
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)
