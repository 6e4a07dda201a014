"""Which variant of a kernel runs for which shape: a short static table, nothing is tuned at run time.

Comments name the workloads behind a row (``bench/results/h200-cuda.jsonl``, field ``workload``).
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ARGMAX", "DEPTH_CLASSES", "MAX_QUERY_ROWS", "SCORE", "SCREEN", "Variant", "all_variants", "forward"]

SCORE, ARGMAX, SCREEN = 0, 1, 2  # MODE of forward.cuh
MAX_QUERY_ROWS = 256  # of a CTA, every variant
SHARED_BYTES = 227 * 1024  # a CTA of compute capability 9.0 at most
STATIC_BYTES = 4 * 1024  # barriers, sums, and what aligning the ring costs
RING_BYTES = 192 * 1024  # 64-token stages of 8 or 16 KiB
RESIDENT_BYTES = 128 * 1024
DEPTH_CLASSES = (64, 96, 128, 256, 512, 1024, 4096)  # depths that between them pick every variant


class Variant(NamedTuple):
    """One compiled form of a forward kernel.

    Attributes
    ----------
    source : str
    rows, ctas : int
        Query rows a CTA, CTAs a multiprocessor.
    tile_tokens, stages : int
        Document tokens a tile; stages of the ring.
    shared_bytes : int
        Dynamic shared memory.
    shape : tuple of (str, int)
        What the file is specialised by beside mode and type.
    """

    source: str
    rows: int
    ctas: int
    tile_tokens: int
    stages: int
    shared_bytes: int
    shape: tuple[tuple[str, int], ...]

    @property
    def groups(self) -> int:
        """16-row groups a CTA."""
        return self.rows // 16

    @property
    def threads(self) -> int:
        """One or two consumer warpgroups and the producer's."""
        return (2 if self.rows == 64 else 3) * 128

    def macros(self, mode: int, dtype: str) -> dict[str, int]:
        """What the file is compiled with; f32 is screened by its f16 plane."""
        return {"ROWS": self.rows, **dict(self.shape), "MODE": mode, "BF16": int(dtype == "bf16")}


def _rows(query_rows: int) -> int:
    """Query rows a CTA: short queries are bound by memory; 256 rows read a document from L2 half as often as 128.

    1x1000,32x300 and 32x1024: 64; 128x1024: 128; 512x1024, 1024x1024, 32x1000,32x180: 256.
    """
    return 64 if query_rows <= 64 else 128 if query_rows <= 128 else 256


def _shallow(rows: int, stride: int, mode: int) -> Variant:
    """Queries in registers. Two CTAs of 64 rows hide each other's ends; an index a row does not fit theirs."""
    classes = (4, 6, 8) if rows == 256 else (4, 8)  # up to 128 rows memory is the limit, not k-steps over zeros
    steps = next(steps for steps in classes if stride <= 16 * steps)  # so that no new depth compiles anything
    ctas = 2 if rows == 64 and mode == SCORE else 1
    ring = RING_BYTES // ctas
    stages = ring // (8192 * ((steps + 3) // 4))
    shape = (("KSTEPS", steps), ("CTAS", ctas), ("RING_BYTES", ring))
    return Variant("maxsim_forward_sm90.cu", rows, ctas, 64, stages, ring + 1024, shape)


def _deep(rows: int, stride: int) -> Variant:
    """Both operands in shared memory, the queries for good where they fit."""
    query_bytes, document_bytes = rows * 128 * ((stride + 63) // 64), 128 * 128
    resident = query_bytes <= RESIDENT_BYTES
    room = SHARED_BYTES - STATIC_BYTES - (query_bytes if resident else 0)
    stage = document_bytes + (0 if resident else rows * 128)
    stages = min(14, room // stage)
    shared_bytes = (query_bytes if resident else 0) + stages * stage + 1024
    return Variant("maxsim_deep_sm90.cu", rows, 1, 128, stages, shared_bytes, (("RESIDENT", int(resident)),))


def forward(query_rows: int, stride: int, mode: int) -> Variant:
    """The variant for a number of query rows (each query padded to 16) and a depth (padded to 8)."""
    rows = _rows(query_rows)
    return _shallow(rows, stride, mode) if stride <= 128 else _deep(rows, stride)


def all_variants(mode: int, strides: tuple[int, ...]) -> set[Variant]:
    """Every variant that some query count picks at these depths."""
    return {forward(rows, stride, mode) for stride in strides for rows in (64, 128, 256)}
