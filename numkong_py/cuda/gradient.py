"""Backward passes of MaxSim on the device, from the winners of the forward: gathers and an inverse map, no atomics.

Everything is queued on the caller's current stream and nothing waits for the device. Extra memory beyond the outputs
and the winners: f32 sums of slices (`PARTIAL_BYTES` at most) and, for candidates, the list of pairs by document.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple, Protocol

import cupy as cp
import numpy as np

from ..errors import DeviceMismatch, ShapeMismatch, UnsupportedDtype
from . import scoring
from .collection import STORED, CudaCollection, on_device, pack
from .compile import Kernel, kernel
from .kernels import DTYPE_IDS
from .sorting import places_of_groups, sort_pairs

__all__ = ["Gradient", "Side", "collection_of", "indices", "maxsim_grad", "pull_together", "warmup", "weights_of"]

THREADS = 256
BATCH, OWNED = 2048, 256  # of inverse.cuh: sources a batch, destinations a CTA at most
SLICES, SLICE_SLOTS = 16, 64  # of a sum over slots: at most so many, each a multiple of so many slots
PARTIAL_BYTES = 48 << 20
WINNER_BYTES = 32 << 20  # token maxima that the forward writes beside the winners
DIRECT_ROWS = 256  # destinations a CTA where all sources fit one batch
SUM_BYTES = 32 << 10  # sums of a CTA's destinations where they do not

TOKENS = "3Qq2i"  # Tokens of gather.cuh
GRADIENT = "2Q2i"  # Gradient
QUERIES = struct.Struct(f"@{TOKENS}{TOKENS}{GRADIENT}4Q3i")  # Params of maxsim_grad_queries.cu
SLICED = struct.Struct(f"@{TOKENS}{GRADIENT}Qi")  # of maxsim_grad_slices.cu
DOCUMENTS = struct.Struct(f"@{TOKENS}{TOKENS}{GRADIENT}8Q6I5i")  # of maxsim_grad_documents.cu


# ------------------------------------------------------------------------------------- one side


class Side(Protocol):
    """What is read here of `numkong_py.sides.Side`: token sets and the layout of their gradient."""

    source: Any
    shape: tuple[int, ...]
    places: np.ndarray | None
    device: str

    def __len__(self) -> int: ...


def collection_of(side: Side) -> CudaCollection:
    """The device's view of one side: what is packed already, or the caller's memory."""
    source = side.source
    if hasattr(source, "pointer"):
        whole: CudaCollection = source.pointer
        return whole if len(side) == len(whole) else whole[source.begin : source.end]
    tokens, extras = source.source, dict(source.extras)
    if "mask" in extras and getattr(tokens, "ndim", 0) == 2:  # one set with a mask of its own
        tokens, extras["mask"] = tokens[None], extras["mask"][None]
    return pack(tokens, dtype=source.dtype, copy=False, **extras)


class Gradient(NamedTuple):
    """Where one side's gradient goes.

    Attributes
    ----------
    array : cupy.ndarray, the side's shape
    places : cupy.ndarray of int64 or None
        Row of every valid token; None: side by side from the start of each set.
    length : int
        Rows a set of a padded layout, 0 for a flat one.
    """

    array: cp.ndarray
    places: cp.ndarray | None
    length: int

    @classmethod
    def of(cls, side: Side, dtype: str) -> Gradient:
        """Uninitialised memory in a side's layout."""
        array = cp.empty(side.shape, STORED[dtype])
        if side.places is None:
            return cls(array, None, 0)
        holes = "mask" in side.source.extras
        return cls(array, cp.asarray(side.places) if holes else None, side.shape[-2])

    def parameters(self) -> tuple[int, ...]:
        """Fields of the struct."""
        places = 0 if self.places is None else self.places.data.ptr
        return self.array.data.ptr, places, self.length, self.array.shape[-1]


def _tokens(collection: CudaCollection, squares: bool) -> tuple[int, ...]:
    rows = collection.plane if collection.originals is None else collection.originals
    if rows.shape[0] >= 2**32 - 1:
        raise ShapeMismatch(f"{rows.shape[0]} tokens in one collection, wanted less than 2^32 - 1; split it")
    stats = collection.stats_pointers[0] if squares else 0
    return rows.data.ptr, stats, collection.offsets_pointer, collection.count, collection.longest, rows.shape[1]


def _macros(dtype: str, depth: int, aligned: bool, out_f32: int, cosine: int) -> dict[str, int]:
    """Macros that all gradient kernels share; `aligned`: f32 tokens start on 16 bytes."""
    return {
        "DTYPE": DTYPE_IDS[dtype],
        "LANES": 8 if depth <= 64 else 16,
        "VECTOR": int(depth % 4 == 0 and aligned if dtype == "f32" else depth % 8 == 0),
        "OUT_F32": out_f32,
        "COSINE": cosine,
    }


def _form(out: Gradient, collections: tuple[CudaCollection, ...], cosine: bool) -> dict[str, int]:
    """The macros for a gradient by two collections."""
    dtype, depth = collections[0].dtype, out.array.shape[-1]
    aligned = dtype != "f32" or all(one.originals.data.ptr % 16 == 0 for one in collections)
    return _macros(dtype, depth, aligned, int(out.array.dtype == np.float32), int(cosine))


def _columns(form: dict[str, int], depth: int) -> int:
    """Columns of a row in whole passes."""
    step = 8 * form["LANES"]
    return -(-depth // step) * step


def warmup(dtypes: tuple[str, ...], depths: tuple[int, ...], row: str, device: int) -> None:
    """Compile and load the kernels of both gradients; tokens that start on 16 bytes, any number of them."""
    for dtype, depth, out_f32, cosine in product(dtypes, depths, (0, 1), (0, 1)):
        if dtype == "f32" and not out_f32:
            continue
        form = _macros(dtype, depth, True, out_f32, cosine)
        for source in ("maxsim_grad_queries.cu", "maxsim_grad_slices.cu"):
            kernel(source, row, device, THREADS, **form)
        for sources in (1, BATCH + 1):
            _documents_kernel(sources, 1, depth, form, row, device, DIFFERENCE=0, LISTED=0)


# ------------------------------------------------------------------------------------- arguments


def device_array(x: Any, device: int, argument: str) -> cp.ndarray:
    """A CuPy array of an array of any library, a list or a number; host values are copied over."""
    if isinstance(x, cp.ndarray):
        found = x
    elif hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray) and x.__dlpack_device__()[0] in (2, 13):
        x = x.detach() if hasattr(x, "detach") else x
        if str(x.dtype) in ("torch.bfloat16", "bfloat16"):
            x = x.float() if hasattr(x, "float") else x.astype(np.float32)
        found = cp.from_dlpack(x)
    else:
        x = np.asarray(x.detach() if hasattr(x, "detach") else x)
        found = cp.asarray(x.astype(np.float32) if x.dtype.kind not in "iufb" else x)
    if found.device.id != device:
        raise DeviceMismatch(f"{argument}: on cuda:{found.device.id}, the tokens on cuda:{device}; copy it over")
    return found


def weights_of(upstream: Any, shape: tuple[int, ...], device: int) -> cp.ndarray:
    """The upstream gradient as contiguous f32 of a shape that it broadcasts to; itself where it is that."""
    if np.isscalar(upstream):
        return cp.full(shape, upstream, np.float32)
    found = device_array(upstream, device, "upstream")
    if found.dtype.kind not in "iufb":
        raise UnsupportedDtype(f"upstream: dtype {found.dtype}, wanted real numbers; pass upstream.astype(float32)")
    return cp.ascontiguousarray(cp.broadcast_to(found.astype(np.float32, copy=False), shape))


def _scaled(weights: cp.ndarray, queries: CudaCollection, metric: str, reduction: str) -> cp.ndarray:
    """Weights of similarities, from weights of scores: a mean divides by the query's tokens, distances count down."""
    sign = -1.0 if metric == "angular" else 1.0
    if reduction == "mean" and queries.uniform:
        return weights / np.float32(sign * max(queries.longest, 1))
    if reduction == "mean":
        counts = cp.maximum(queries.offsets[1:] - queries.offsets[:-1], 1).astype(np.float32)
        return weights / (np.float32(sign) * counts[:, None])
    return -weights if metric == "angular" else weights


def indices(x: Any, dtype: Any, shape: tuple[int, ...], device: int, argument: str) -> cp.ndarray:
    """Contiguous indices on the device; what does not fit the type becomes -1."""
    found = device_array(x, device, argument)
    if found.dtype.kind not in "iu":
        raise UnsupportedDtype(f"{argument}: dtype {found.dtype}, wanted integers; pass {argument}.astype(int)")
    if found.dtype != dtype and not np.can_cast(found.dtype, dtype):
        found = cp.where((found >= 0) & (found <= np.iinfo(dtype).max), found, -1)
    return cp.ascontiguousarray(found, dtype=dtype).reshape(shape)


def _are_pairs(candidates: Any) -> bool:
    """Whether host candidates name the i-th document for the i-th query, and nothing else."""
    return (
        isinstance(candidates, np.ndarray)
        and candidates.ndim == 2
        and candidates.shape[1] == 1
        and bool((candidates[:, 0] == np.arange(len(candidates))).all())
    )


# ------------------------------------------------------------------------------------- the two gradients


class Pairs(NamedTuple):
    """Which documents each query has met, what the winners were and what each pair weighs.

    Attributes
    ----------
    slots : int
        Documents a query.
    winners : cupy.ndarray of int32, shape (queries, slots, longest query)
    weights : cupy.ndarray of float32, shape (queries, slots)
    candidates : cupy.ndarray of int64, shape (queries, slots), or None
        Document of each slot; None: the slot-th, or with `one_to_one` the query's own.
    """

    slots: int
    winners: cp.ndarray
    weights: cp.ndarray
    candidates: cp.ndarray | None
    one_to_one: bool


def _slice_slots(slots: int) -> int:
    """Slots of a slice of the sum over slots; a function of their number alone."""
    count = min(SLICES, -(-slots // SLICE_SLOTS))
    each = -(-slots // max(count, 1))
    return max(-(-each // SLICE_SLOTS) * SLICE_SLOTS, SLICE_SLOTS)


def query_gradient(
    queries: CudaCollection, documents: CudaCollection, pairs: Pairs, out: Gradient, cosine: bool, stream: int
) -> None:
    """Queue the gradient by the queries: winners' rows gathered, slots in ascending order."""
    depth, device, row = queries.depth, queries.device_id, queries.row
    form = _form(out, (queries, documents), cosine)
    rows, each = queries.count * queries.longest, _slice_slots(pairs.slots)
    if rows >= 2**31 - THREADS or pairs.weights.size >= 2**32:
        raise ShapeMismatch(
            f"{queries.count} queries of {queries.longest} tokens against {pairs.slots} documents each, wanted less "
            "than 2^31 query tokens and 2^32 pairs; pass fewer queries"
        )
    slices, groups = -(-pairs.slots // each), -(-rows * form["LANES"] // THREADS)
    partial = None
    shape = (slices, rows, _columns(form, depth))
    few = groups < 4 * scoring.multiprocessors(device)
    if slices > 1 and few and 4 * shape[0] * shape[1] * shape[2] <= PARTIAL_BYTES:
        partial = scoring.keep(cp.empty(shape, np.float32))
    parameters = QUERIES.pack(
        *_tokens(queries, cosine), *_tokens(documents, cosine), *out.parameters(),
        0 if pairs.candidates is None else pairs.candidates.data.ptr, pairs.winners.data.ptr, pairs.weights.data.ptr,
        0 if partial is None else partial.data.ptr, pairs.slots, each, pairs.one_to_one,
    )  # fmt: skip
    run = kernel("maxsim_grad_queries.cu", row, device, THREADS, **form)
    run.launch(groups, stream, parameters, 1 if partial is None else slices)
    if partial is not None:
        parameters = SLICED.pack(*_tokens(queries, cosine), *out.parameters(), partial.data.ptr, slices)
        kernel("maxsim_grad_slices.cu", row, device, THREADS, **form).launch(groups, stream, parameters)


def _divisor(by: int) -> tuple[int, int, int]:
    """``Divisor`` of inverse.cuh."""
    by = max(by, 1)
    shift = (by - 1).bit_length()
    return by, (2**32 * (2**shift - by) // by + 1) % 2**32, shift


def _documents_kernel(
    sources: int, longest: int, depth: int, form: dict[str, int], row: str, device: int, **macros: int
) -> tuple[Kernel, int, int]:
    """The kernel, destinations a CTA and CTAs a document, for at most so many sources a document."""
    columns = _columns(form, depth)
    batched = sources > BATCH or (form["COSINE"] and columns > 8 * form["LANES"])
    owned = min(OWNED, max(1, SUM_BYTES // (4 * columns))) if batched else DIRECT_ROWS
    macros = {**form, "BATCHED": int(batched), **macros}
    shared = 4 * owned * columns if batched else 0
    run = kernel("maxsim_grad_documents.cu", row, device, THREADS, shared, **macros)
    return run, owned, max(1, -(-longest // owned))


def document_gradient(
    queries: CudaCollection, documents: CudaCollection, pairs: Pairs, out: Gradient, cosine: bool, stream: int
) -> None:
    """Queue the gradient by the documents: each row has one owner, which finds the query tokens that it won."""
    depth, device, row = documents.depth, documents.device_id, documents.row
    most = {True: queries.longest, False: queries.count * queries.longest}[pairs.one_to_one]
    listed = begin = None
    if pairs.candidates is not None:
        most = pairs.weights.size * queries.longest
        listed, begin = _by_document(pairs.candidates, documents, stream)
    if most >= 2**31:
        raise ShapeMismatch(f"{most} query tokens can meet one document, wanted less than 2^31; pass fewer queries")
    form = _form(out, (queries, documents), cosine)
    run, owned, parts = _documents_kernel(
        most, documents.longest, depth, form, row, device, DIFFERENCE=0, LISTED=int(listed is not None)
    )
    by_fours = queries.longest % 4 == 0 and pairs.winners.data.ptr % 16 == 0
    parameters = DOCUMENTS.pack(
        *_tokens(queries, cosine), *_tokens(documents, cosine), *out.parameters(), pairs.winners.data.ptr,
        pairs.weights.data.ptr, 0 if listed is None else listed.data.ptr, 0 if begin is None else begin.data.ptr,
        0, 0, 0, 0, *_divisor(queries.longest), *_divisor(pairs.slots), by_fours, parts, owned, pairs.slots,
        pairs.one_to_one,
    )  # fmt: skip
    run.launch(documents.count * parts, stream, parameters)


def pull_together(
    queries: CudaCollection,
    documents: CudaCollection,
    out: Gradient,
    stream: int,
    winners: int,
    weights: int,
    query_squares: int,
    own_squares: int,
    own_winners: int,
    own_weights: int,
) -> None:
    """Queue the Chamfer distance's gradient by `documents`, from addresses of what `DIFFERENCE` kernels read."""
    form = _form(out, (queries, documents), False)
    most, longest, row, device = queries.longest, documents.longest, documents.row, documents.device_id
    run, owned, parts = _documents_kernel(most, longest, documents.depth, form, row, device, DIFFERENCE=1, LISTED=0)
    parameters = DOCUMENTS.pack(
        *_tokens(queries, False), *_tokens(documents, False), *out.parameters(), winners, weights, 0, 0,
        query_squares, own_squares, own_winners, own_weights, *_divisor(most), *_divisor(1), 0, parts, owned, 1, True,
    )  # fmt: skip
    run.launch(documents.count * parts, stream, parameters)


def _by_document(candidates: cp.ndarray, documents: CudaCollection, stream: int) -> tuple[cp.ndarray, cp.ndarray]:
    """Pairs in the order of their documents, and where each document's begin."""
    flat, count = candidates.reshape(-1), documents.count
    keys = scoring.keep(cp.where((flat >= 0) & (flat < count), flat, count).astype(np.uint64))
    values = scoring.keep(cp.arange(flat.size, dtype=np.uint32))
    keys, listed = sort_pairs(keys, values, count.bit_length(), documents.row, documents.device_id, stream)
    return listed, places_of_groups(keys, count, documents.row, documents.device_id, stream)


# ------------------------------------------------------------------------------------- the entry point


def _query_slices(queries: CudaCollection, slots: int) -> Iterator[slice]:
    """Queries at a time, so that the forward's token maxima stay within `WINNER_BYTES`."""
    size = 8 if queries.dtype == "f32" else 4
    step = max(1, WINNER_BYTES // max(size * slots * queries.longest, 1))
    for first in range(0, queries.count, step):
        yield slice(first, first + step)


def _winners(
    queries: CudaCollection, documents: CudaCollection, metric: str, candidates: cp.ndarray | None, pairs: bool
) -> cp.ndarray:
    """The forward's winners, where the caller has not kept them."""
    slots = 1 if pairs else documents.count if candidates is None else candidates.shape[1]
    winners = scoring.keep(cp.empty((queries.count, slots, queries.longest), np.int32))
    worst = np.inf if metric == "angular" else -np.inf
    for part in _query_slices(queries, slots):
        scoring.winners(
            queries[part], documents[part] if pairs else documents, metric, worst,
            None if candidates is None else candidates[part], pairs, winners[part],
        )  # fmt: skip
    return winners


def maxsim_grad(
    queries: Side,
    documents: Side,
    upstream: Any,
    *,
    shape: tuple[int, ...],
    argmax: Any,
    candidates: Any,
    metric: str,
    reduction: str,
    need: tuple[bool, bool],
    dtype: str,
) -> tuple[cp.ndarray | None, cp.ndarray | None]:
    """Differentiate scores at their winners; `numkong_py.gradient` says what each argument is.

    Sums are f32 chains in ascending order: a query token's over slots (in slices whose bounds depend on the number of
    slots alone), a document token's over query tokens (in batches of its neighbours' 2048). The bits repeat from run to
    run, and neither a query's nor a document's gradient depends on its neighbours in the call or on its place there.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, DeviceMismatch
    """
    packed_queries, packed_documents = collection_of(queries), collection_of(documents)
    device = packed_documents.device_id
    with on_device(device):
        stream = cp.cuda.get_current_stream().ptr
        packed_queries.join(stream)
        packed_documents.join(stream)
        outputs = tuple(
            Gradient.of(side, dtype) if wanted else None for side, wanted in zip((queries, documents), need)
        )
        one_to_one = candidates is not None and _are_pairs(candidates) and len(candidates) == len(documents)
        slots = len(documents) if candidates is None else candidates.shape[-1]
        size = (len(queries), slots)
        if one_to_one:
            candidates = None
        elif candidates is not None:
            candidates = scoring.keep(indices(candidates, np.int64, size, device, "candidates"))
        if 0 in size or packed_queries.longest == 0 or packed_documents.longest == 0:
            for out in outputs:
                if out is not None:
                    out.array.fill(0)
            return tuple(None if out is None else out.array for out in outputs)
        weights = weights_of(upstream, shape, device).reshape(size)
        weights = scoring.keep(_scaled(weights, packed_queries, metric, reduction))
        if argmax is None:
            winners = _winners(packed_queries, packed_documents, metric, candidates, one_to_one)
        else:
            winners = indices(argmax, np.int32, (*size, packed_queries.longest), device, "argmax")
        pairs = Pairs(slots, winners, weights, candidates, one_to_one)
        arguments = packed_queries, packed_documents, pairs
        if outputs[0] is not None:
            query_gradient(*arguments, outputs[0], metric != "dot", stream)
        if outputs[1] is not None:
            document_gradient(*arguments, outputs[1], metric != "dot", stream)
        return tuple(None if out is None else out.array for out in outputs)
