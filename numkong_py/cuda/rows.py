"""The two CUDA rows of the table of backends. Nothing here touches a device before it is asked."""

from __future__ import annotations

from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ..errors import BackendUnavailable

__all__ = ["CudaRow", "best_row", "cuda_rows"]


class CudaRow:
    """One row of the table of backends.

    Attributes
    ----------
    name : str
        ``"sm90"`` (wgmma, Hopper alone) or ``"sm80"`` (mma.sync, Ampere and everything newer).
    device : str
        ``"cuda"``.
    dtypes : tuple of str
    required : int
        CPU capabilities: none.
    """

    device = "cuda"
    dtypes = ("bf16", "f16", "f32")
    required = 0

    def __init__(self, name: str, layout: int) -> None:
        self.name, self.layout = name, layout

    def __reduce__(self) -> tuple[Any, ...]:
        return _row_named, (self.name,)

    def __repr__(self) -> str:
        state = "available" if self.available else f"not available: {self.reason}"
        return f"<numkong_py row {self.name!r} on {self.device}: {' '.join(self.dtypes)}, {state}>"

    @property
    def available(self) -> bool:
        """Whether a device of this machine can run it; the first question starts the CUDA runtime."""
        return self.reason is None

    @cached_property
    def reason(self) -> str | None:
        """Why it cannot run here, or None."""
        if find_spec("cupy") is None:
            return "CuPy is not installed; pip install numkong-py[cuda12] or numkong-py[cuda13]"
        try:
            found = _capabilities()
        except Exception as error:  # whatever the driver, the runtime or CuPy cannot do here
            return f"no CUDA device: {str(error).splitlines()[0]}"
        if not any(self.runs_on(capability) for capability in found):
            have = ", ".join(map(str, found)) or "none"
            return f"devices have compute capability {have}, {self.name} wants {self.wanted}"
        return None

    @property
    def wanted(self) -> str:
        """Compute capability, in words."""
        return "90" if self.name == "sm90" else "80 or newer"

    def runs_on(self, capability: int) -> bool:
        """Whether its kernels run on a device of that compute capability."""
        return capability == 90 if self.name == "sm90" else capability >= 80

    # ---------------------------------------------------------------- for PackedTensor, see packed.py
    def pack_size(self, documents: int, tokens: int, depth: int, dtype: str) -> int:
        """Bytes of a packed collection: tokens (for f32 a f16 plane as well), norms, offsets."""
        stride = (depth + 7) // 8 * 8
        token = 2 * stride + 8 + (4 * depth if dtype == "f32" else 0)
        return tokens * token + 16 * (documents + 1) + 8 * (documents + 1)

    def pack(self, collection: Any, normalize: bool = False) -> Any:
        """Pack a collection on its device."""
        return _packed().pack(self, collection, normalize)

    def adopt(self, collection: Any) -> Any:
        """Take device arrays for one call, with nothing copied or computed that scoring may not need."""
        return _packed().adopt(self, collection)

    def unpack(self, contents: Any, begin: int, end: int) -> Any:
        """Tokens begin .. end as they were given (bf16 as its bits)."""
        return _packed().unpack(contents, begin, end)

    def first_nonfinite(self, contents: Any) -> int | None:
        """First token with a NaN or an infinity, or None."""
        return _packed().first_nonfinite(contents)

    def read_candidates(self, candidates: Any, rows: int, documents: Any) -> Any:
        """Document indices as `score` takes them."""
        return _packed().read_candidates(candidates, rows, documents)

    def check_output(self, out: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """The caller's array for scores, if scores can be written to it."""
        return _packed().check_output(out, shape, dtype)

    def score(self, queries: Any, documents: Any, **options: Any) -> Any:
        """Score packed query sets against packed documents, on the current stream."""
        return _packed().score(queries, documents, **options)

    def topk(self, queries: Any, documents: Any, k: int, **options: Any) -> Any:
        """The k best documents of each query, selected on the device."""
        return _packed().topk(queries, documents, k, **options)


@cache
def _packed() -> ModuleType:
    return import_module(".packed", __package__)


SM90, SM80 = CudaRow("sm90", 0x90), CudaRow("sm80", 0x80)


def cuda_rows() -> tuple[CudaRow, ...]:
    """The CUDA rows, best first; nothing is loaded until ``available`` or ``reason`` is read."""
    return SM90, SM80


def _row_named(name: str) -> CudaRow:
    return next(row for row in cuda_rows() if row.name == name)


@cache
def _capabilities() -> tuple[int, ...]:
    import cupy

    return tuple(int(cupy.cuda.Device(i).compute_capability) for i in range(cupy.cuda.runtime.getDeviceCount()))


def best_row(device: int) -> str:
    """Name of the best row for a device.

    Raises
    ------
    BackendUnavailable
        The device is older than compute capability 8.0.
    """
    capability = _capabilities()[device]
    for row in cuda_rows():
        if row.runs_on(capability):
            return row.name
    raise BackendUnavailable(f"cuda:{device}: compute capability {capability}, wanted 80 or newer; use a CPU row")
