"""The CPU rows: the only module that touches the C extension."""

from __future__ import annotations

import enum
import os
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from ._numkong import ffi, lib
from .arrays import Collection, read_indices
from .coded import SIGNED, Regions, copy_sets, regions
from .dtypes import NUMPY_DTYPES, SCORED, name_of
from .errors import (
    BackendUnavailable,
    DeviceMismatch,
    IndexOutOfRange,
    InvalidArgument,
    LayoutMismatch,
    MissingKernel,
    NumKongError,
    OutOfMemory,
    ShapeMismatch,
    UnsupportedDtype,
)
from .layout import EXACT, MAGIC, Coding, Contents, Header, aligned_bytes, read_header
from .reference import MaxSimResult
from .threads import piece_count, run_all, thread_count

__all__ = [
    "CODED_DEPTH_MAX",
    "METRICS",
    "PAST_THE_END",
    "PRECISIONS",
    "Capability",
    "CpuRow",
    "coding_of",
    "compiled_capabilities",
    "cpu_rows",
    "detected_capabilities",
    "enabled_capabilities",
    "error_bound",
    "kernel_kinds",
    "open_packed",
    "output_dtype",
    "row_of_layout",
    "score_dtype",
    "xla_calls",
    "xla_handlers",
]


def _text(pointer: Any) -> str:
    return ffi.string(pointer).decode()


def _capability_names() -> dict[str, int]:
    masks = (1 << bit for bit in range(64))
    return {_text(lib.nk_capability_name(mask)): mask for mask in masks if lib.nk_capability_name(mask)}


Capability = enum.IntFlag("Capability", _capability_names(), module=__name__)
Capability.__doc__ = """Instruction-set extensions that a row can require, one bit each, from the C library's list."""
Capability.__str__ = lambda self: " ".join(flag.name for flag in Capability if flag in self) or "none"

DTYPE_IDS = {name: getattr(lib, f"nk_{name}_k") for name in NUMPY_DTYPES}
DTYPE_NAMES = {number: name for name, number in DTYPE_IDS.items()}
OUTPUT_DTYPES = {name: NUMPY_DTYPES[DTYPE_NAMES[lib.nk_maxsim_output_dtype(DTYPE_IDS[name])]] for name in SCORED}
METRICS = {
    name.removeprefix("nk_metric_").removesuffix("_k"): number
    for name, number in ffi.typeof("nk_metric_t").relements.items()
}

PRECISIONS = {
    name.removeprefix("nk_").removesuffix("_k"): number
    for name, number in ffi.typeof("nk_precision_t").relements.items()
}
PRECISION_NAMES = {number: name for name, number in PRECISIONS.items()}
CODED_DEPTH_MAX = lib.nk_coded_depth_max_k

GRADIENT_WORK = 8  # a multiply-add of a gradient, in those of a score: rows are gathered, sums are f64
LONGEST_DOCUMENT = (1 << 31) - 1  # tokens: an argmax is int32
PAST_THE_END = "argmax: names a token past the end of its document; pass what the same call of maxsim returned"
CORPUS_JOB = ffi.typeof("nk_maxsim_corpus_t *")

ERRORS: dict[int, type[NumKongError]] = {
    lib.nk_bad_alloc_k: OutOfMemory,
    lib.nk_unexpected_dimensions_k: ShapeMismatch,
    lib.nk_size_overflow_k: ShapeMismatch,
    lib.nk_device_code_k: DeviceMismatch,
    lib.nk_device_memory_k: DeviceMismatch,
    lib.nk_missing_gpu_k: BackendUnavailable,
    lib.nk_missing_library_k: BackendUnavailable,
    lib.nk_missing_kernel_k: MissingKernel,
    lib.nk_misaligned_k: LayoutMismatch,
    lib.nk_pack_mismatch_k: LayoutMismatch,
    lib.nk_unknown_metric_k: InvalidArgument,
    lib.nk_index_out_of_range_k: IndexOutOfRange,
    lib.nk_bad_capability_name_k: InvalidArgument,
}


def check(status: int, what: str) -> None:
    """Raise the exception of a C status, if it is not success."""
    if status == lib.nk_success_k:
        return
    error = ERRORS.get(status, NumKongError)
    raise error(f"{what}: {_text(lib.nk_status_sentence(status))} ({_text(lib.nk_status_name(status))})")


# ------------------------------------------------------------------------------------- capabilities


def detected_capabilities() -> Capability:
    """Extensions that this machine has and its operating system saves."""
    return Capability(lib.nk_cpu_capabilities_detected())


def compiled_capabilities() -> Capability:
    """Extensions that the rows of this build use."""
    return Capability(lib.nk_cpu_capabilities_compiled())


@lru_cache(maxsize=16)
def _enabled(text: str) -> Capability:
    both = lib.nk_cpu_capabilities_detected() & lib.nk_cpu_capabilities_compiled()
    result = ffi.new("nk_capability_t *")
    for word in text.split(","):
        if lib.nk_capabilities_parse(word.encode(), both, result) == lib.nk_bad_capability_name_k:
            names = [_text(lib.nk_backend_at(index).name) for index in range(lib.nk_backend_count())]
            raise InvalidArgument(
                f"NUMKONG_CAPABILITIES: {word!r} in {text!r} is no name; wanted names separated by commas, with "
                f"a minus to take one away, of {' '.join(Capability.__members__)}, or a row ({' '.join(names)})"
            )
    check(lib.nk_capabilities_parse(text.encode(), both, result), "NUMKONG_CAPABILITIES")
    return Capability(result[0])


def enabled_capabilities() -> Capability:
    """Extensions that are detected and compiled, less what ``NUMKONG_CAPABILITIES`` takes away.

    Raises
    ------
    InvalidArgument
        The environment variable names something that does not exist.
    """
    return _enabled(os.environ.get("NUMKONG_CAPABILITIES", ""))


def output_dtype(dtype: Any) -> np.dtype:
    """NumPy type of a score: float64 for f32 inputs, float32 for bf16 and f16.

    Raises
    ------
    UnsupportedDtype
        The type is not scored.

    Examples
    --------
    >>> output_dtype("bf16"), output_dtype(np.float32)
    (dtype('float32'), dtype('float64'))
    """
    return OUTPUT_DTYPES[name_of(dtype)]


def score_dtype(packed: Any) -> np.dtype:
    """NumPy type of the scores of packed documents: float32 for coded ones, else that of `output_dtype`."""
    return NUMPY_DTYPES["f32"] if packed.precision != "exact" else OUTPUT_DTYPES[packed.dtype]


def coding_of(header: Header) -> Coding:
    """How the buffer of a checked header is coded."""
    return Coding(PRECISION_NAMES[header.flags & 0xFF], header.flags >> 8, header.centroids)


def error_bound(dtype: Any) -> float:
    """Relative error coefficient of the score's type: 2^-51 for f32 inputs, 2^-22 for bf16 and f16.

    ``|result - exact| <= (roundings + 1) c sum_i max_j sum_k |q_ik d_jk|`` with ``roundings = depth + query
    tokens`` and depth + 4 more for cosine and angular; ``return_bounds`` of `maxsim` gives an absolute bound for every
    score.

    Raises
    ------
    UnsupportedDtype
        The type is not scored.

    Examples
    --------
    >>> error_bound("f32") == 2.0**-51
    True
    """
    return lib.nk_maxsim_error_bound(DTYPE_IDS[name_of(dtype)])


def kernel_kinds() -> tuple[str, ...]:
    """Kinds of kernels, by the names that `find_kernel` takes."""
    names = (name.removeprefix("nk_kernel_").removesuffix("_k") for name in ffi.typeof("nk_kernel_kind_t").relements)
    kinds = [name for name in names if name != "unknown"]
    short = [name.removeprefix("maxsim_") for name in kinds]
    return tuple("maxsim_packed" if name == "packed" else name for name in short)


# ------------------------------------------------------------------------------------- the row


class CpuRow:
    """One row of the table of CPU backends.

    Attributes
    ----------
    name : str
    required : Capability
        Extensions that it cannot do without.
    dtypes : tuple of str
        Element types that it really implements.
    device : str
        ``"cpu"``.
    layout : int
        Id stamped into every buffer that it packs.
    built : bool
        Whether this build has its kernels: it is of this architecture and the compiler knew its instructions.
    """

    device = "cpu"
    floor_tokens = lib.nk_floor_tokens_k  # the longest query set that makes use of a floor in `score`

    def __init__(self, backend: Any) -> None:
        self.name = _text(backend.name)
        self.required = Capability(backend.required)
        self.layout = int(backend.layout)
        self.dtypes = tuple(name for name in SCORED if backend.dtypes >> DTYPE_IDS[name] & 1)
        self._mask = int(backend.required)
        self._absent = _text(backend.absent) if backend.absent else None
        self.built = self._absent is None
        self._score = {dtype: getattr(lib, f"nk_maxsim_corpus_{dtype}_best") for dtype in self.dtypes}

    def __repr__(self) -> str:
        state = "available" if self.available else f"not available: {self.reason}"
        return f"<numkong_py row {self.name!r} on {self.device}: {' '.join(self.dtypes)}, {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return row_of_layout, (self.layout,)

    @property
    def available(self) -> bool:
        """Whether this machine, this build and the environment let it run."""
        return self._possible and not self._mask & ~int(enabled_capabilities())

    @cached_property
    def _possible(self) -> bool:
        return self.built and not self._mask & ~lib.nk_cpu_capabilities_detected()

    @property
    def reason(self) -> str | None:
        """Why it is not available, or None."""
        if not self.built:
            return self._absent
        enabled = enabled_capabilities()
        missing = [flag for flag in Capability if flag in self.required and flag not in enabled]
        if not missing:
            return None
        reason = lib.nk_capability_reason(missing[0])
        return _text(reason) if reason else f"{missing[0].name} is taken away by NUMKONG_CAPABILITIES"

    def pack_size(self, documents: int, tokens: int, depth: int, dtype: str, coding: Coding = EXACT) -> int:
        """Bytes of a packed collection."""
        return int(self._describe(documents, tokens, depth, dtype, coding).total_bytes)

    def _describe(self, documents: int, tokens: int, depth: int, dtype: str, coding: Coding) -> Any:
        """The header of a packing of so many documents and tokens, and so the places of its regions."""
        header = ffi.new("nk_packed_header_t *")
        backend = lib.nk_backend_by_layout(self.layout)
        check(
            lib.nk_packed_describe(backend, DTYPE_IDS[dtype], _coding(coding), documents, tokens, depth, header),
            "pack_size",
        )
        return header

    def pack(self, collection: Collection, normalize: bool = False, coding: Coding = EXACT) -> Contents:
        """Pack a collection in host memory into a new uint8 array."""
        offsets = np.ascontiguousarray(collection.offsets, np.uint64)  # named, to outlive the call
        size = self.pack_size(len(collection), int(offsets[-1]), collection.depth, collection.dtype, coding)
        buffer = aligned_bytes(size)
        job = _pack_job(collection, offsets)
        job.normalize = normalize
        job.packed = ffi.from_buffer(buffer)
        if coding == EXACT:
            status = getattr(lib, f"nk_maxsim_pack_corpus_{collection.dtype}_best")(job, self._mask, ffi.NULL)
        else:
            status = lib.nk_maxsim_pack_coded(DTYPE_IDS[collection.dtype], _coding(coding), job, self._mask, ffi.NULL)
        check(status, "pack")
        buffer.flags.writeable = False
        return _contents(self, buffer)

    def in_place(self, collection: Collection) -> ArrayDocuments | None:
        """Documents for `score` without packing them first; None where their tokens cannot be read where they lie."""
        runs, size = collection.runs, NUMPY_DTYPES[collection.dtype].itemsize
        beside = collection.depth < 2 or (runs.element_strides == size)[runs.counts > 0].all()
        aligned = not (runs.row_strides % size).any() and not (runs.pointers % size).any()
        return ArrayDocuments(self, collection) if beside and aligned else None

    def lay_out(self, offsets: np.ndarray, depth: int, dtype: str, coding: Coding) -> tuple[np.ndarray, Regions]:
        """A coded packing with zero codes and scales: its buffer, and views of its regions to fill in before `seal`."""
        header = self._describe(len(offsets) - 1, int(offsets[-1]), depth, dtype, coding)
        buffer = aligned_bytes(int(header.total_bytes))
        buffer[:] = 0
        buffer[: ffi.sizeof("nk_packed_header_t")] = np.frombuffer(ffi.buffer(header), np.uint8)
        found = regions(buffer, coding.precision)
        found.offsets[...] = offsets
        if coding.precision in SIGNED and found.header.tokens:
            found.plane[-1] = found.header.code_bias
        return buffer, found

    def seal(self, buffer: np.ndarray) -> Contents:
        """What a filled buffer of `lay_out` holds."""
        buffer.flags.writeable = False
        return _contents(self, buffer)

    def take(self, contents: Contents, sets: np.ndarray, row: CpuRow | None = None) -> Contents:
        """Chosen sets of a coded packing, bit for bit, as a packing of this row or of another one."""
        source = regions(contents.buffer, contents.coding.precision)
        offsets = np.concatenate([[0], np.cumsum(np.diff(source.offsets)[sets])])
        buffer, target = (row or self).lay_out(offsets, contents.depth, contents.dtype, contents.coding)
        copy_sets(source, sets, target, contents.coding.precision)
        return (row or self).seal(buffer)

    def read_candidates(self, candidates: Any, rows: int, documents: Any) -> np.ndarray:
        """Document indices [rows, count] as `score` takes them: checked, and counted within the documents' buffer."""
        indices = read_indices(candidates, "candidates")
        if indices.ndim == 1 and rows == 1:
            indices = indices[None, :]
        if indices.ndim != 2 or len(indices) != rows:
            raise ShapeMismatch(
                f"candidates: shape {indices.shape}, wanted [{rows}, count], one row for every query set"
            )
        outside = (indices < -1) | (indices >= len(documents))
        if outside.any():
            row, column = np.argwhere(outside)[0]
            raise IndexOutOfRange(
                f"candidates[{row}, {column}]: {indices[row, column]}, wanted 0 to {len(documents) - 1}, or -1 for none"
            )
        if documents.begin:
            indices = np.where(indices < 0, -1, indices + documents.begin)
        return np.ascontiguousarray(indices)

    def check_output(self, out: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The caller's array for scores, if scores can be written to it; any strides will do."""
        fix = f"pass np.empty({shape}, np.{dtype})"
        if not isinstance(out, np.ndarray):
            raise UnsupportedDtype(f"out: a {type(out).__name__}, wanted a NumPy array; {fix}")
        if out.dtype != dtype:
            raise UnsupportedDtype(f"out: dtype {out.dtype}, wanted {dtype}; {fix}")
        if out.shape != shape:
            raise ShapeMismatch(f"out: shape {out.shape}, wanted {shape}; {fix}")
        if not out.flags.writeable:
            raise InvalidArgument(f"out: read-only; {fix}")
        return out

    def unpack(self, contents: Contents, begin: int, end: int) -> np.ndarray:
        """Tokens begin .. end as they were given, [end - begin, depth], in new memory; of a coded packing decoded."""
        if contents.coding != EXACT:
            decoded = np.empty((end - begin, contents.depth), np.float32)
            check(lib.nk_maxsim_decode(contents.pointer, begin, end, ffi.from_buffer("float[]", decoded)), "unpack")
            return decoded
        tokens = np.empty((end - begin, contents.depth), NUMPY_DTYPES[contents.dtype])
        unpack = getattr(lib, f"nk_maxsim_unpack_{contents.dtype}_best")
        target = ffi.from_buffer(f"nk_{contents.dtype}_t[]", tokens.view(np.uint8))
        check(unpack(contents.pointer, begin, end, target, self._mask, ffi.NULL), "unpack")
        return tokens

    def decode(self, contents: Contents, tokens: np.ndarray) -> np.ndarray:
        """What chosen tokens of a coded packing, in ascending order, stand for: float32 [count, depth]."""
        runs = np.split(tokens, np.flatnonzero(np.diff(tokens) != 1) + 1) if len(tokens) else []
        decoded = [self.unpack(contents, int(run[0]), int(run[-1]) + 1) for run in runs]
        return np.concatenate([np.zeros((0, contents.depth), np.float32), *decoded])

    def view(self, contents: Contents, begin: int, end: int) -> np.ndarray:
        """Tokens begin .. end as they are stored, [end - begin, depth]: a read-only view of the packed buffer."""
        start, dtype = read_header(contents.buffer).originals_at, NUMPY_DTYPES[contents.dtype]
        token = contents.depth * dtype.itemsize
        stored = contents.buffer[start + begin * token : start + end * token]
        return stored.view(dtype).reshape(end - begin, contents.depth)

    def first_nonfinite(self, contents: Contents) -> int | None:
        """First token with a NaN or an infinity, or None.

        The stored float64 sums of squares tell: those of finite tokens never overflow. A coded one has no scale.
        """
        header = read_header(contents.buffer)
        if contents.coding == EXACT:
            values = contents.buffer[header.square_at : header.square_at + 8 * header.tokens].view(np.float64)
        else:
            values = regions(contents.buffer, contents.coding.precision).scale[: header.tokens]
        found = np.flatnonzero(~np.isfinite(values))
        return int(found[0]) if len(found) else None

    def score(
        self,
        queries: Any,
        documents: Any,
        *,
        metric: int,
        mean: bool = False,
        empty: float | None = None,
        candidates: np.ndarray | None = None,
        out: np.ndarray | None = None,
        return_argmax: bool = False,
        return_token_scores: bool = False,
        return_bounds: bool = False,
        threads: int | None = None,
        floors: np.ndarray | None = None,
    ) -> MaxSimResult:
        """Score packed query sets against packed documents, [queries, documents] or [queries, candidates].

        Documents that certainly stay below a query set's floor (float64, one a set; above it, for angular) may be left
        out, with the worst of all scores.

        Both are `PackedTensor` of this row, documents also what `in_place` returned, of one dtype and one depth;
        candidates are int64 and contiguous, count within the documents' buffer and were checked; out is None or an
        array of the scores' shape and type.
        """
        dtype = documents.dtype
        output = score_dtype(documents)
        rows = queries.end - queries.begin
        columns = documents.end - documents.begin if candidates is None else candidates.shape[1]
        longest = queries.longest if return_argmax or return_token_scores else 0
        scores = np.empty((rows, columns), output) if out is None else out
        bounds = np.empty((rows, columns)) if return_bounds else None
        argmax = np.full((rows, columns, longest), -1, np.int32) if return_argmax else None
        token_scores = np.zeros((rows, columns, longest), output) if return_token_scores else None
        result = MaxSimResult(scores, argmax, token_scores, bounds)
        if rows == 0 or columns == 0:
            return result
        if documents.tokens > LONGEST_DOCUMENT:
            _refuse_longest(documents, candidates)

        job = ffi.new(CORPUS_JOB)
        job.queries = queries.pointer
        if isinstance(documents, ArrayDocuments):
            job.arrays = documents.job
        else:
            job.documents = documents.pointer
        job.query_begin, job.query_end = queries.begin, queries.end
        job.document_begin, job.document_end = documents.begin, documents.end
        job.metric, job.mean = metric, mean
        if empty is not None:
            job.empty_given, job.empty_value = 1, empty
        if candidates is not None:
            job.candidates = ffi.from_buffer("nk_i64_t[]", candidates)
            job.candidate_count = columns
        job.scores = ffi.from_buffer(scores)
        job.score_stride = columns
        job.token_stride = longest
        if floors is not None:
            job.floors = ffi.from_buffer("nk_f64_t[]", floors)
        if bounds is not None:
            job.bounds = ffi.from_buffer("nk_f64_t[]", bounds)
        if argmax is not None:
            job.argmax = ffi.from_buffer("nk_i32_t[]", argmax)
        if token_scores is not None:
            job.token_scores = ffi.from_buffer(token_scores)

        work = queries.tokens * documents.tokens * documents.depth
        if candidates is not None:
            work = work * columns // max(1, documents.end - documents.begin)
        count = thread_count(threads, work)
        if count == 1:
            status = self._score[dtype](job, self._mask, ffi.NULL)
            if status:
                check(status, "maxsim")
            return result
        lists, shares = candidates is not None, piece_count(count, work)
        pieces = split_lists(queries, columns, shares) if lists else split_documents(queries, documents, shares)
        owners = (queries, documents, candidates, floors, result)
        run_all(partial(self._score_piece, job, dtype, output.itemsize, owners), pieces, count)
        return result

    def _score_piece(self, whole: Any, dtype: str, itemsize: int, owners: Any, piece: Piece) -> None:
        """Score query sets and columns of a job; the outputs of pieces do not overlap.

        The owners of what the job points to are here to outlive it, even where its caller is interrupted.
        """
        first_query, last_query, first, last = piece
        skipped = first_query * whole.score_stride + first
        job = ffi.new(CORPUS_JOB, whole[0])
        job.query_begin, job.query_end = whole.query_begin + first_query, whole.query_begin + last_query
        job.document_begin, job.document_end = whole.document_begin + first, whole.document_begin + last
        if whole.candidates:
            job.candidates, job.candidate_count = whole.candidates + skipped, last - first
        job.scores = ffi.cast("char *", whole.scores) + skipped * itemsize
        if whole.floors:
            job.floors = whole.floors + first_query
        if whole.bounds:
            job.bounds = whole.bounds + skipped
        if whole.argmax:
            job.argmax = whole.argmax + skipped * whole.token_stride
        if whole.token_scores:
            job.token_scores = ffi.cast("char *", whole.token_scores) + skipped * whole.token_stride * itemsize
        check(self._score[dtype](job, self._mask, ffi.NULL), "maxsim")

    def squares(self, tokens: np.ndarray, dtype: str) -> np.ndarray:
        """Sums of squares of contiguous tokens [count, depth], float64 [count], in the order of a pair value."""
        squares = np.empty(len(tokens))
        pointer, count, depth = _address("void *", tokens), *tokens.shape
        status = lib.nk_token_squares(
            DTYPE_IDS[dtype], pointer, count, depth, _address("nk_f64_t *", squares), self._mask
        )
        check(status, "squares")
        return squares

    def gradient(
        self,
        queries: Any,
        documents: Any,
        upstream: np.ndarray,
        argmax: np.ndarray,
        *,
        candidates: np.ndarray | None,
        metric: int,
        mean: bool,
        of_documents: bool,
        dtype: str,
        threads: int | None = None,
    ) -> np.ndarray:
        """Gradient of one side (`numkong_py.sides.Side`) in its layout and in a dtype.

        Upstream is float64 ``[queries, slots]`` of any strides; argmax int32 and contiguous; candidates int64 and
        contiguous, checked, -1 for none.
        """
        side = documents if of_documents else queries
        gradient = side.empty_gradient(NUMPY_DTYPES[dtype])
        slots = upstream.shape[1]
        job = ffi.new("nk_maxsim_gradient_t *")
        keep = [gradient, upstream, argmax, candidates]  # what the job points to
        job.dtype, job.gradient_dtype, job.depth = DTYPE_IDS[side.dtype], DTYPE_IDS[dtype], side.depth
        job.metric, job.mean, job.of_documents = metric, mean, of_documents
        for sets, target in ((queries, job.queries), (documents, job.documents)):
            keep += self._point_at_sets(target, sets, squares=metric != METRICS["dot"])
        job.columns, job.token_stride = slots, argmax.shape[-1]
        job.upstream = _address("nk_f64_t *", upstream)
        job.upstream_strides = [stride // upstream.itemsize for stride in upstream.strides]
        job.argmax = _address("nk_i32_t *", argmax)
        job.gradient = _address("void *", gradient)
        if side.places is not None:
            job.places = _address("nk_u64_t *", side.places)
        costs = queries.offsets * (slots + 1)
        if candidates is not None:
            job.candidates = _address("nk_i64_t *", candidates)
        if of_documents:
            costs = documents.offsets + queries.offsets[-1] * np.arange(len(documents) + 1)
        if of_documents and candidates is not None:
            listing, listing_offsets = _turn_round(candidates, len(documents))
            keep += [listing, listing_offsets]
            job.listing = _address("nk_u64_t *", listing)
            job.listing_offsets = _address("nk_u64_t *", listing_offsets)
            costs = documents.offsets + queries.longest * listing_offsets
        count = thread_count(threads, GRADIENT_WORK * slots * int(queries.offsets[-1]) * side.depth)
        pieces = _cuts(costs, count) if of_documents else _even_cuts(int(queries.offsets[-1]), count)
        if pieces:
            run_all(partial(self._gradient_piece, job, keep), pieces, count)
        return gradient

    def _point_at_sets(self, target: Any, side: Any, squares: bool) -> list[np.ndarray]:
        """Fill an ``nk_token_sets_t``; returns what it points to."""
        tokens, offsets = side.tokens, np.ascontiguousarray(side.offsets)
        target.tokens = _address("void *", tokens)
        target.offsets = _address("nk_u64_t *", offsets)
        target.sets = len(side)
        if not squares:
            return [tokens, offsets]
        values = self.squares(tokens, side.dtype)
        target.squares = _address("nk_f64_t *", values)
        return [tokens, offsets, values]

    def _gradient_piece(self, whole: Any, keep: Any, piece: tuple[int, int]) -> None:
        job = ffi.new("nk_maxsim_gradient_t *", whole[0])
        job.begin, job.end = piece
        status = lib.nk_maxsim_gradient(job, self._mask)
        if status == lib.nk_index_out_of_range_k:
            raise IndexOutOfRange(PAST_THE_END)
        check(status, "gradient")

    def nearest(self, points: Any, others: Any, threads: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Nearest of the others in the cloud of the same number, for every point of a `Side`.

        Returns int32 positions within that cloud (-1 where it is empty) and float64 squared distances, both [points].
        """
        total = int(points.offsets[-1])
        nearest, squares = np.empty(total, np.int32), np.empty(total)
        job = ffi.new("nk_nearest_t *")
        job.dtype, job.depth = DTYPE_IDS[points.dtype], points.depth
        keep = [nearest, squares]
        for side, target in ((points, job.points), (others, job.others)):
            keep += self._point_at_sets(target, side, squares=False)
        job.nearest = _address("nk_i32_t *", nearest)
        job.squares = _address("nk_f64_t *", squares)
        costs = np.concatenate([[0], np.cumsum(np.diff(points.offsets) * (np.diff(others.offsets) + 1.0))])
        count = thread_count(threads, int(costs[-1]) * points.depth)
        edges = np.interp(np.linspace(0, costs[-1], count + 1), costs, points.offsets).astype(np.int64)
        run_all(partial(self._nearest_piece, job, keep), list(pairwise(edges.tolist())), count)
        return nearest, squares

    def _nearest_piece(self, whole: Any, keep: Any, piece: tuple[int, int]) -> None:
        job = ffi.new("nk_nearest_t *", whole[0])
        job.begin, job.end = piece
        check(lib.nk_nearest(job, self._mask), "nearest")


class ArrayDocuments:
    """Documents where the caller has them: for one call of `CpuRow.score` what a `PackedTensor` is."""

    precision = "exact"
    device = "cpu"
    begin = 0

    def __init__(self, row: CpuRow, collection: Collection) -> None:
        self.row, self.dtype, self.depth, self.single = row, collection.dtype, collection.depth, collection.single
        self.collection = collection  # keeps the tokens
        self.offsets = collection.offsets
        self.end = len(collection)
        self.tokens = int(self.offsets[-1])
        self._unsigned = np.ascontiguousarray(self.offsets, np.uint64)
        self.job = _pack_job(collection, self._unsigned)

    def __len__(self) -> int:
        return self.end

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in every document: int64 [count]."""
        return np.diff(self.offsets)


def _pack_job(collection: Collection, offsets: np.ndarray) -> Any:
    """``nk_maxsim_pack_t`` of a collection; both, offsets in uint64, must outlive it."""
    runs = collection.runs
    job = ffi.new("nk_maxsim_pack_t *")
    job.tokens.runs = len(runs.pointers)
    job.tokens.pointers = ffi.from_buffer("nk_u64_t[]", runs.pointers)
    job.tokens.counts = ffi.from_buffer("nk_u64_t[]", runs.counts)
    job.tokens.row_strides = ffi.from_buffer("nk_i64_t[]", runs.row_strides)
    job.tokens.element_strides = ffi.from_buffer("nk_i64_t[]", runs.element_strides)
    job.offsets = ffi.from_buffer("nk_u64_t[]", offsets)
    job.documents = len(collection)
    job.depth = collection.depth
    return job


def _coding(coding: Coding) -> Any:
    return ffi.new("nk_coding_t *", (PRECISIONS[coding.precision], coding.bits, coding.centroids))


def _refuse_longest(documents: Any, candidates: np.ndarray | None) -> None:
    """Raise if a document that would be scored has more tokens than positions can count."""
    lengths = documents.lengths
    chosen = np.arange(len(lengths)) if candidates is None else np.unique(candidates[candidates >= 0]) - documents.begin
    long = chosen[lengths[chosen] > LONGEST_DOCUMENT]
    if len(long):
        raise ShapeMismatch(
            f"docs: document {documents.begin + long[0]} of the packed collection has {lengths[long[0]]} tokens, "
            f"wanted at most {LONGEST_DOCUMENT}, which int32 positions can count; split it"
        )


def _address(kind: str, array: np.ndarray) -> Any:
    """Pointer to an array's first element; the array must outlive it."""
    return ffi.cast(kind, array.__array_interface__["data"][0])


def _turn_round(candidates: np.ndarray, documents: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores by document: their numbers, row by row, in ascending order, and where each document's begin."""
    flat = candidates.ravel()
    order = np.argsort(flat, kind="stable")
    offsets = np.searchsorted(flat, np.arange(documents + 1), sorter=order)
    return order[offsets[0] :], offsets - offsets[0]


# ------------------------------------------------------------------------------------- pieces for threads

Piece = tuple[int, int, int, int]  # query sets begin .. end and columns begin .. end, counted from the job's first


def _cuts(offsets: np.ndarray, pieces: int) -> list[tuple[int, int]]:
    """Ranges of sets with about as many tokens each; a set weighs one more than its tokens, so empty ones count too."""
    weights = offsets - offsets[0] + np.arange(len(offsets))
    targets = weights[-1] * np.arange(1, pieces) // pieces
    edges = np.unique(np.concatenate([[0], np.searchsorted(weights, targets), [len(offsets) - 1]]))
    return list(pairwise(edges.tolist()))


def _even_cuts(count: int, pieces: int) -> list[tuple[int, int]]:
    """Ranges of about as many things each."""
    return list(pairwise(np.unique(np.linspace(0, count, pieces + 1).astype(np.int64)).tolist()))


def split_documents(queries: Any, documents: Any, pieces: int) -> list[Piece]:
    """Split the documents, and the query sets too where there are fewer documents than pieces."""
    columns = _cuts(documents.offsets, min(pieces, len(documents)))
    rows = _cuts(queries.offsets, min(len(queries), max(1, pieces // len(columns))))
    return [(*row, *column) for row in rows for column in columns]


def split_lists(queries: Any, columns: int, pieces: int) -> list[Piece]:
    """Split lists of candidates: by query set where there are enough of them, else every list by itself."""
    rows = len(queries)
    if rows >= pieces:
        return [(*row, 0, columns) for row in _cuts(queries.offsets, pieces)]
    edges = np.unique(np.linspace(0, columns, pieces // rows + 1).astype(int)).tolist()
    return [(row, row + 1, first, last) for row in range(rows) for first, last in pairwise(edges)]


# ------------------------------------------------------------------------------------- the table


@lru_cache(maxsize=1)
def cpu_rows() -> tuple[CpuRow, ...]:
    """Every row of the table in ``backends.inc``, best first, whether or not it is built or available."""
    return tuple(CpuRow(lib.nk_backend_at(index)) for index in range(lib.nk_backend_count()))


def row_of_layout(layout: int) -> CpuRow:
    """The row with a layout id.

    Raises
    ------
    LayoutMismatch
        No row of this version has it.
    """
    for row in cpu_rows():
        if row.layout == layout:
            return row
    raise LayoutMismatch(f"packed: layout {layout} belongs to no CPU row of this version; pack again")


def _contents(row: CpuRow, buffer: np.ndarray) -> Contents:
    header = read_header(buffer)
    offsets = buffer[header.offsets_at : header.offsets_at + 8 * (header.documents + 1)].view(np.int64)
    dtype, coding = DTYPE_NAMES[header.dtype], coding_of(header)
    return Contents(row, buffer, ffi.from_buffer(buffer), dtype, header.depth, offsets, row.device, coding)


def open_packed(buffer: np.ndarray) -> Contents:
    """Check packed bytes (header, size, document offsets) and read what they hold; bytes off a boundary are copied.

    Raises
    ------
    LayoutMismatch
        The bytes are not a packed buffer of a CPU row, are damaged, or are too few.
    BackendUnavailable
        They were packed by a row that is not in this build.
    """
    what = f"packed: {buffer.nbytes} bytes"
    if buffer.nbytes < ffi.sizeof("nk_packed_header_t"):
        raise LayoutMismatch(f"{what} are less than a header")
    if buffer.ctypes.data % lib.nk_packed_base_alignment_k:
        aligned = aligned_bytes(buffer.nbytes)
        aligned[:] = buffer
        buffer = aligned
    status = lib.nk_packed_check(ffi.from_buffer(buffer), buffer.nbytes)
    header = read_header(buffer)
    if status == lib.nk_missing_kernel_k:
        row = row_of_layout(header.layout)
        raise BackendUnavailable(f"{what} of row {row.name!r}: {row.reason}; unpack where it was packed, pack here")
    if buffer[: len(MAGIC)].tobytes() == MAGIC and header.total_bytes > buffer.nbytes:
        raise LayoutMismatch(f"{what}, and its header says {header.total_bytes}: truncated or damaged; pack again")
    check(status, what)
    check(lib.nk_packed_check_offsets(ffi.from_buffer(buffer), 0, header.documents), f"{what}, document offsets")
    return _contents(row_of_layout(header.layout), buffer)


# ------------------------------------------------------------------------------------- JAX custom calls

XLA_LAYOUTS = {
    name.removeprefix("nk_xla_layout_").removesuffix("_k"): number
    for name, number in ffi.typeof("nk_xla_layout_t").relements.items()
}
XLA_OUTPUTS = {
    name.removeprefix("nk_xla_output_").removesuffix("_k"): number
    for name, number in ffi.typeof("nk_xla_output_t").relements.items()
}


def xla_handlers() -> dict[str, int]:
    """Addresses of the handlers for XLA, by the names that they are registered under."""
    names = ("nk_xla_maxsim", "nk_xla_maxsim_gradient", "nk_xla_nearest")
    return {name: int(ffi.cast("uintptr_t", ffi.addressof(lib, name))) for name in names}


def xla_calls() -> tuple[int, int]:
    """Handler calls so far, and the address of the last one's first argument: what tests of batching and copies ask."""
    return int(lib.nk_xla_calls()), int(lib.nk_xla_last_address())
