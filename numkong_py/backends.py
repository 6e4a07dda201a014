"""The table of rows as Python sees it: device rows and CPU rows, best first, and the choice of one."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from .arrays import Collection
from .cpu import cpu_rows, kernel_kinds
from .cuda import cuda_rows
from .dtypes import name_of
from .errors import BackendUnavailable, DeviceMismatch, InvalidArgument, MissingKernel
from .layout import Coding, Contents
from .reference import MaxSimResult

__all__ = ["BACKENDS", "Row", "backends", "find_kernel", "select"]


class Row(Protocol):
    """What `PackedTensor` and the scoring functions ask of a row; `numkong_py.cpu.CpuRow` says what each method does.

    A row may also have ``topk(queries, documents, k, candidates=, block=, progress=, **options)``, to select where its
    scores are instead of in host memory, ``adopt(collection)``, to take queries for one call without a copy, and
    ``in_place(collection)``, to score documents once where they lie. CPU rows also take a coding, and have
    ``take(contents, sets, row)`` for packings that were made with one.
    """

    name: str
    required: int
    dtypes: tuple[str, ...]
    device: str
    available: bool
    reason: str | None

    def pack_size(self, documents: int, tokens: int, depth: int, dtype: str, *coding: Coding) -> int: ...
    def pack(self, collection: Collection, normalize: bool = False, *coding: Coding) -> Contents: ...
    def unpack(self, contents: Contents, begin: int, end: int) -> Any: ...
    def first_nonfinite(self, contents: Contents) -> int | None: ...
    def read_candidates(self, candidates: Any, rows: int, documents: Any) -> Any: ...
    def check_output(self, out: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any: ...
    def score(self, queries: Any, documents: Any, *, metric: int, **options: Any) -> MaxSimResult: ...


BACKENDS: tuple[Row, ...] = (*cuda_rows(), *cpu_rows())
DEVICES = ("cpu", "cuda")


def backends() -> tuple[Row, ...]:
    """Every row of the table, best first, whether it is available or not.

    Returns
    -------
    tuple of rows
        With ``.name``, ``.required`` (a `Capability`), ``.dtypes`` (``"bf16"``, ``"f16"``, ``"f32"``), ``.device``
        (``"cpu"`` or ``"cuda"``), ``.available`` and ``.reason`` (why not, or None).

    Raises
    ------
    InvalidArgument
        On ``.available`` and ``.reason``, when ``NUMKONG_CAPABILITIES`` names something that does not exist.

    Examples
    --------
    >>> [row.available for row in backends() if row.name == "serial"]
    [True]
    """
    return BACKENDS


def _device_kind(device: str) -> str:
    return device.partition(":")[0]


def _named(backend: Any, dtype: str, device: str) -> Row:
    """The row that was asked for by name, if it can run; a forced name is never replaced by another row."""
    found = [row for row in BACKENDS if row is backend or row.name == backend]
    if not found:
        raise InvalidArgument(f"backend: {backend!r} is no row; wanted one of {', '.join(r.name for r in BACKENDS)}")
    row = found[0]
    peers = [other for other in BACKENDS if other.device == row.device]
    if dtype not in row.dtypes:
        others = ", ".join(other.name for other in peers if dtype in other.dtypes)
        raise MissingKernel(f"backend: {row.name!r} has no {dtype} kernel; pass backend=None or one of {others}")
    if not row.available:
        usable = ", ".join(other.name for other in peers if other.available) or "none"
        raise BackendUnavailable(
            f"backend: {row.name!r} is not available: {row.reason}; available on {row.device}: {usable}"
        )
    if row.device != _device_kind(device):
        raise DeviceMismatch(f"backend: {row.name!r} works on {row.device}, and the array is on {device}")
    return row


def select(dtype: str, device: str = "cpu", *, backend: Any = None, capabilities: int | None = None) -> Row:
    """The row that packs and scores a dtype on a device: the one that is forced by name, else the best within the mask.

    Raises
    ------
    InvalidArgument, MissingKernel, BackendUnavailable, DeviceMismatch

    Examples
    --------
    >>> select("f32", capabilities=1).name
    'serial'
    """
    kind = _device_kind(device)
    if kind not in DEVICES:
        raise InvalidArgument(f"device: {device!r}, wanted cpu, cuda or cuda:<index>")
    if backend is not None:
        return _named(backend, dtype, device)
    for row in BACKENDS:
        if row.device != kind or dtype not in row.dtypes or not row.available:
            continue
        if capabilities is None or not int(row.required) & ~int(capabilities):
            return row
    within = "" if capabilities is None else f" within capabilities {int(capabilities):#x}"
    raise MissingKernel(f"no available {kind} row has {dtype} kernels{within}; numkong_py.backends() says why")


def find_kernel(kind: str, dtype: Any, capabilities: int | None = None) -> Row:
    """The row whose kernel a call would run.

    Parameters
    ----------
    kind : str
        ``"pack_size"``, ``"packed_shape"``, ``"pack"``, ``"maxsim_packed"``, ``"corpus"`` or ``"unpack"``.
    dtype : str or dtype
    capabilities : Capability, optional
        Default: what is enabled.

    Raises
    ------
    MissingKernel
        No available row has it.
    InvalidArgument
        There is no such kind.

    Examples
    --------
    >>> find_kernel("pack", "bf16", 1).name
    'serial'
    """
    if kind not in kernel_kinds():
        raise InvalidArgument(f"kind: {kind!r}, wanted one of {', '.join(kernel_kinds())}")
    return select(name_of(dtype), capabilities=capabilities)
