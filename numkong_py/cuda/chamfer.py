"""The Chamfer distance and its gradient on the device.

Clouds of up to three coordinates are put into Morton order and searched tile by tile, passing by what is too far away;
deeper ones are compared pair by pair. Both choose by f32 differences (the bound is in the kernels' headers) and give
the same neighbours as a search of all pairs in that arithmetic; distances are then f64. Everything is queued on the
caller's current stream and nothing waits for the device.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from . import gradient, scoring
from .collection import CudaCollection, on_device
from .compile import kernel
from .gradient import Side
from .kernels import DTYPE_IDS
from .sorting import sort_pairs

__all__ = ["chamfer", "chamfer_grad"]

CELL_DEPTH = 3  # coordinates up to which cells are searched
TILE, SUPER, DEEP_POINTS = 32, 1024, 64  # points of a tile, of a CTA of chamfer_cells, of a CTA of chamfer_deep
SHORT_SORT = 1 << 17  # points of a cloud up to which three digits are enough cells; four beyond
NO_EXTENT = 0x80  # in every byte: below the ordered bits of every number but the very lowest

CLOUDS = "2Q2i2Q2i2q2i"  # Clouds of chamfer.cuh
CELLS = struct.Struct(f"@{CLOUDS}6Qi")  # Params of chamfer_cells.cu
NEAREST = struct.Struct(f"@{CLOUDS}5Qqi")  # of chamfer_nearest.cu
DEEP = struct.Struct(f"@{CLOUDS}2Qi")  # of chamfer_deep.cu
SQUARES = struct.Struct(f"@{CLOUDS}4Qi")  # of chamfer_squares.cu
SUM = struct.Struct(f"@{CLOUDS}3Q3i")  # of chamfer_sum.cu


class Clouds(NamedTuple):
    """Two batches of equally many clouds on one device, and the stream that works on them."""

    p: CudaCollection
    q: CudaCollection
    stream: int

    @classmethod
    def of(cls, p: Side, q: Side) -> Clouds:
        """Both sides as the device sees them; its device must be current."""
        stream = cp.cuda.get_current_stream().ptr
        clouds = cls(gradient.collection_of(p), gradient.collection_of(q), stream)
        clouds.p.join(stream)
        clouds.q.join(stream)
        return clouds

    @property
    def points(self) -> tuple[int, int]:
        """Points of each side."""
        return tuple(int(side.host_offsets[-1] - side.host_offsets[0]) for side in self[:2])

    @property
    def form(self) -> dict[str, int]:
        """Macros of kernels that read points."""
        return {"DTYPE": DTYPE_IDS[self.p.dtype]}

    def parameters(self) -> tuple[int, ...]:
        """Fields of the struct."""
        fields: list[int] = []
        for side in self[:2]:
            rows = side.plane if side.originals is None else side.originals
            fields += (rows.data.ptr, side.offsets_pointer, side.longest, rows.shape[1])
        return (*fields, *self.points, self.p.count, self.p.depth)

    def tiles(self, size: int) -> int:
        """Tiles of so many points, with the gaps of their numbers."""
        return sum(self.points) // size + 2 * self.p.count

    def launch(self, source: str, threads: int, grid: int, parameters: bytes, **macros: int) -> None:
        """Queue a kernel."""
        kernel(source, self.p.row, self.p.device_id, threads, **macros).launch(grid, self.stream, parameters)


# ------------------------------------------------------------------------------------- neighbours


def _nearest_in_cells(clouds: Clouds, nearest: tuple[cp.ndarray, cp.ndarray], both: bool) -> None:
    total, sets = sum(clouds.points), 2 * clouds.p.count
    largest = max(clouds.p.longest, clouds.q.longest)
    set_bits = (sets - 1).bit_length()
    digits = 3 if largest <= SHORT_SORT and set_bits < 16 else 4
    cell_bits = min(10, max(1, (8 * digits - set_bits) // 3))
    extent = scoring.keep(cp.empty(6 * clouds.p.count, np.int32))
    keys, values = scoring.keep(cp.empty(total, np.uint64)), scoring.keep(cp.empty(total, np.uint32))
    points = scoring.keep(cp.empty((total, 4), np.float32))
    tiles = scoring.keep(cp.empty((clouds.tiles(TILE), 8), np.float32))
    supers = scoring.keep(cp.empty((clouds.tiles(SUPER), 8), np.float32))
    cp.cuda.runtime.memsetAsync(extent.data.ptr, NO_EXTENT, extent.nbytes, clouds.stream)

    def cells(step: int, order: cp.ndarray) -> None:
        arrays = (extent, keys, order, points, tiles, supers)
        parameters = CELLS.pack(*clouds.parameters(), *(array.data.ptr for array in arrays), cell_bits)
        clouds.launch("chamfer_cells.cu", SUPER, clouds.tiles(SUPER), parameters, **clouds.form, STEP=step)

    cells(0, values)
    cells(1, values)
    bits = 3 * cell_bits + set_bits
    _, order = sort_pairs(keys, values, bits, clouds.p.row, clouds.p.device_id, clouds.stream)
    cells(2, order)
    slots = clouds.tiles(TILE)
    pointers = [array.data.ptr for array in (points, tiles, supers, *nearest)]
    parameters = NEAREST.pack(*clouds.parameters(), *pointers, slots, both)
    clouds.launch("chamfer_nearest.cu", 128, -(-slots // 4), parameters)


def _nearest(clouds: Clouds, both: bool) -> tuple[cp.ndarray, cp.ndarray]:
    """Position of every point's neighbour in the other cloud, int32 a point; -1 where that cloud is empty."""
    nearest = tuple(scoring.keep(cp.empty(count, np.int32)) for count in clouds.points)
    for array in nearest:
        cp.cuda.runtime.memsetAsync(array.data.ptr, 0xFF, array.nbytes, clouds.stream)
    if 0 in clouds.points:
        return nearest
    if clouds.p.depth <= CELL_DEPTH:
        _nearest_in_cells(clouds, nearest, both)
        return nearest
    parameters = DEEP.pack(*clouds.parameters(), *(array.data.ptr for array in nearest), both)
    clouds.launch("chamfer_deep.cu", 256, clouds.tiles(DEEP_POINTS), parameters, **clouds.form)
    return nearest


def _squares(clouds: Clouds, nearest: tuple[cp.ndarray, cp.ndarray], both: bool) -> tuple[cp.ndarray, cp.ndarray]:
    """Squared distances to the neighbours, f64 a point."""
    squares = tuple(scoring.keep(cp.empty(count, np.float64)) for count in clouds.points)
    lanes = 1 if clouds.p.depth < 8 else 16
    pointers = [array.data.ptr for array in nearest]
    pointers = [pointers[0], pointers[1] if both else 0, *(array.data.ptr for array in squares)]
    parameters = SQUARES.pack(*clouds.parameters(), *pointers, lanes)
    if 0 not in clouds.points:
        clouds.launch("chamfer_squares.cu", 256, clouds.tiles(256), parameters, **clouds.form)
    return squares


# ------------------------------------------------------------------------------------- the two functions


def chamfer(
    p: Side, q: Side, *, reduction: str, squared: bool, both: bool
) -> tuple[cp.ndarray, cp.ndarray, cp.ndarray | None]:
    """Chamfer distances and neighbours; `numkong_py.chamfer` says what each argument is."""
    with on_device(_device_of(p)):
        clouds = Clouds.of(p, q)
        distances = cp.empty(clouds.p.count, np.float64)
        nearest = _nearest(clouds, both)
        squares = _squares(clouds, nearest, both)
        pointers = [array.data.ptr for array in squares]
        parameters = SUM.pack(
            *clouds.parameters(), *pointers, distances.data.ptr, both, not squared, reduction == "mean"
        )
        if clouds.p.count:
            clouds.launch("chamfer_sum.cu", 1024, clouds.p.count, parameters)
        return distances, nearest[0], nearest[1] if both else None


def _device_of(side: Side) -> int:
    return int(side.device.partition(":")[2] or 0)


def _pair_weights(upstream: cp.ndarray, collection: CudaCollection, reduction: str) -> cp.ndarray:
    """What each point of a side weighs, one number a cloud."""
    if reduction == "sum":
        return upstream
    if collection.uniform:
        return upstream / np.float32(max(collection.longest, 1))
    counts = collection.offsets[1:] - collection.offsets[:-1]
    return upstream / cp.maximum(counts, 1).astype(np.float32)


def chamfer_grad(
    p: Side,
    q: Side,
    upstream: Any,
    *,
    nearest: Any,
    reduction: str,
    squared: bool,
    both: bool,
    need: tuple[bool, bool],
    dtype: str,
) -> tuple[cp.ndarray | None, cp.ndarray | None]:
    """Differentiate Chamfer distances at the neighbours; `numkong_py.chamfer` says what each argument is.

    A point's own neighbour and the points whose neighbour it is pull at it; a point has one owner, which finds the
    latter as the gradient of MaxSim finds what a token won. Sums are f32, in ascending order of the pulling point.
    """
    with on_device(_device_of(p)):
        clouds = Clouds.of(p, q)
        device = clouds.p.device_id
        outputs = tuple(gradient.Gradient.of(side, dtype) if wanted else None for side, wanted in zip((p, q), need))
        if 0 in clouds.points:
            for out in outputs:
                if out is not None:
                    out.array.fill(0)
            return tuple(None if out is None else out.array for out in outputs)
        if nearest is None:
            found = _nearest(clouds, both)
        else:
            given = [gradient.indices(one, np.int32, (-1,), device, "nearest") for one in nearest if one is not None]
            found = (scoring.keep(given[0]), scoring.keep(given[1]) if both else given[0])
        squares = None if squared else _squares(clouds, found, both)
        weights = gradient.weights_of(upstream, (clouds.p.count,), device)
        each = [scoring.keep(_pair_weights(weights, side, reduction)) for side in clouds[:2]]
        for side, out in enumerate(outputs):
            if out is None:
                continue
            own = None if side and not both else found[side]
            others = found[1 - side] if side or both else None
            pulls = Pulls(
                own, others, each[side], each[1 - side], None if squares is None else (squares[side], squares[1 - side])
            )
            _pull(clouds[side], clouds[1 - side], pulls, out, clouds.stream)
        return tuple(None if out is None else out.array for out in outputs)


class Pulls(NamedTuple):
    """What moves the points of one side: their own neighbours, and the points whose neighbours they are; None: nothing.

    Attributes
    ----------
    own, others : cupy.ndarray of int32 or None
        Neighbours of this side's points, and of the other side's.
    own_weights, other_weights : cupy.ndarray of float32, shape (clouds,)
    squares : pair of cupy.ndarray of float64, or None
        Squared distances of both, for plain distances.
    """

    own: cp.ndarray | None
    others: cp.ndarray | None
    own_weights: cp.ndarray
    other_weights: cp.ndarray
    squares: tuple[cp.ndarray, cp.ndarray] | None


def _pull(points: CudaCollection, others: CudaCollection, pulls: Pulls, out: gradient.Gradient, stream: int) -> None:
    own_squares, other_squares = (0, 0) if pulls.squares is None else (one.data.ptr for one in pulls.squares)
    gradient.pull_together(
        others, points, out, stream,
        0 if pulls.others is None else pulls.others.data.ptr, pulls.other_weights.data.ptr, other_squares, own_squares,
        0 if pulls.own is None else pulls.own.data.ptr, pulls.own_weights.data.ptr,
    )  # fmt: skip
