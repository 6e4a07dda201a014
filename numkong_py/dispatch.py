"""The scoring functions as users see them: JAX arrays go to `numkong_py.jax`, everything else to `numkong_py.ops`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from . import ops
from .errors import InvalidArgument

__all__ = ["maxsim", "maxsim_candidates", "maxsim_pairs", "topk"]

OF_HOST_ONLY = ("threads", "out", "block", "progress")  # XLA has its own threads, memory and schedule


def _is_native(x: Any, jax: Any) -> bool:
    """Whether `numkong_py.jax` takes it: traced or on CPUs, alone or in a list. Arrays on a GPU go to the CUDA rows."""
    if isinstance(x, (list, tuple)):
        return len(x) > 0 and _is_native(x[0], jax)
    if not isinstance(x, jax.Array):
        return isinstance(x, getattr(sys.modules.get("numkong_py.jax"), "Packed", ()))
    return isinstance(x, jax.core.Tracer) or all(device.platform == "cpu" for device in x.devices())


def _dispatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for JAX too."""
    name = function.__name__

    @functools.wraps(function)
    def call(q: Any, docs: Any, *args: Any, **options: Any) -> Any:
        jax = sys.modules.get("jax")
        if jax is None or not hasattr(jax, "Array") or not (_is_native(q, jax) or _is_native(docs, jax)):
            return function(q, docs, *args, **options)
        for option in OF_HOST_ONLY:
            if options.pop(option, None) is not None:
                raise InvalidArgument(f"{option}: is not for JAX arrays; leave it out, or pass np.asarray(q)")
        options.pop("screen", None)
        return getattr(import_module(".jax", __package__), name)(q, docs, *args, **options)

    return call


maxsim = _dispatched(ops.maxsim)
maxsim_pairs = _dispatched(ops.maxsim_pairs)
maxsim_candidates = _dispatched(ops.maxsim_candidates)
topk = _dispatched(ops.topk)
