"""The gradient by queries, run on the host: the kernels' own source, a thread for each of CUDA's, against float64.

f32 tokens alone: what is written in PTX (loads under a predicate, conversions to 16 bits) is replaced or left out.
"""

from __future__ import annotations

import ctypes
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracle import ROOT

from numkong_py import reference

CUDA = ROOT / "numkong_py" / "cuda"
COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler to build the kernels with"),
    pytest.mark.skipif(sys.platform != "linux", reason="POSIX barriers are used, which only Linux is sure to have"),
]

TOKENS, GRADIENT = "3Qq2i", "2Q2i"  # as in numkong_py/cuda/gradient.py, which needs CuPy
QUERIES = struct.Struct(f"@{TOKENS}{TOKENS}{GRADIENT}4Q3i4x")
SLICED = struct.Struct(f"@{TOKENS}{GRADIENT}Qi4x")
RAGGED = [0, 1, 63, 64, 5, 30, 0, 17]


def between(text: str, begin: str, end: str, body: str) -> str:
    """The text with what lies between two marks replaced."""
    head, found, rest = text.partition(begin)
    assert found and end in rest, f"gather.cuh has changed: {begin!r} .. {end!r}"
    return head + begin + body + end + rest.partition(end)[2]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("kernels")
    text = (CUDA / "gather.cuh").read_text()
    for name, size in (("uint4 load_16_bytes", 16), ("float load_f32", 4)):
        body = f"    {name.split()[0]} r = {{}};\n    if (there) memcpy(&r, from, {size});\n    return r;\n"
        text = between(text, f"DEVICE {name}(const void* from, bool there) {{\n", "}\n", body)
    text = between(text, "DEVICE u16 to_16_bits(float x) ", "DEVICE void store_piece", "{ return 0; }\n")
    (folder / "gather.cuh").write_text(text)
    (folder / "ptx.cuh").write_text((ROOT / "tests" / "emulation" / "cuda_threads.h").read_text())
    built: dict[str, Any] = {}

    def library(kernel: str, **macros: int) -> Any:
        name = "_".join([kernel, *map(str, macros.values())])
        if name not in built:
            source, image = folder / f"{name}.cpp", folder / f"{name}.so"
            entry = f'extern "C" void run(const void* p, u32 x, u32 y) {{ run_grid<Params>({kernel}, p, x, y); }}'
            source.write_text((CUDA / f"{kernel}.cu").read_text() + entry)
            defined = [f"-D{key}={value}" for key, value in macros.items()]
            options = ["-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-pthread", *defined, f"-I{folder}"]
            done = subprocess.run([str(COMPILER), *options, "-o", image, source], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            built[name] = ctypes.CDLL(str(image)).run
        return built[name]

    return library


def side(rows: np.ndarray, lengths: list[int], kept: list[Any]) -> tuple[int, ...]:
    """Fields of `Tokens`; `kept` holds on to what they point to."""
    squares = (rows.astype(np.float64) ** 2).sum(1)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    kept += [squares, offsets]
    uniform = len(set(lengths)) == 1
    where = 0 if uniform else offsets.ctypes.data
    return rows.ctypes.data, squares.ctypes.data, where, len(lengths), max(lengths), rows.shape[1]


def gradient(
    build: Callable[..., Any], lengths: tuple[list[int], list[int]], depth: int, layout: str, metric: str, split: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Of the kernels and of the reference."""
    rng = np.random.default_rng(depth)
    sets = [[rng.standard_normal((n, depth)).astype(np.float32) for n in counts] for counts in lengths]
    rows = [np.concatenate(one) for one in sets]
    count, documents, longest = len(lengths[0]), len(lengths[1]), max(lengths[0])
    index = np.tile(np.arange(documents), (count, 1))
    if layout == "pairs":
        index = np.arange(count)[:, None]
    if layout == "candidates":
        index = rng.integers(-2, documents + 2, (count, 7))
    inside = np.where((index >= 0) & (index < documents), index, -1)
    winners = np.full((*index.shape, longest), -1, np.int32)
    for (i, k), b in np.ndenumerate(inside):
        if b >= 0 and lengths[1][b]:
            winners[i, k, : lengths[0][i]] = rng.integers(0, lengths[1][b], lengths[0][i])
    weights = rng.standard_normal(index.shape).astype(np.float32)
    weights[0, 0] = 0
    wanted = reference.maxsim_grad(*sets, weights, argmax=winners, candidates=inside, metric=metric)[0]

    form = {"DTYPE": 2, "LANES": 8 if depth <= 64 else 16, "VECTOR": int(depth % 4 == 0), "OUT_F32": 1}
    columns = -(-depth // (8 * form["LANES"])) * 8 * form["LANES"]
    slots, slice_slots = index.shape[1], 64
    slices = -(-slots // slice_slots)
    out = np.full((len(rows[0]), depth), np.nan, np.float32)
    partial = np.full((slices, count * longest, columns), np.nan, np.float32)
    kept: list[Any] = []
    sides = [side(one, counts, kept) for one, counts in zip(rows, lengths)]
    to = (out.ctypes.data, 0, 0, depth)
    named = index.ctypes.data if layout == "candidates" else 0
    pointers = (named, winners.ctypes.data, weights.ctypes.data, partial.ctypes.data if split else 0)
    grid = -(-count * longest * form["LANES"] // 256)
    parameters = QUERIES.pack(*sides[0], *sides[1], *to, *pointers, slots, slice_slots, layout == "pairs")
    run = build("maxsim_grad_queries", **form, COSINE=int(metric == "cosine"))
    run(parameters, grid, slices if split else 1)
    if split:
        run = build("maxsim_grad_slices", **form, COSINE=0)
        run(SLICED.pack(*sides[0], *to, partial.ctypes.data, slices), grid, 1)
    return out, wanted


@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("depth", [33, 128, 260])
@pytest.mark.parametrize(
    "layout, queries, documents",
    [
        ("all", [20, 5, 0, 33], RAGGED),
        ("all", [32] * 3, [40] * 6),
        ("candidates", [20, 5, 0, 33], RAGGED),
        ("pairs", [20, 5, 0, 33], [64, 0, 7, 30]),
    ],
)
def test_layouts(
    build: Callable[..., Any], layout: str, queries: list[int], documents: list[int], depth: int, metric: str
) -> None:
    found, wanted = gradient(build, (queries, documents), depth, layout, metric, split=False)
    assert np.linalg.norm(found - wanted) <= 1e-6 * np.linalg.norm(wanted)


def test_slices_by_many_ctas_have_the_bits_of_one(build: Callable[..., Any]) -> None:
    lengths = [10, 3], [9] * 200
    split, wanted = gradient(build, lengths, 128, "all", "dot", split=True)
    whole, _ = gradient(build, lengths, 128, "all", "dot", split=False)
    np.testing.assert_array_equal(split, whole)
    assert np.linalg.norm(split - wanted) <= 1e-6 * np.linalg.norm(wanted)
