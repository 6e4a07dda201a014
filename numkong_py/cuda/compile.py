"""The one place where CUDA kernels are compiled, cached, loaded and launched.

NVRTC is reached through `cupy.cuda.nvrtc`, so any CUDA 12 or 13 build of CuPy will do. Images are kept on disk under a
name made of everything that went into them (source, shared headers, options, compiler version), so an entry is never
stale; files are written aside and renamed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BackendUnavailable

__all__ = [
    "Image",
    "Kernel",
    "architecture_option",
    "cache_directory",
    "compile_image",
    "compile_together",
    "image_key",
    "kernel",
]

HERE = Path(__file__).parent
MAX_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute
PARAMETER_BYTES = 4096  # of a launch at most


class Image(NamedTuple):
    """A compiled kernel: machine code (or PTX), and what the assembler said about it."""

    code: bytes
    log: str

    @property
    def registers(self) -> int:
        """Registers a thread at entry."""
        return int(re.search(r"Used (\d+) registers", self.log)[1])

    @property
    def spilled_bytes(self) -> int:
        """Bytes of registers that went to local memory."""
        return sum(int(count) for count in re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log))

    @property
    def wgmma_warnings(self) -> list[str]:
        """Lines with C7510 to C7518: the assembler serialised wgmma or ignored a register budget."""
        return [line for line in self.log.splitlines() if re.search(r"C751\d|serializ", line)]


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``$NUMKONG_CACHE``, else ``numkong_py`` under the user's cache directory."""
    chosen = os.environ.get("NUMKONG_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numkong_py"


@cache
def _source(name: str) -> str:
    return (HERE / name).read_text()


@cache
def _headers(name: str) -> tuple[str, ...]:
    """Files of this directory that a file includes, theirs as well."""
    found: dict[str, None] = {}
    for header in re.findall(r'^#include "(\w+\.cuh)"', _source(name), re.MULTILINE):
        found.update(dict.fromkeys((header, *_headers(header))))
    return tuple(found)


def architecture_option(row: str, capability: int, supported: tuple[int, ...]) -> str:
    """NVRTC's ``-arch`` for a row on a device.

    Parameters
    ----------
    row : str
        ``"sm90"`` (needs the architecture-specific target) or ``"sm80"``.
    capability : int
        Of the device, such as 90.
    supported : tuple of int
        What this NVRTC knows. A newer device gets PTX for the newest virtual architecture, which its driver assembles.
    """
    if row == "sm90":
        return "sm_90a"
    if capability in supported:
        return f"sm_{capability}"
    return f"compute_{max(known for known in supported if known <= capability)}"


def compile_image(source: str, architecture: str, macros: dict[str, int]) -> Image:
    """Compile one ``.cu`` file of this directory; needs NVRTC, no device.

    Raises
    ------
    BackendUnavailable
        NVRTC is missing or refused the source; the message holds its log.
    """
    from cupy.cuda import nvrtc

    options = (f"-arch={architecture}", "-std=c++17", "--ptxas-options=-v")
    options += tuple(f"-D{name}={value}" for name, value in sorted(macros.items()))
    names = _headers(source)
    texts = tuple(_source(name).encode() for name in names)
    program = nvrtc.createProgram(_source(source), source, texts, tuple(name.encode() for name in names))
    try:
        nvrtc.compileProgram(program, options)
        log = nvrtc.getProgramLog(program)
        if architecture.startswith("compute_"):
            code = nvrtc.getPTX(program)
            return Image(code if isinstance(code, bytes) else code.encode(), log)
        return Image(nvrtc.getCUBIN(program) + b"\0", log)  # CuPy drops the image's last byte, a zero
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise BackendUnavailable(
            f"{source}: NVRTC refused it for {architecture} with {macros}: {error}\n{log}"
        ) from None
    finally:
        nvrtc.destroyProgram(program)


def image_key(source: str, architecture: str, macros: dict[str, int]) -> str:
    """Name of a compiled kernel: its file and a hash of all that goes into it, the compiler's version included."""
    from cupy.cuda import nvrtc

    texts = (_source(source), *map(_source, _headers(source)))
    parts = (*texts, architecture, repr(sorted(macros.items())), repr(nvrtc.getVersion()))
    return f"{Path(source).stem}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}"


def _cached_code(source: str, architecture: str, macros: dict[str, int]) -> bytes:
    path = cache_directory() / f"{image_key(source, architecture, macros)}.image"
    try:
        stored = path.read_bytes()
    except OSError:
        stored = b""
    if stored[:32] == hashlib.sha256(stored[32:]).digest():
        return stored[32:]
    code = compile_image(source, architecture, macros).code
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(aside, path)
    except OSError:
        pass  # a read-only or full disk only costs the next process its compile
    return code


def _architecture(row: str, device: int) -> str:
    import cupy
    from cupy.cuda import nvrtc

    capability = int(cupy.cuda.Device(device).compute_capability)
    return architecture_option(row, capability, tuple(nvrtc.getSupportedArchs()))


def compile_together(source: str, row: str, device: int, forms: list[dict[str, int]]) -> None:
    """Compile several forms of a file that is about to be used, side by side, into the cache."""
    architecture = _architecture(row, device)
    with ThreadPoolExecutor(len(forms)) as pool:
        list(pool.map(lambda macros: _cached_code(source, architecture, macros), forms))


class _Block(threading.local):
    """Where a thread lays out the parameters of a launch; the driver copies them before a launch returns."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(PARAMETER_BYTES)
        self.view = memoryview(self.memory).cast("B")
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.memory))
        self.address = ctypes.addressof(self.pointer)


_block = _Block()


class Kernel:
    """A kernel loaded on one device.

    Parameters
    ----------
    code : bytes
        Image for that device, which is current.
    name : str
        Entry point.
    threads, shared_bytes : int
        Of a CTA; shared memory is the dynamic part.
    """

    def __init__(self, code: bytes, name: str, threads: int, shared_bytes: int) -> None:
        from cupy.cuda import driver, function

        self._module = function.Module()
        self._module.load(code)
        self._function = self._module.get_function(name)
        self._pointer = self._function.ptr
        self._launch = driver.launchKernel
        self.threads, self.shared_bytes = threads, shared_bytes
        if shared_bytes:  # beyond 48 KiB together with what the kernel has of its own
            driver.funcSetAttribute(self._function.ptr, MAX_DYNAMIC_SHARED_BYTES, shared_bytes)

    def launch(self, grid: int, stream: int, parameters: bytes | bytearray, rows: int = 1) -> None:
        """Queue `grid` x `rows` CTAs on a stream; `parameters` is the kernel's one struct."""
        block = _block
        block.view[: len(parameters)] = parameters
        self._launch(self._pointer, grid, rows, 1, self.threads, 1, 1, self.shared_bytes, stream, block.address, 0)


_kernels: dict[tuple[Any, ...], Kernel] = {}
_lock = threading.Lock()


def kernel(source: str, row: str, device: int, threads: int, shared_bytes: int = 0, **macros: int) -> Kernel:
    """The loaded kernel of a ``.cu`` file for a device, compiled at first need.

    Parameters
    ----------
    source : str
        File name; its stem is the entry point.
    row : str
        ``"sm90"`` or ``"sm80"``.
    device : int
        CUDA device, which is current.
    threads, shared_bytes : int
        Of a CTA.
    **macros : int
        What the file is specialised by.
    """
    key = (source, row, device, threads, shared_bytes, *macros.items())
    found = _kernels.get(key)
    if found is not None:
        return found
    with _lock:
        if key not in _kernels:
            code = _cached_code(source, _architecture(row, device), macros)
            _kernels[key] = Kernel(code, source.removesuffix(".cu"), threads, shared_bytes)
        return _kernels[key]
