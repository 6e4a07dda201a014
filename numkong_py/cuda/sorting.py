"""Stable sort of pairs of key and value on the device, in an order that no race decides, without asking the host."""

from __future__ import annotations

import struct

import cupy as cp
import numpy as np

from .compile import kernel
from .scoring import keep

__all__ = ["places_of_groups", "sort_pairs"]

THREADS, BLOCK, BINS = 256, 2048, 256  # of stable_sort.cu
PARAMETERS = struct.Struct("@7Q2I2i")


def sort_pairs(
    keys: cp.ndarray, values: cp.ndarray, bits: int, row: str, device: int, stream: int
) -> tuple[cp.ndarray, cp.ndarray]:
    """Sort uint64 keys of so many bits with their uint32 values; both arrays are overwritten.

    Parameters
    ----------
    keys, values : cupy.ndarray of uint64 and of uint32, shape (count,)
        count below 2^32.
    bits : int
        The keys' bits from here on are zeros.
    """
    blocks = -(-keys.size // BLOCK)
    other_keys, other_values = keep(cp.empty_like(keys)), keep(cp.empty_like(values))
    tally, total = keep(cp.empty(BINS * blocks, np.uint32)), keep(cp.empty(BINS, np.uint32))
    if not keys.size:
        return keys, values
    for shift in range(0, bits, 8):
        arrays = (keys, values, other_keys, other_values, tally, total)
        pointers = [array.data.ptr for array in arrays]
        parameters = PARAMETERS.pack(*pointers, 0, keys.size, 0, shift, blocks)
        for step, grid in enumerate((blocks, BINS, blocks)):
            kernel("stable_sort.cu", row, device, THREADS, STEP=step).launch(grid, stream, parameters)
        keys, values, other_keys, other_values = other_keys, other_values, keys, values
    return keys, values


def places_of_groups(keys: cp.ndarray, groups: int, row: str, device: int, stream: int) -> cp.ndarray:
    """Where each key's run begins among sorted keys: uint32 ``[groups + 1]``, ending in the keys below `groups`."""
    begin = keep(cp.empty(groups + 1, np.uint32))
    parameters = PARAMETERS.pack(keys.data.ptr, 0, 0, 0, 0, 0, begin.data.ptr, keys.size, groups, 0, 0)
    run = kernel("stable_sort.cu", row, device, THREADS, STEP=3)
    run.launch(-(-(groups + 1) // THREADS), stream, parameters)
    return begin
