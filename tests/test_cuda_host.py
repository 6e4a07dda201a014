"""The host side of the CUDA rows without a GPU: a stand-in for CuPy over NumPy records the kernels a call launches.

Scores are not computed; what is checked is the way there: packing of every layout, the choice of kernels, parameter
structs that pack, shapes of results, and the public functions on "device" arrays. It runs in a process of its own.
"""

from __future__ import annotations

import importlib.machinery
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest


def test_host_side_with_a_stand_in_for_cupy() -> None:
    done = subprocess.run(
        [sys.executable, __file__], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


# ------------------------------------------------------------------------------------- the stand-in


class DeviceArray(np.ndarray):
    """A NumPy array that looks like a CuPy one: `data.ptr`, `device`, `get`."""

    @property
    def data(self) -> Any:
        root = self
        while isinstance(root.base, np.ndarray):
            root = root.base
        return SimpleNamespace(
            ptr=self.__array_interface__["data"][0], device_id=0, mem=MEMORY.setdefault(id(root), object())
        )

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return dict(self.__array_interface__)

    def get(self) -> np.ndarray:
        return np.array(self)


MEMORY: dict[int, object] = {}
FUNCTIONS = [
    *("abs", "arange", "argsort", "array", "ascontiguousarray", "asarray", "concatenate", "cumsum", "empty"),
    *("flatnonzero", "full", "isfinite", "maximum", "sqrt", "take_along_axis", "where", "zeros"),
]


class Context:
    """Stands for a device, a stream, an event or a module."""

    ptr, compute_capability = 1, "90"

    def __init__(self, *args: Any, **options: Any) -> None:
        self.attributes = {"MultiProcessorCount": 132}

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def nothing(self, *args: Any, **options: Any) -> Any:
        return None

    load = record = synchronize = wait_event = nothing

    def is_capturing(self) -> bool:
        return False

    def get_function(self, name: str) -> Context:
        return self


def stand_in() -> ModuleType:
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)

    def on_device(name: str) -> Any:
        return lambda *args, **options: np.asarray(getattr(np, name)(*args, **options)).view(DeviceArray)

    for name in FUNCTIONS:
        setattr(cupy, name, on_device(name))
    cupy.ndarray, cupy.cuda, cupy.inf, cupy.float32 = DeviceArray, cuda, np.inf, np.float32
    stream = Context()
    cuda.Device = cuda.Event = cuda.Stream = Context
    cuda.get_current_stream = lambda: stream
    cuda.alloc_pinned_memory = bytearray
    cuda.driver = SimpleNamespace(launchKernel=stream.nothing, funcSetAttribute=stream.nothing)
    cuda.function = SimpleNamespace(Module=Context)
    cuda.nvrtc = SimpleNamespace(getVersion=lambda: (13, 0), getSupportedArchs=lambda: (80, 90))
    cuda.runtime = SimpleNamespace(
        memcpyDeviceToHost=2,
        memcpyHostToDevice=1,
        memcpyAsync=stream.nothing,
        memsetAsync=stream.nothing,
        getDevice=lambda: 0,
        getDeviceCount=lambda: 1,
        pointerGetAttributes=lambda pointer: SimpleNamespace(type=0),
        CUDARuntimeError=RuntimeError,
    )
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda})
    return cupy


# ------------------------------------------------------------------------------------- the scenario


def scenario() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    cupy = stand_in()
    import ml_dtypes

    import numkong_py as nk
    from numkong_py import arrays, cuda
    from numkong_py.cuda import collection, compile
    from numkong_py.errors import DeviceMismatch

    launched: list[str] = []
    made = compile.kernel
    compile._cached_code = lambda *args: b"image"
    compile.Kernel.launch = lambda self, grid, stream, parameters, rows=1: launched.append(self.label)

    def named(source: str, *args: Any, **macros: int) -> Any:
        kernel = made(source, *args, **macros)
        kernel.label = source.removesuffix(".cu")
        return kernel

    from numkong_py.cuda import scoring, search

    collection.kernel = scoring.kernel = search.kernel = named
    collection._encode_tensor_map = lambda *args: bytes(128)
    real = arrays.device_of
    arrays.device_of = lambda x, argument: "cuda:0" if isinstance(x, DeviceArray) else real(x, argument)

    def kernels(call: Any, *args: Any, **options: Any) -> tuple[Any, list[str]]:
        launched.clear()
        result = call(*args, **options)
        return result, [name for name in launched if name != "token_stats"]

    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.sort(rng.integers(0, 2000, 19)), [2000]])
    for dtype, stored in (("bf16", np.uint16), ("f16", np.float16), ("f32", np.float32)):
        name = "bf16" if dtype == "bf16" else None
        loud = ["maxsim_sm80"] if dtype == "bf16" else []
        for depth, forward in ((96, "maxsim_forward_sm90"), (130, "maxsim_deep_sm90")):
            tokens = cupy.asarray(rng.integers(0, 5, (2000, depth)).astype(stored))
            query = tokens[:96].reshape(3, 32, depth)
            documents = cuda.pack(tokens, offsets=offsets, dtype=name)
            documents.prepare()
            direct = [forward, "refine_f32", "maxsim_sm80"] if dtype == "f32" else [forward, *loud]
            result, used = kernels(cuda.score, query, documents, dtype=name, return_argmax=True, return_bounds=True)
            assert used == direct and result.scores.shape == (3, 20) and result.argmax.shape == (3, 20, 32)
            assert result.bounds.shape == (3, 20) and result.token_scores is None
            cut = direct if dtype == "f32" else [forward, "combine", *loud]
            _, used = kernels(cuda.score, tokens[:1000], documents, dtype=name)
            assert used == cut
            _, used = kernels(cuda.score, query, documents, dtype=name, metric="cosine")
            assert used == ["maxsim_sm80"]
            listed = ["maxsim_sm80"] if dtype == "f32" else [forward, *loud]
            chosen = np.array([[0, -1, 3]] * 3)
            result, used = kernels(cuda.score, query, documents, dtype=name, candidates=chosen)
            assert used == listed and result.scores.shape == (3, 3)
            result, used = kernels(cuda.score, query, documents[4:7], dtype=name, pairs=True)
            assert used == listed and result.scores.shape == (3, 1)
            (scores, indices), used = kernels(cuda.topk, query, documents, 5, dtype=name, metric="angular")
            assert used[-1] == "topk" and scores.shape == indices.shape == (3, 5)
            host = np.asarray(tokens)
            (scores, _), used = kernels(cuda.stream_topk, query, host, offsets, 5, dtype=name, block=7)
            assert used.count("topk") == 2 * 3 - 1 and scores.shape == (3, 5)  # three blocks, two merges

            packed, queries = nk.pack(tokens, offsets=offsets, dtype=name), nk.pack(query, dtype=name)
            one = nk.pack(query[0], dtype=name)
            assert packed.device == "cuda:0" and packed.backend == "sm90" and (packed.lengths == np.diff(offsets)).all()
            assert nk.maxsim(queries, packed).shape == (3, 20) and nk.maxsim(one, packed[2:5]).shape == (3,)
            assert nk.maxsim_candidates(one, packed[2:9], [0, -1, 3]).shape == (3,)
            assert nk.maxsim_candidates(one, packed[2:9], cupy.asarray([0, 99, 3])).shape == (3,)
            assert nk.maxsim_pairs(queries, packed[2:5]).shape == (3,)
            assert nk.topk(one, packed, 4)[1].shape == (4,) and nk.topk(queries, packed[1:4], 40)[1].shape == (3, 40)
            assert nk.pack(query, mask=np.ones((3, 32), bool), dtype=name).tokens == 96
            assert nk.pack(query[0], mask=np.arange(32) % 2 == 0, dtype=name).tokens == 16
            assert len(packed[[3, 1]]) == 2
            _, used = kernels(nk.pack, tokens, offsets=offsets, dtype=name, normalize=True)
            assert used == ["normalize"]

            _, first = kernels(cuda.score, query, documents, dtype=name)
            _, again = kernels(cuda.score, query, documents, dtype=name)  # prepared launches: the same kernels
            assert again == first
            elsewhere = cuda.pack(query, dtype=name)
            elsewhere.device_id = 1
            for one, other in ((elsewhere, documents), (documents, elsewhere)):
                with pytest.raises(DeviceMismatch, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
                    cuda.score(one, other)
            plain = host[:5].view(ml_dtypes.bfloat16) if dtype == "bf16" else host[:5]
            moved = nk.pack([plain, plain[::-1]], backend="serial").to("cuda")
            back = np.asarray(moved[1].unpack())
            np.testing.assert_array_equal(back, host[:5][::-1])


if __name__ == "__main__":
    scenario()
