"""Scores on the device: picks a kernel by row, type, metric and shape, and queues it on the caller's current stream."""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import cupy as cp
import numpy as np

from ..errors import DeviceMismatch, InvalidArgument, NumKongError, ShapeMismatch, UnsupportedDtype
from . import launch_table
from .collection import CudaCollection, on_device, pack, pinned_word
from .compile import Kernel, compile_together, kernel
from .kernels import DTYPE_IDS
from .launch_table import Variant
from .plan import Pieces, balance, chunk_count, cut_documents, deal_documents

__all__ = ["Scores", "keep", "multiprocessors", "score", "warmup", "winners"]

METRICS = {"dot": 0, "cosine": 1, "angular": 2}
SCRATCH_BYTES = 256 << 20  # token maxima of pieces kept at a time; more queries go in several launches
# A second, on an H200 (the ceilings in bench/results); only to weigh a second kernel against idle CTAs.
MATRIX_FLOPS, MEMORY_BYTES = 7e14, 4.2e12
SECOND_KERNEL_SECONDS, SECOND_KERNEL_GROUPS = 4e-6, 6e9  # a launch; groups of 16 query tokens a second

FORWARD = struct.Struct("@128s128s15Qqf12i")  # Params of forward.cuh
COMBINE = struct.Struct("@9Qqf4i")  # of combine.cu
# What changes from call to call, and where it stands in those structs.
QUERY_MAP_AT, FORWARD_QUERIES_AT, FORWARD_OUTPUTS_AT, FORWARD_LOUD_AT = 128, 256, 256 + 6 * 8, 256 + 13 * 8
COMBINE_OFFSETS_AT, COMBINE_OUTPUTS_AT = 4 * 8, 6 * 8
OUTPUTS = struct.Struct("@3Q")  # scores, token scores, argmax
GENERAL_QUERIES, GENERAL_CALL = struct.Struct("@5Q"), struct.Struct("@5Q")  # of a side; outputs and loud flags
PAIR, ONE = struct.Struct("@2Q"), struct.Struct("@Q")
GENERAL_OUTPUTS_AT = 2 * 56 + 8
REFINE = struct.Struct("@15Qq4i")  # of refine_f32.cu
GENERAL = struct.Struct("@5Qq2i5Qq2i6Qd2q7i")  # of maxsim_sm80.cu
GENERAL_SHARED_BYTES = 2 * 16384 + 1024 + 40 * 1024  # stages, alignment, struct Shared
GENERAL_THREADS = 128
GENERAL_CTAS, LOUD_CTAS = 24, 3  # a multiprocessor; hardly any is loud
COMBINE_THREADS = 256, 1024  # least and most
REFINE_THREADS, REFINE_TOGETHER = 256, 16  # documents that half a warp takes together
SCAN_ELEMENTS = 64 * 256  # of a query: up to here every CTA looks for loud tokens itself


class Scores(NamedTuple):
    """What was asked for; the rest is None.

    Attributes
    ----------
    scores : cupy.ndarray, shape (queries, slots)
        f32 for bf16 and f16, f64 for f32.
    argmax : cupy.ndarray of int32, shape (queries, slots, longest query)
    token_scores : cupy.ndarray, shape of argmax
    bounds : cupy.ndarray of f64, shape of scores
    """

    scores: cp.ndarray
    argmax: cp.ndarray | None = None
    token_scores: cp.ndarray | None = None
    bounds: cp.ndarray | None = None


class Options(NamedTuple):
    """How scores are made, and on which stream."""

    metric: str
    mean: bool
    empty: float
    stream: int


class Outputs(NamedTuple):
    """Where a call writes: shapes (queries, slots) and (queries, slots, longest query)."""

    scores: cp.ndarray
    token_scores: cp.ndarray | None
    argmax: cp.ndarray | None

    def part(self, queries: slice) -> Outputs:
        """The rows of some queries."""
        return Outputs(*(None if array is None else array[queries] for array in self))


def _pointer(array: cp.ndarray | None) -> int:
    return 0 if array is None else array.data.ptr


# ------------------------------------------------------------------------------------- the device


class _Device(NamedTuple):
    """What calls need of a device."""

    multiprocessors: int
    # The word that kernels set when a bounded wait runs out; in host memory, so reading it waits for nothing.
    error: np.ndarray
    error_pointer: int


_devices: dict[int, _Device] = {}
_lock = threading.Lock()


def _device(index: int) -> _Device:
    if index not in _devices:
        with _lock:
            count = cp.cuda.Device(index).attributes["MultiProcessorCount"]
            word = pinned_word(0.0)
            _devices.setdefault(index, _Device(count, word.view(np.int32), word.ctypes.data))
    return _devices[index]


def multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    return _device(device).multiprocessors


def _raise_device_error(index: int) -> None:
    word = _device(index).error
    if word[0]:
        code, word[0] = int(word[0]), 0
        raise NumKongError(f"cuda:{index}: a wait in an earlier call ran out (code {code}); its scores are not valid")


# ------------------------------------------------------------------------------------- the forward kernels (sm90)


class Schedule(NamedTuple):
    """Pieces of documents on the device."""

    pieces: cp.ndarray
    chunk_begin: cp.ndarray
    piece_begin: cp.ndarray
    base: cp.ndarray
    chunks: int
    count: int


class Launch(NamedTuple):
    """One shape's launch: kernel, variant, query blocks of `block_groups` 16-row groups, chunks of documents, grid.

    `schedule` is None for candidates; `cut` documents are put together by a second kernel.
    """

    run: Kernel
    variant: Variant
    blocks: int
    block_groups: int
    chunks: int
    grid: int
    cut: bool
    schedule: Schedule | None


def _schedule(documents: CudaCollection, chunks: int, cut: bool, tile: int) -> Schedule:
    key = (chunks, cut, tile)
    if key not in documents._schedules:
        pieces: Pieces = (cut_documents if cut else deal_documents)(documents.host_offsets, chunks, tile)
        parts = (pieces.table(), pieces.chunk_begin, pieces.piece_begin, pieces.base)
        uploaded = [cp.asarray(np.ascontiguousarray(part, np.int32)) for part in parts]
        documents._schedules[key] = Schedule(*uploaded, len(pieces.chunk_begin) - 1, len(pieces.start))
        if documents.prepared:  # one that is kept, and may meet other streams
            documents.mark()
    return documents._schedules[key]


@cache
def _compile_siblings(mode: int, dtype: str, device: int, stride: int) -> None:
    """Compile what other numbers of query rows would run at this depth, so that only a first call waits."""
    variants = launch_table.all_variants(mode, (stride,))
    source = next(iter(variants)).source
    compile_together(source, "sm90", device, [variant.macros(mode, dtype) for variant in variants])


def _forward_kernel(variant: Variant, mode: int, dtype: str, device: int, stride: int) -> Kernel:
    _compile_siblings(mode, dtype, device, stride)
    return kernel(variant.source, "sm90", device, variant.threads, variant.shared_bytes, **variant.macros(mode, dtype))


def _plan(queries: CudaCollection, documents: CudaCollection, mode: int) -> Launch:
    """How all pairs are launched: whole documents where that keeps the CTAs busy, else pieces and a second kernel."""
    groups = (queries.longest + 15) // 16
    total = queries.count * groups
    variant = launch_table.forward(total * 16, documents.stride, mode)
    run = _forward_kernel(variant, mode, documents.dtype, documents.device_id, documents.stride)
    most = _device(documents.device_id).multiprocessors * variant.ctas
    whole = variant.groups // groups * groups  # groups of whole queries a CTA holds
    if mode != launch_table.SCREEN and whole and (total <= whole or whole >= 0.85 * variant.groups):
        blocks = -(-total // whole)
        chunks = chunk_count(blocks, most, documents.count)
        tokens = int(documents.lengths.sum())
        compute = 2.0 * total * 16 * tokens * documents.stride / MATRIX_FLOPS
        memory = 2.0 * tokens * documents.stride / MEMORY_BYTES
        busy = balance(documents.lengths, chunks, variant.tile_tokens) * min(1.0, blocks * chunks / most)
        if memory > compute and documents.count >= most:
            busy = 1.0  # memory is, whichever CTA asks
        second = SECOND_KERNEL_SECONDS + queries.count * documents.count * groups / SECOND_KERNEL_GROUPS
        if max(compute, memory) * (1.0 / busy - 1.0) <= second:
            schedule = _schedule(documents, chunks, False, variant.tile_tokens)
            return Launch(run, variant, blocks, whole, chunks, min(blocks * chunks, most), False, schedule)
    blocks = -(-total // variant.groups)
    tiles = int((-(-documents.lengths // variant.tile_tokens)).sum())
    schedule = _schedule(documents, chunk_count(blocks, most, tiles), True, variant.tile_tokens)
    chunks = schedule.chunks
    return Launch(run, variant, blocks, variant.groups, chunks, min(blocks * chunks, most), True, schedule)


def _planned(queries: CudaCollection, documents: CudaCollection, mode: int) -> Launch:
    key = (queries.count, queries.longest, mode, "plan")
    launch = documents._schedules.get(key)
    if launch is None:
        launch = documents._schedules[key] = _plan(queries, documents, mode)
    return launch


def _query_box(queries: CudaCollection, documents: CudaCollection, variant: Variant) -> int:
    """Rows of a box of the queries' tensor map: a CTA's where they lie side by side, else those of a group."""
    if documents.stride <= 128:
        return 0
    side_by_side = queries.uniform and (queries.longest % 16 == 0 or queries.count == 1)
    return variant.rows if side_by_side else 16


def _forward_parameters(
    launch: Launch,
    queries: CudaCollection,
    documents: CudaCollection,
    options: Options,
    slots: int,
    scores: cp.ndarray | None,
    per_token: tuple[cp.ndarray | None, ...],
    candidates: cp.ndarray | None,
) -> bytes:
    box = _query_box(queries, documents, launch.variant)
    schedule = launch.schedule
    return FORWARD.pack(
        documents.tensor_map(64), queries.tensor_map(box) if box else b"",
        queries.plane.data.ptr, queries.offsets_pointer,
        schedule.pieces.data.ptr if schedule else 0, schedule.chunk_begin.data.ptr if schedule else 0,
        _pointer(candidates), 0 if schedule else documents.offsets.data.ptr,
        _pointer(scores), *map(_pointer, per_token), _device(documents.device_id).error_pointer, 0, 0, documents.count,
        options.empty, options.mean, queries.count, queries.longest, (queries.longest + 15) // 16, queries.stride,
        slots,
        launch.blocks, launch.chunks, launch.block_groups, launch.variant.stages, box, 1,
    )  # fmt: skip


def _launch_forward(
    launch: Launch,
    queries: CudaCollection,
    documents: CudaCollection,
    options: Options,
    slots: int,
    scores: cp.ndarray | None,
    per_token: tuple[cp.ndarray | None, ...],
    candidates: cp.ndarray | None = None,
) -> None:
    parameters = _forward_parameters(launch, queries, documents, options, slots, scores, per_token, candidates)
    launch.run.launch(launch.grid, options.stream, parameters)


def _per_token(out: Outputs) -> tuple[cp.ndarray | None, ...]:
    """The forward kernel's outputs a token: maxima, winners, and nothing of a screen."""
    token_scores = out.token_scores if out.argmax is None else _required(out.token_scores, out.argmax)
    return token_scores, out.argmax, None, None, None


class Loud(NamedTuple):
    """Where the forward kernel says which queries hold a loud token: `call`, which no other call writes, so that the
    flags need no zeros before. Without flags the queries' norms tell, or the recomputing kernel looks for itself.
    """

    flags: cp.ndarray | None
    call: int


UNFLAGGED = Loud(None, 0)
_calls = itertools.count(1)


def _loud_flags(count: int) -> Loud:
    return Loud(_scratch((count,), np.uint64), next(_calls))


class Recipe(NamedTuple):
    """All launches of a shape, with parameters that lack only what changes from call to call: pointers."""

    launch: Launch
    box: int  # rows of a box of the queries' tensor map; 0 where queries are read without one
    forward: bytes
    scratch: tuple[int, ...] | None  # shape of the pieces' token maxima
    combine: Kernel | None
    combine_grid: int
    combine_parameters: bytes


def _recipe(queries: CudaCollection, documents: CudaCollection, options: Options, argmax: bool) -> Recipe:
    key = (queries.count, queries.longest, queries.uniform, argmax, options.mean, options.empty)
    found = documents.recipes.get(key)
    if found is None:
        found = documents.recipes[key] = _make_recipe(queries, documents, options, argmax)
    return found


def _make_recipe(queries: CudaCollection, documents: CudaCollection, options: Options, argmax: bool) -> Recipe:
    launch = _planned(queries, documents, launch_table.ARGMAX if argmax else launch_table.SCORE)
    schedule, box = launch.schedule, _query_box(queries, documents, launch.variant)
    slots = schedule.count if launch.cut else documents.count
    forward = _forward_parameters(launch, queries, documents, options, slots, None, (None,) * 5, None)
    if not launch.cut:
        return Recipe(launch, box, forward, None, None, 0, b"")
    items = queries.count * documents.count
    parameters = COMBINE.pack(
        0, 0, schedule.piece_begin.data.ptr, schedule.base.data.ptr, 0, documents.offsets.data.ptr, 0, 0, 0,
        items, options.empty, options.mean, documents.count, schedule.count, queries.longest,
    )  # fmt: skip
    groups, (least, most) = (queries.longest + 15) // 16, COMBINE_THREADS
    threads = min(max(least, -(-groups // 2) * 32), most)
    combine = kernel("combine.cu", documents.row, documents.device_id, threads)
    grid = min(-(-items // max(1, threads // 16 // groups)), 1 << 20)
    return Recipe(launch, box, forward, (queries.count, slots, queries.longest), combine, grid, parameters)


def _forward(queries: CudaCollection, documents: CudaCollection, options: Options, out: Outputs, loud: Loud) -> None:
    """All pairs of bf16 or f16 sets, dot."""
    recipe = _recipe(queries, documents, options, out.argmax is not None)
    query_map = queries.tensor_map(recipe.box) if recipe.box else b""
    _run_recipe(recipe, queries.plane.data.ptr, queries.offsets_pointer, query_map, out, options.stream, loud)


def _run_recipe(
    recipe: Recipe, queries: int, query_offsets: int, query_map: bytes, out: Outputs, stream: int, loud: Loud
) -> None:
    parameters = bytearray(recipe.forward)
    PAIR.pack_into(parameters, FORWARD_QUERIES_AT, queries, query_offsets)
    PAIR.pack_into(parameters, FORWARD_LOUD_AT, _pointer(loud.flags), loud.call)
    if query_map:
        parameters[QUERY_MAP_AT : QUERY_MAP_AT + len(query_map)] = query_map
    launch = recipe.launch
    if recipe.combine is None:
        token_scores = _pointer(_per_token(out)[0])
        OUTPUTS.pack_into(parameters, FORWARD_OUTPUTS_AT, out.scores.data.ptr, token_scores, _pointer(out.argmax))
        launch.run.launch(launch.grid, stream, parameters)
        return
    maxima = _scratch(recipe.scratch, np.float32)
    argmax = None if out.argmax is None else _scratch(recipe.scratch, np.int32)
    OUTPUTS.pack_into(parameters, FORWARD_OUTPUTS_AT, 0, maxima.data.ptr, _pointer(argmax))
    launch.run.launch(launch.grid, stream, parameters)
    parameters = bytearray(recipe.combine_parameters)
    PAIR.pack_into(parameters, 0, maxima.data.ptr, _pointer(argmax))
    ONE.pack_into(parameters, COMBINE_OFFSETS_AT, query_offsets)
    OUTPUTS.pack_into(
        parameters, COMBINE_OUTPUTS_AT, out.scores.data.ptr, _pointer(out.token_scores), _pointer(out.argmax)
    )
    recipe.combine.launch(recipe.combine_grid, stream, parameters)


def _forward_candidates(
    queries: CudaCollection, documents: CudaCollection, options: Options, out: Outputs, candidates: cp.ndarray
) -> None:
    """A list of documents for each query: the kernel's producer follows the list, nothing is gathered."""
    mode = launch_table.SCORE if out.argmax is None else launch_table.ARGMAX
    groups, slots = (queries.longest + 15) // 16, out.scores.shape[1]
    variant = launch_table.forward(groups * 16, documents.stride, mode)
    run = _forward_kernel(variant, mode, documents.dtype, documents.device_id, documents.stride)
    most = _device(documents.device_id).multiprocessors * variant.ctas
    chunks = chunk_count(queries.count, most, slots)
    launch = Launch(run, variant, queries.count, groups, chunks, min(queries.count * chunks, most), False, None)
    _launch_forward(launch, queries, documents, options, slots, out.scores, _per_token(out), candidates)


_kept: list[cp.ndarray] = []


def keep(array: cp.ndarray) -> cp.ndarray:
    """Memory for the span of a call; while a graph is captured it is kept for good, since every replay writes to it."""
    if cp.cuda.get_current_stream().is_capturing():
        _kept.append(array)
    return array


def _scratch(shape: tuple[int, ...], dtype: Any) -> cp.ndarray:
    return keep(cp.empty(shape, dtype))


def _required(token_scores: cp.ndarray | None, argmax: cp.ndarray, dtype: Any = np.float32) -> cp.ndarray:
    """Token scores go with the argmax in the kernels; a scratch array where the caller did not ask for them."""
    return _scratch(argmax.shape, dtype) if token_scores is None else token_scores


# ------------------------------------------------------------------------------------- the general kernel (sm80)


@cache
def _general_kernel(row: str, device: int, dtype: str, listed: bool) -> Kernel:
    macros = {"DTYPE": DTYPE_IDS[dtype], "LISTED": int(listed)}
    return kernel("maxsim_sm80.cu", row, device, GENERAL_THREADS, GENERAL_SHARED_BYTES, **macros)


def _side(collection: CudaCollection, stats: bool) -> tuple[int, ...]:
    squares, sets = collection.stats_pointers if stats else (0, 0)
    return (
        collection.plane.data.ptr, _pointer(collection.originals), squares, sets, collection.offsets_pointer,
        collection.count, collection.longest, collection.stride,
    )  # fmt: skip


def _general(
    queries: CudaCollection,
    documents: CudaCollection,
    options: Options,
    out: Outputs,
    candidates: cp.ndarray | None = None,
    pairs: bool = False,
    refined: bool = False,
    only_loud: bool = False,
    loud: Loud = UNFLAGGED,
) -> None:
    """Any type, metric and layout, by mma.sync and f64 where the contract's pair value asks for it."""
    device, dtype = documents.device_id, documents.dtype
    listed = dtype == "f32" or options.metric != "dot" or only_loud
    run = _general_kernel(documents.row, device, dtype, listed)
    told = loud.flags is not None or (not queries.prepared and queries.longest * queries.stride <= SCAN_ELEMENTS)
    scan = only_loud and told
    query_rows = max((queries.longest + 15) // 16 * 16, 16)
    together = 1 if pairs or candidates is not None else max(1, 64 // query_rows)
    slots = out.scores.shape[1]
    items = slots * -(-len(queries) // together)
    token_scores, argmax = out.token_scores, out.argmax
    if argmax is None and token_scores is not None:
        argmax = _scratch(token_scores.shape, np.int32)
    if argmax is not None:
        token_scores = _required(token_scores, argmax, out.scores.dtype)
    parameters = GENERAL.pack(
        *_side(queries, listed and not scan), *_side(documents, listed), _pointer(candidates),
        out.scores.data.ptr, _pointer(token_scores), _pointer(argmax), _pointer(loud.flags), loud.call,
        options.empty, slots, items,
        METRICS[options.metric], options.mean, documents.depth, refined, pairs, only_loud,
        together,
    )  # fmt: skip
    ctas = LOUD_CTAS if only_loud else GENERAL_CTAS
    run.launch(min(items, ctas * _device(device).multiprocessors), options.stream, parameters)


def _screened_f32(queries: CudaCollection, documents: CudaCollection, options: Options, out: Outputs) -> None:
    """f32, dot, all pairs: wgmma over the f16 planes leaves one or two candidates a row, f64 decides."""
    launch = _planned(queries, documents, launch_table.SCREEN)
    schedule = launch.schedule
    shape = (queries.count, schedule.count, queries.longest)
    screen = [_scratch(shape, dtype) for dtype in (np.float32, np.int32, np.float32, np.int32, np.float32)]
    _launch_forward(launch, queries, documents, options, schedule.count, None, tuple(screen))
    shape = (queries.count, documents.count, queries.longest)
    argmax = _scratch(shape, np.int32) if out.argmax is None else out.argmax
    token_scores = _required(out.token_scores, argmax, np.float64)
    items = queries.count * -(-documents.count // REFINE_TOGETHER) * queries.longest
    parameters = REFINE.pack(
        *map(_pointer, screen), schedule.piece_begin.data.ptr, schedule.base.data.ptr, queries.originals.data.ptr,
        documents.originals.data.ptr, queries.sets.data.ptr, documents.sets.data.ptr, queries.offsets_pointer,
        documents.offsets.data.ptr, token_scores.data.ptr, argmax.data.ptr, items, documents.count, schedule.count,
        queries.longest, documents.depth,
    )  # fmt: skip
    refine = kernel("refine_f32.cu", documents.row, documents.device_id, REFINE_THREADS)
    grid = min(-(-items * 16 // REFINE_THREADS), 64 * _device(documents.device_id).multiprocessors)
    refine.launch(grid, options.stream, parameters)
    _general(queries, documents, options, Outputs(out.scores, token_scores, argmax), refined=True)


# ------------------------------------------------------------------------------------- bounds


def _norm_sums(queries: CudaCollection) -> cp.ndarray:
    norms = cp.sqrt(queries.squares)
    if queries.uniform and queries.longest:
        return norms[: len(queries) * queries.longest].reshape(len(queries), queries.longest).sum(1)
    running = cp.concatenate([cp.zeros(1), cp.cumsum(cp.where(cp.isfinite(norms), norms, 0.0))])
    sums = running[queries.offsets[1:]] - running[queries.offsets[:-1]] + running[-1] * 2.0**-44
    return cp.where(cp.isfinite(queries.sets[:, 0]), sums, cp.inf)


def _bounds(
    queries: CudaCollection, documents: CudaCollection, options: Options, scores: cp.ndarray, chosen: cp.ndarray | None
) -> cp.ndarray:
    """The contract's bound per score: |score - exact| <= E. Matrix units: 36 ceil(d / 16) 2^-24 an f32 chain."""
    depth, f32 = documents.depth, documents.dtype == "f32"
    counts = cp.asarray(queries.lengths.astype(np.float64))[:, None]
    unit = 36 * -(-depth // 16) * 2.0**-24
    output = 0.0 if f32 else 2.0**-24
    if options.metric == "dot":
        largest = documents.sets[:, 0].astype(np.float64)
        largest = largest[None, :] if chosen is None else cp.where(chosen >= 0, largest[cp.maximum(chosen, 0)], 0.0)
        scale = cp.where(counts > 0, _norm_sums(queries)[:, None] * largest, 0.0)
        pair = (depth + 1) * 2.0**-53 if f32 else unit
        absolute = 0.0 if f32 else counts * depth * 2.0**-149 + 2.0**-149
        bound = (pair + counts * 2.0**-53) * scale + output * cp.abs(scores) + absolute
    else:
        pair = (2 * depth + 6) * 2.0**-53 + (0.0 if f32 else max((depth + 2) * 2.0**-24, unit))
        pair += 4 * 2.0**-53 if options.metric == "angular" else 0.0
        bound = counts * (pair + counts * 2.0**-53) + output * cp.abs(scores)
    if options.mean:
        bound = bound / cp.maximum(counts, 1.0) + output * cp.abs(scores)
    bound = bound * (1.0 + 2.0**-20)
    lengths = cp.asarray(documents.lengths)
    lengths = lengths[None, :] if chosen is None else cp.where(chosen >= 0, lengths[cp.maximum(chosen, 0)], 0)
    return cp.where((counts == 0) | (lengths == 0), 0.0, cp.where(cp.isfinite(scores), bound, cp.inf))


# ------------------------------------------------------------------------------------- the entry point


def _side_of(x: Any, dtype: str | None) -> CudaCollection:
    return x if isinstance(x, CudaCollection) else pack(x, dtype=dtype, copy=False)


def _check(queries: CudaCollection, documents: CudaCollection, metric: str, reduction: str) -> None:
    if queries.dtype != documents.dtype:
        raise UnsupportedDtype(f"queries are {queries.dtype}, documents {documents.dtype}; convert one of them")
    if queries.depth != documents.depth:
        raise ShapeMismatch(f"queries have depth {queries.depth}, documents {documents.depth}")
    if queries.device_id != documents.device_id:
        raise DeviceMismatch(f"queries are on {queries.device}, documents on {documents.device}; copy one of them over")
    if metric not in METRICS:
        raise InvalidArgument(f"metric: {metric!r}, wanted one of {', '.join(map(repr, METRICS))}")
    if reduction not in ("sum", "mean"):
        raise InvalidArgument(f"reduction: {reduction!r}, wanted 'sum' or 'mean'")


def _candidate_array(candidates: Any, queries: CudaCollection) -> cp.ndarray:
    candidates = cp.ascontiguousarray(cp.asarray(candidates), dtype=np.int64)
    if candidates.ndim != 2 or candidates.shape[0] != len(queries):
        raise ShapeMismatch(f"candidates: shape {candidates.shape}, wanted ({len(queries)}, K)")
    if candidates.device.id != queries.device_id:
        raise DeviceMismatch(
            f"candidates: on cuda:{candidates.device.id}, queries are on {queries.device}; copy them over"
        )
    return candidates


def score(
    queries: Any,
    documents: Any,
    *,
    metric: str = "dot",
    reduction: str = "sum",
    empty: float | None = None,
    candidates: Any = None,
    pairs: bool = False,
    dtype: str | None = None,
    return_argmax: bool = False,
    return_token_scores: bool = False,
    return_bounds: bool = False,
    out: cp.ndarray | None = None,
) -> Scores:
    """Score queries against documents on their device, on the current stream, without waiting for it.

    Parameters
    ----------
    queries, documents : CudaCollection or anything that `pack` takes
        Of one type, depth and device.
    metric, reduction, empty
        As in `numkong_py.maxsim`.
    candidates : integers, shape (queries, K)
        Document indices for each query; a device array is not read on the host, and an index out of range scores as
        an empty document.
    pairs : bool
        The i-th query against the i-th document: slots are 1.
    out : cupy.ndarray, shape (queries, slots)
        Where scores go: f32, for f32 inputs f64, C-contiguous.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, DeviceMismatch, InvalidArgument
    NumKongError
        A kernel of an earlier call gave up waiting.
    """
    if empty is None:
        empty = np.inf if metric == "angular" else -np.inf
    if metric == "dot" and candidates is None and not (pairs or return_argmax or return_token_scores or return_bounds):
        found = _again(queries, documents, reduction, empty, dtype, out)
        if found is not None:
            return found
    queries, documents = _side_of(queries, dtype), _side_of(documents, dtype)
    _check(queries, documents, metric, reduction)
    with on_device(documents.device_id):
        _raise_device_error(documents.device_id)
        if pairs and (candidates is not None or queries.count != documents.count):
            raise ShapeMismatch(
                f"pairs: {queries.count} queries, {documents.count} documents, wanted as many, and no candidates"
            )
        if candidates is not None:
            candidates = _candidate_array(candidates, queries)
        options = Options(metric, reduction == "mean", empty, cp.cuda.get_current_stream().ptr)
        queries.join(options.stream)
        documents.join(options.stream)
        slots = 1 if pairs else documents.count if candidates is None else candidates.shape[1]
        outputs = _outputs(queries, slots, documents.dtype, return_argmax, return_token_scores, out)
        if outputs.scores.size:
            _run(queries, documents, options, outputs, candidates, pairs)
        bounds = None
        if return_bounds:
            chosen = cp.arange(queries.count)[:, None] if pairs else candidates
            if chosen is not None and not pairs:
                chosen = cp.where((chosen >= 0) & (chosen < documents.count), chosen, -1)
            bounds = _bounds(queries, documents, options, outputs.scores, chosen)
        return Scores(outputs.scores, outputs.argmax, outputs.token_scores, bounds)


class _Queries(NamedTuple):
    """Uniform queries as `_again` needs them."""

    count: int
    longest: int
    tokens: int
    squares: int
    sets: int
    may_be_loud: bool


def _plain_queries(queries: Any, documents: CudaCollection, dtype: str | None) -> _Queries | None:
    """What kernels need of queries of one length on the documents' device; None: there is more to look at."""
    if type(queries) is CudaCollection:
        alike = queries.dtype == documents.dtype and queries.depth == documents.depth and queries.uniform
        if not alike or queries.device_id != documents.device_id or queries.longest == 0:
            return None
        squares, sets = queries.stats_pointers if queries.prepared else (0, 0)
        return _Queries(queries.count, queries.longest, queries.plane.data.ptr, squares, sets, queries.may_be_loud)
    if type(queries) is not cp.ndarray or queries.ndim not in (2, 3) or not queries.flags.c_contiguous:
        return None
    stored, memory = queries.dtype, queries.data
    if stored == np.uint16:  # bits of bf16 numbers if the caller says so
        right = documents.dtype == dtype == "bf16"
    else:
        right = stored == np.float16 and documents.dtype == "f16" and dtype in (None, "f16")
    shape = queries.shape
    if not right or shape[-1] != documents.stride or memory.ptr % 16 or memory.device_id != documents.device_id:
        return None
    count = shape[0] if len(shape) == 3 else 1
    return _Queries(count, shape[-2], memory.ptr, 0, 0, documents.dtype == "bf16") if shape[-2] else None


def _again(
    queries: Any, documents: Any, reduction: str, empty: float, dtype: str | None, out: cp.ndarray | None
) -> Scores | None:
    """Scores of a shape that was prepared before, with little on the host but the launches; None: go the whole way."""
    if type(documents) is not CudaCollection or cp.cuda.runtime.getDevice() != documents.device_id:
        return None
    recipes = documents.recipes
    if not recipes or documents.depth != documents.stride or reduction not in ("sum", "mean"):
        return None
    q = _plain_queries(queries, documents, dtype)
    if q is None:
        return None
    recipe = recipes.get((q.count, q.longest, True, False, reduction == "mean", empty))
    if recipe is None or recipe.box:
        return None
    if out is None:
        out = cp.empty((q.count, documents.count), np.float32)
    elif out.shape != (q.count, documents.count) or out.dtype != np.float32 or not out.flags.c_contiguous:
        return None
    _raise_device_error(documents.device_id)
    stream = cp.cuda.get_current_stream().ptr
    documents.join(stream)
    if type(queries) is CudaCollection:
        queries.join(stream)
    loud = _loud_flags(q.count) if q.may_be_loud and not q.sets else UNFLAGGED
    _run_recipe(recipe, q.tokens, 0, b"", Outputs(out, None, None), stream, loud)
    if q.may_be_loud or documents.may_be_loud:
        run, grid, template = _loud_recipe(q, documents, reduction == "mean", empty)
        parameters = bytearray(template)
        GENERAL_QUERIES.pack_into(parameters, 0, q.tokens, 0, q.squares, q.sets, 0)
        GENERAL_CALL.pack_into(parameters, GENERAL_OUTPUTS_AT, out.data.ptr, 0, 0, _pointer(loud.flags), loud.call)
        run.launch(grid, stream, parameters)
    return Scores(out)


def _loud_recipe(q: _Queries, documents: CudaCollection, mean: bool, empty: float) -> tuple[Kernel, int, bytes]:
    key = ("loud", q.count, q.longest, mean, empty)
    found = documents.recipes.get(key)
    if found is None:
        run = _general_kernel(documents.row, documents.device_id, documents.dtype, True)
        together = max(1, 64 // ((q.longest + 15) // 16 * 16))
        items = documents.count * -(-q.count // together)
        template = GENERAL.pack(
            0, 0, 0, 0, 0, q.count, q.longest, documents.stride, *_side(documents, True), 0, 0, 0, 0, 0, 0,
            empty, documents.count, items, METRICS["dot"], mean, documents.depth, False, False, True, together,
        )  # fmt: skip
        grid = min(items, LOUD_CTAS * _device(documents.device_id).multiprocessors)
        found = documents.recipes[key] = run, grid, template
    return found


def _outputs(
    queries: CudaCollection, slots: int, dtype: str, argmax: bool, token_scores: bool, out: cp.ndarray | None
) -> Outputs:
    score_type = np.float64 if dtype == "f32" else np.float32
    shape = (len(queries), slots)
    if out is None:
        out = cp.empty(shape, score_type)
    elif out.shape != shape or out.dtype != score_type or not out.flags.c_contiguous:
        raise ShapeMismatch(f"out: {out.dtype} {out.shape}, wanted C-contiguous {np.dtype(score_type)} {shape}")
    per_token = (*shape, queries.longest)
    return Outputs(
        out,
        cp.empty(per_token, score_type) if token_scores else None,
        cp.empty(per_token, np.int32) if argmax else None,
    )


def _run(
    queries: CudaCollection,
    documents: CudaCollection,
    options: Options,
    out: Outputs,
    candidates: cp.ndarray | None,
    pairs: bool,
) -> None:
    fast = documents.row == "sm90" and options.metric == "dot"
    fast = fast and queries.longest > 0 and documents.longest > 0
    fast = fast and max(queries.plane.shape[0], documents.plane.shape[0]) < 1 << 31  # a coordinate of TMA has 32 bits
    whole = candidates is None and not pairs
    if fast and documents.dtype == "f32" and whole:
        _ = queries.sets, documents.sets  # the planes are made with them
        for some, rows in _slices(queries, documents, out, 32):
            _screened_f32(some, documents, options, rows)
        return
    if not fast or documents.dtype == "f32" or (not whole and queries.longest > launch_table.MAX_QUERY_ROWS):
        _general(queries, documents, options, out, candidates, pairs)
    elif whole:
        for some, rows in _slices(queries, documents, out, 8):
            flagged = queries.may_be_loud and documents.stride <= 128 and not queries.prepared
            loud = _loud_flags(some.count) if flagged else UNFLAGGED
            _forward(some, documents, options, rows, loud)
            if queries.may_be_loud or documents.may_be_loud:
                _general(some, documents, options, rows, only_loud=True, loud=loud)
        return
    else:
        chosen = cp.arange(len(queries), dtype=np.int64)[:, None] if pairs else candidates
        _forward_candidates(queries, documents, options, out, chosen)
    if options.metric == "dot" and (queries.may_be_loud or documents.may_be_loud):
        _general(queries, documents, options, out, candidates, pairs, only_loud=True)


def _slices(
    queries: CudaCollection, documents: CudaCollection, out: Outputs, bytes_a_token: int
) -> Iterator[tuple[CudaCollection, Outputs]]:
    """Queries, as many at a time as the scratch holds token maxima of their pieces, with their rows of the outputs."""
    each = (len(documents) + 1024) * queries.longest * bytes_a_token
    step = max(1, SCRATCH_BYTES // max(each, 1))
    if step >= len(queries):
        yield queries, out
        return
    step = -(-len(queries) // -(-len(queries) // step))  # as many launches, all of one size
    for first in range(0, len(queries), step):
        rows = slice(first, first + step)
        yield queries[rows], out.part(rows)


def winners(
    queries: CudaCollection,
    documents: CudaCollection,
    metric: str,
    empty: float,
    candidates: cp.ndarray | None,
    pairs: bool,
    out: cp.ndarray,
) -> None:
    """Queue the forward for its winners alone: int32 ``[queries, slots, longest query]`` into `out`."""
    _raise_device_error(documents.device_id)
    options = Options(metric, False, empty, cp.cuda.get_current_stream().ptr)
    score_type = np.float64 if documents.dtype == "f32" else np.float32
    _run(queries, documents, options, Outputs(_scratch(out.shape[:2], score_type), None, out), candidates, pairs)


def warmup(
    dtypes: tuple[str, ...] = ("bf16", "f16", "f32"),
    depths: tuple[int, ...] = (128,),
    device: int = 0,
    gradients: bool = False,
) -> None:
    """Compile and load the kernels for types and depths, so that no later call waits for the compiler.

    Parameters
    ----------
    dtypes : tuple of str
    depths : tuple of int
    device : int
    gradients : bool
        Those of the backward pass as well.
    """
    from . import gradient
    from .rows import best_row

    with cp.cuda.Device(device):
        row = best_row(device)
        if gradients:
            gradient.warmup(dtypes, depths, row, device)
        for dtype in dtypes:
            kernel("token_stats.cu", row, device, 128, DTYPE=DTYPE_IDS[dtype])
            for listed in (0, 1) if dtype != "f32" else (1,):
                kernel(
                    "maxsim_sm80.cu",
                    row,
                    device,
                    GENERAL_THREADS,
                    GENERAL_SHARED_BYTES,
                    DTYPE=DTYPE_IDS[dtype],
                    LISTED=listed,
                )
            if row != "sm90":
                continue
            for threads in COMBINE_THREADS:
                kernel("combine.cu", row, device, threads)
            if dtype == "f32":
                kernel("refine_f32.cu", row, device, REFINE_THREADS)
            modes = (launch_table.SCREEN,) if dtype == "f32" else (launch_table.SCORE, launch_table.ARGMAX)
            for mode in modes:
                for stride in {(depth + 7) // 8 * 8 for depth in depths}:
                    for variant in launch_table.all_variants(mode, (stride,)):
                        _forward_kernel(variant, mode, dtype, device, stride)
