"""Inner kernels of our rows alone, as calls for the bench: int8 screen and direct products, in cache and streamed."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from numkong_py import cpu

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
QUERY_TOKENS, WINDOW_TOKENS, DEPTH = 32, 768, 128  # what scoring.inc gives a kernel at once
STREAMED_WINDOWS = 320  # 245,760 tokens: more than caches hold

Call = Callable[[], None]


@dataclass(frozen=True)
class Operands:
    """Random operands of one kernel in a row's interleaved layout, and the dense matrices they stand for."""

    plane: np.ndarray  # [tile][word][token of the tile], 32-bit words
    queries: np.ndarray  # [group][word][token of the group]
    preset: np.ndarray
    scale: np.ndarray
    documents_dense: np.ndarray  # [tokens, depth] of the first window, float64
    queries_dense: np.ndarray


class RowKernels:
    """The kernels of one row, compiled from its source.

    Parameters
    ----------
    row : str
        Name in the table; the row must be available.
    """

    def __init__(self, row: str) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise RuntimeError("no C compiler")
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "kernels.so"
            command = [compiler, "-std=c99", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-fvisibility=hidden"]
            command += ["-ffunction-sections", "-fdata-sections", "-Wl,--gc-sections", "-Iinclude", "-Ic"]
            command += [f'-DNK_ROW_FILE="../c/backends/{row}.c"']
            subprocess.run([*command, str(HERE / "kernels.c"), "-o", str(target), "-lm"], cwd=ROOT, check=True)
            self._library = ctypes.CDLL(str(target))
        self.tile = self._library.kernel_tile_tokens()
        self.group = self._library.kernel_query_group()

    def halves(self, dtype: str) -> bool:
        """Whether a word of the direct kernel holds two elements of the type."""
        return bool(self._library.kernel_direct_halves(cpu.DTYPE_IDS[dtype]))

    def operands(self, dtype: str, windows: int) -> Operands:
        """Operands of the int8 screen ("int8") or of the direct kernel of a type."""
        rng = np.random.default_rng(0)
        tokens = windows * WINDOW_TOKENS
        if dtype == "int8":
            limit, bias = self._library.kernel_code_limit(), self._library.kernel_code_bias()
            documents = rng.integers(-limit, limit + 1, (tokens, DEPTH), np.int8)
            queries = rng.integers(-127, 128, (QUERY_TOKENS, DEPTH), np.int8)
            preset = (-bias * queries.sum(axis=1, dtype=np.int32)).astype(np.int32)
            plane = _interleave((documents.astype(np.int16) + bias).astype(np.uint8), self.tile)
        else:
            element = ml_dtypes.bfloat16 if self.halves(dtype) else np.float32
            documents = rng.standard_normal((tokens, DEPTH), np.float32).astype(element)
            queries = rng.standard_normal((QUERY_TOKENS, DEPTH), np.float32).astype(element)
            preset = np.zeros(QUERY_TOKENS, np.int32)
            plane = _interleave(documents, self.tile)
        scale = rng.uniform(0.5, 1, tokens).astype(np.float32)
        first = documents[:WINDOW_TOKENS].astype(np.float64)
        return Operands(plane, _interleave(queries, self.group), preset, scale, first, queries.astype(np.float64))

    def call(self, dtype: str, windows: int) -> Call:
        """One pass of a kernel over so many windows, checked against matrix products.

        Raises
        ------
        RuntimeError
            A value is further off than float32 sums can be.
        """
        operands = self.operands(dtype, windows)
        stride = WINDOW_TOKENS + 16  # an odd number of cache lines, as in scoring.inc
        values = np.zeros((QUERY_TOKENS + self.group, stride), np.float32)
        words = operands.plane.shape[1]
        groups, tiles = QUERY_TOKENS // self.group, WINDOW_TOKENS // self.tile
        kernel = self._library.kernel_screen
        if dtype != "int8":
            kernel = partial(self._library.kernel_direct, ctypes.c_int(cpu.DTYPE_IDS[dtype]))
        plane_bytes, scale_bytes = tiles * words * self.tile * 4, WINDOW_TOKENS * 4
        shared = [ctypes.c_uint64(number) for number in (tiles, groups, words, stride)]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (operands.queries, operands.preset, values)]
        places = [
            (
                ctypes.c_void_p(operands.plane.ctypes.data + window * plane_bytes),
                ctypes.c_void_p(operands.scale.ctypes.data + window * scale_bytes),
            )
            for window in range(windows)
        ]

        def run(keep: tuple = (operands, values)) -> None:  # what the pointers point to
            for plane, scale in places:
                kernel(plane, shared[0], scale, *pointers[:2], shared[1], shared[2], pointers[2], shared[3])

        kernel(*places[0][:1], shared[0], places[0][1], *pointers[:2], shared[1], shared[2], pointers[2], shared[3])
        expected = operands.queries_dense @ operands.documents_dense.T * operands.scale[:WINDOW_TOKENS]
        sizes = np.abs(operands.queries_dense) @ np.abs(operands.documents_dense).T
        if not (np.abs(values[:QUERY_TOKENS, :WINDOW_TOKENS] - expected) <= (DEPTH + 16) * 2.0**-24 * sizes).all():
            raise RuntimeError(f"the {dtype} kernel's values are wrong; not timed")
        return run


def _interleave(tokens: np.ndarray, together: int) -> np.ndarray:
    """[tokens, depth] as 32-bit words [group][word][token of the group], on a cache line."""
    words = np.ascontiguousarray(tokens).view(np.uint32).reshape(-1, together, tokens.nbytes // len(tokens) // 4)
    result = _aligned(words.size).reshape(words.shape[0], words.shape[2], together)
    result[...] = words.transpose(0, 2, 1)
    return result


def _aligned(count: int) -> np.ndarray:
    block = np.empty(count + 16, np.uint32)
    return block[-block.ctypes.data % 64 // 4 :][:count]


def operations(windows: int) -> int:
    """Multiplications and additions of one pass."""
    return 2 * QUERY_TOKENS * WINDOW_TOKENS * windows * DEPTH
