"""What this machine can do at best, measured: compiles ceilings.c and times its loops between the contenders."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import numkong_py as nk

SOURCE = Path(__file__).with_suffix(".c")
# What a loop needs, by the names of numkong_py.Capability, and the product that it is the ceiling of.
LOOPS = {
    "amx_int8": ("int8", "amxint8"),
    "amx_bf16": ("bf16", "amxbf16"),
    "f32_fma_512": ("f32", "avx512f"),
    "f32_fma_256": ("f32", "fma"),
    "bf16_dot_512": ("bf16", "avx512bf16"),
    "int8_dot_512": ("int8", "avx512vnni"),
    "int8_dot_256": ("int8", "avxvnni"),
    "int8_maddubs_256": ("int8", "avx2"),
    "memory_read": ("memory", "serial"),
}
RUN_SECONDS = 1e-3
MEMORY_BYTES = (256 << 20, 1 << 30)  # at least, at most; read piece by piece, round and round
MEMORY_PIECES = 16


def largest_cache() -> int:
    """Bytes of the largest cache that this process can see, 32 MiB where the system does not say."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=32 << 20)


class Ceilings:
    """The compiled loops that this processor can run.

    Attributes
    ----------
    names : tuple of str
        Loops of `LOOPS` that can run here; none where there is no C compiler.
    reason : str or None
        Why there are none.
    """

    def __init__(self, threads: int = 1, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.names: tuple[str, ...] = ()
        self.reason: str | None = None
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._rounds: dict[str, int] = {}
        self._piece = 0
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            self.reason = "no C compiler"
            return
        self._library = self._compile(compiler)
        count = range(self._library.ceiling_count())
        self._index = {self._library.ceiling_name(i).decode(): i for i in count}
        found = nk.capabilities()
        self.names = tuple(n for n, (_, need) in LOOPS.items() if n in self._index and nk.Capability[need] in found)
        self._operands = self._random_operands()
        self._memory: np.ndarray | None = None

    def _compile(self, compiler: str) -> ctypes.CDLL:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "ceilings.so"
            command = [compiler, "-std=gnu99", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(target)]
            subprocess.run(command, check=True)
            library = ctypes.CDLL(str(target))
        library.ceiling_name.restype = ctypes.c_char_p
        library.ceiling_per_round.restype = ctypes.c_int64
        library.ceiling_run.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
        library.ceiling_run.restype = None
        return library

    def _random_operands(self) -> dict[str, np.ndarray]:
        """Operands for every product; bf16 ones are the upper halves of f32 ones."""
        rng = np.random.default_rng(0)
        count = self._library.ceiling_operand_bytes()
        floats = rng.standard_normal(count // 2).astype(np.float32)
        return {
            "int8": rng.integers(-127, 128, count).astype(np.int8),
            "f32": floats,
            "bf16": (floats.view(np.uint32) >> 16).astype(np.uint16),
        }

    def _buffer(self, product: str) -> np.ndarray:
        if product != "memory":
            return self._operands[product]
        if self._memory is None:
            least, most = MEMORY_BYTES
            size = min(most, max(least, 4 * largest_cache()))
            self._memory = np.arange(size // 8, dtype=np.uint64)
        return self._memory

    def _run(self, name: str, rounds: int) -> float:
        """Seconds of a loop on every thread at once; each thread reads its own part of a piece of the memory."""
        product = LOOPS[name][0]
        buffer = self._buffer(product)
        start, part = buffer.ctypes.data, 0
        if product == "memory":
            piece_bytes = buffer.nbytes // MEMORY_PIECES
            start += -start % 64 + self._piece * piece_bytes
            part = piece_bytes // self._threads // 64 * 64
            self._piece = (self._piece + 1) % (MEMORY_PIECES - 1)

        def run(thread: int) -> None:
            self._library.ceiling_run(self._index[name], start + thread * part, rounds)

        begin = self._clock()
        if self._pool is None:
            run(0)
        else:
            list(self._pool.map(run, range(self._threads)))
        return self._clock() - begin

    def sample(self, name: str) -> float:
        """Giga-operations (or gigabytes) a second of all threads together: the best of three runs of a millisecond."""
        per_round = self._library.ceiling_per_round(self._index[name])
        if name not in self._rounds:
            self._rounds[name] = self._calibrate(name, per_round)
        rounds = self._rounds[name]
        return per_round * rounds * self._threads / min(self._run(name, rounds) for _ in range(3)) * 1e-9

    def sample_all(self) -> dict[str, float]:
        """One sample of every loop."""
        return {name: self.sample(name) for name in self.names}

    def _calibrate(self, name: str, per_round: int) -> int:
        """Rounds of a run; longer on several threads, to outlast their start."""
        if LOOPS[name][0] == "memory":
            return self._buffer("memory").nbytes // MEMORY_PIECES // self._threads // per_round
        target = RUN_SECONDS * (1 if self._threads == 1 else 4)
        rounds = 1000
        while (seconds := min(self._run(name, rounds) for _ in range(3))) < target / 2:
            rounds = int(rounds * min(10, 0.8 * target / max(seconds, 1e-7))) + 1
        return rounds
