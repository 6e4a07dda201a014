"""Element types: the short names of the C functions and the NumPy types they stand for."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from .errors import UnsupportedDtype

__all__ = ["NUMPY_DTYPES", "conversion", "find_name", "name_of"]

NUMPY_DTYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
SCORED = ("bf16", "f16", "f32")  # what can be packed; f64 is a type of scores only
NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name in SCORED}


def find_name(dtype: np.dtype) -> str | None:
    """Short name of a native NumPy dtype that can be packed, or None.

    Examples
    --------
    >>> find_name(np.dtype(np.float16)), find_name(np.dtype(np.int8))
    ('f16', None)
    """
    return NAMES.get(dtype) if dtype.isnative else None


def name_of(dtype: Any, argument: str = "dtype") -> str:
    """Short name of a dtype given as ``"bf16"``, ``"f16"``, ``"f32"`` or anything that NumPy reads as a dtype.

    Raises
    ------
    UnsupportedDtype
        For any other type.

    Examples
    --------
    >>> name_of(np.float32), name_of("bf16")
    ('f32', 'bf16')
    """
    if isinstance(dtype, str) and dtype in SCORED:
        return dtype
    try:
        name = find_name(np.dtype(dtype))
    except TypeError:
        name = None
    if name is None:
        raise UnsupportedDtype(f"{argument}: {dtype!r} is not scored; use one of {', '.join(map(repr, SCORED))}")
    return name


def conversion(dtype: np.dtype, argument: str) -> str:
    """Expression that turns an array of another type into a scored one, for error messages."""
    if dtype.kind == "O":
        return f"list({argument}) if it holds one array a set, else {argument}.astype(np.float32)"
    if dtype.kind == "f" and not dtype.isnative:
        return f'{argument}.astype({argument}.dtype.newbyteorder("="))'
    if dtype == np.dtype("V2"):  # how NumPy saves bfloat16 to a file
        return f'{argument}.view(np.uint16) with dtype="bf16"'
    if dtype.itemsize == 2 and dtype.kind in "ui":
        return f'dtype="bf16" if these are the bits of bfloat16 numbers, else {argument}.astype(np.float32)'
    return f"{argument}.astype(np.float32)"
