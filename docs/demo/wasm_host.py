"""The WebAssembly module from Python, through wasmtime: what packs the demo's corpus, and what the tests drive.

The exports are those of ``c/wasm/entry.c``; `numkong.mjs` is the same for JavaScript.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import wasmtime

DTYPES = {"f32": 2, "f16": 3, "bf16": 4}  # nk_dtype_t
METRICS = {"dot": 0, "cosine": 1, "angular": 2}  # nk_metric_t


class Status(RuntimeError):
    """A call returned a status other than success; `name` is the status', as ``"pack_mismatch"``."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(f"{name}: {sentence}")
        self.name = name


class Result(NamedTuple):
    """Everything that a scoring call returns, ``[sets, documents]`` and ``[sets, documents, longest set]``."""

    scores: np.ndarray
    argmax: np.ndarray
    token_scores: np.ndarray
    bounds: np.ndarray


@dataclass(frozen=True)
class Packed:
    """A packed collection in the module's memory."""

    address: int
    nbytes: int
    dtype: str
    offsets: np.ndarray


class Module:
    """One instance of a module.

    Parameters
    ----------
    path : Path
        The ``.wasm`` file.
    deterministic : bool
        Let the engine give relaxed instructions the one meaning that the proposal calls deterministic, in place of the
        one that is fastest on this processor.
    """

    def __init__(self, path: Path, *, deterministic: bool = False) -> None:
        config = wasmtime.Config()
        config.wasm_relaxed_simd = True
        config.wasm_relaxed_simd_deterministic = deterministic
        engine = wasmtime.Engine(config)
        module = wasmtime.Module.from_file(engine, str(path))
        self.imports = [f"{wanted.module}.{wanted.name}" for wanted in module.imports]
        self._store = wasmtime.Store(engine)
        self._exports = wasmtime.Instance(self._store, module, []).exports(self._store)
        self._memory = self._exports["memory"]
        self._exports["_initialize"](self._store)
        names = {layout: self.call("row_name", layout) for layout in range(1, 64)}
        self._layouts = {self.text(name): layout for layout, name in names.items() if name}

    def call(self, name: str, *arguments: float) -> Any:
        """Call the export ``nk_wasm_<name>``."""
        return self._exports[f"nk_wasm_{name}"](self._store, *arguments)

    def check(self, status: float) -> None:
        """Raise `Status` for a negative status."""
        if status < 0:
            raise Status(
                self.text(self.call("status_name", int(status))), self.text(self.call("status_sentence", int(status)))
            )

    def text(self, address: int) -> str:
        """A string in the module's memory."""
        return bytes(self._memory.read(self._store, address, address + 256)).split(b"\0")[0].decode()

    def allocate(self, nbytes: float) -> int:
        """Memory of the module, on a boundary of 64 bytes."""
        address = self.call("allocate", float(nbytes))
        if address == 0:
            raise Status("bad_alloc", f"{nbytes} bytes are not to be had in the module's memory")
        return address % 2**32

    def release(self, *addresses: int) -> None:
        """Give memory back."""
        for address in addresses:
            self.call("release", address)

    def place(self, data: np.ndarray | bytes) -> int:
        """Copy bytes into the module's memory."""
        content = data.tobytes() if isinstance(data, np.ndarray) else data
        address = self.allocate(len(content))
        self._memory.write(self._store, content, address)
        return address

    def memory_bytes(self) -> int:
        """Size of the module's memory, which grows and never shrinks."""
        return self._memory.data_len(self._store)

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes out of the module's memory."""
        return bytes(self._memory.read(self._store, address, address + nbytes))

    def row(self, dtype: str) -> str:
        """Name of the best row for a dtype."""
        return self.text(self.call("row_name", self.call("best_row", DTYPES[dtype])))

    def layout(self, row: str) -> int:
        """Layout id of a row, by its name."""
        return self._layouts[row]

    def pack_size(self, dtype: str, documents: int, tokens: int, depth: int, row: str | None = None) -> int:
        """Bytes of a packed collection."""
        layout = self.layout(row or self.row(dtype))
        size = self.call("pack_size", layout, DTYPES[dtype], float(documents), float(tokens), float(depth))
        self.check(size)
        return int(size)

    def pack(
        self, tokens: np.ndarray, offsets: np.ndarray, dtype: str, *, row: str | None = None, normalize: bool = False
    ) -> Packed:
        """Pack ``[total, depth]`` tokens of sets that lie between `offsets`."""
        offsets = np.asarray(offsets, np.uint64)
        count, depth = len(offsets) - 1, tokens.shape[1]
        nbytes = self.pack_size(dtype, count, len(tokens), depth, row)
        vectors, starts, address = self.place(tokens), self.place(offsets), self.allocate(nbytes)
        layout = self.layout(row or self.row(dtype))
        try:
            self.check(self.call("pack", layout, DTYPES[dtype], vectors, starts, count, depth, int(normalize), address))
        finally:
            self.release(vectors, starts)
        return Packed(address, nbytes, dtype, offsets.astype(np.int64))

    def score(self, queries: Packed, documents: Packed, *, metric: str = "dot", reduction: str = "sum") -> Result:
        """Score every set of `queries` against every document."""
        sets, columns = len(queries.offsets) - 1, len(documents.offsets) - 1
        longest = int(np.diff(queries.offsets).max(initial=0))
        output = np.dtype(np.float64 if documents.dtype == "f32" else np.float32)
        shapes = {
            "scores": ((sets, columns), output),
            "argmax": ((sets, columns, longest), np.dtype(np.int32)),
            "token_scores": ((sets, columns, longest), output),
            "bounds": ((sets, columns), np.dtype(np.float64)),
        }
        places = {name: self.allocate(int(np.prod(shape)) * dtype.itemsize) for name, (shape, dtype) in shapes.items()}
        try:
            self.check(
                self.call(
                    "score",
                    queries.address,
                    documents.address,
                    0,
                    sets,
                    0,
                    columns,
                    METRICS[metric],
                    int(reduction == "mean"),
                    places["scores"],
                    places["bounds"],
                    places["argmax"],
                    places["token_scores"],
                    longest,
                )
            )
            arrays = {
                name: np.frombuffer(self.read(places[name], int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
                for name, (shape, dtype) in shapes.items()
            }
        finally:
            self.release(*places.values())
        return Result(**arrays)
