"""The custom calls as XLA knows them, and one function that makes any of them."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import numpy as np

from ..cpu import xla_handlers

__all__ = ["foreign_call", "register"]


def register() -> None:
    """Tell XLA where the handlers are. They live in the C extension, so this loads nothing."""
    for name, address in xla_handlers().items():
        function = ctypes.CFUNCTYPE(None)(address)
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")


def foreign_call(name: str, operands: list[Any], results: list[jax.ShapeDtypeStruct], options: dict[str, Any]) -> Any:
    """Call a handler: integers travel as 64-bit attributes, floats as f64, and None does not travel.

    Parameters
    ----------
    name : str
    operands : list of arrays
    results : list of ShapeDtypeStruct
    options : dict

    Returns
    -------
    list of arrays
    """
    attributes = {
        key: np.float64(value) if isinstance(value, float) else np.int64(value)
        for key, value in options.items()
        if value is not None
    }
    return jax.ffi.ffi_call(name, results)(*operands, **attributes)


register()
