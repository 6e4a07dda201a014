"""The C ABI, called through cffi: results, statuses, misuse, and that nothing is written where a call fails."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from oracle import DTYPES, METRICS, ROOT, assert_same_bits, tokens

from numkong_py import reference
from numkong_py.cpu import ffi, lib

SENTINEL = -12345.0
NULL = ffi.NULL
HEADER_BYTES = 256


def rows() -> list[Any]:
    """The C table."""
    return [lib.nk_backend_at(i) for i in range(lib.nk_backend_count())]


def runnable(dtype: str) -> list[int]:
    """Masks of the rows that can run the dtype here, best first."""
    enabled, bit = lib.nk_cpu_capabilities_enabled(), 1 << getattr(lib, f"nk_{dtype}_k")
    return [
        row.required for row in rows() if row.kernels and row.dtypes & bit and row.required & enabled == row.required
    ]


def function(name: str, dtype: str) -> Any:
    """``nk_maxsim_<name>_<dtype>_best``."""
    return getattr(lib, f"nk_maxsim_{name}_{dtype}_best")


def raw(x: np.ndarray) -> np.ndarray:
    """An array that cffi takes: the bits of 16-bit floats as uint16."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x


def pointer(x: np.ndarray, dtype: str) -> Any:
    return ffi.cast(f"nk_{dtype}_t *", x.ctypes.data)


def aligned(count: int, shift: int = 0) -> np.ndarray:
    """Bytes whose address is a multiple of 64, plus a shift."""
    spare = np.zeros(count + 128, np.uint8)
    start = -spare.ctypes.data % 64 + shift
    return spare[start : start + count]


def address(buffer: np.ndarray) -> Any:
    return ffi.cast("void *", buffer.ctypes.data)


def size(dtype: str, count: int, depth: int, mask: int) -> int:
    answer = ffi.new("nk_size_t *")
    assert function("pack_size", dtype)(count, depth, mask, answer) == lib.nk_success_k
    return answer[0]


def pack(x: np.ndarray, dtype: str, mask: int) -> np.ndarray:
    """Pack one token set with the best row of a mask."""
    packed = aligned(size(dtype, *x.shape, mask))
    status = function("pack", dtype)(pointer(x, dtype), *x.shape, x.strides[0], address(packed), mask, NULL)
    assert status == lib.nk_success_k
    return packed


def pack_corpus(parts: list[np.ndarray], dtype: str, mask: int) -> np.ndarray:
    """Pack token sets with one run per set."""
    answer, depth = ffi.new("nk_size_t *"), parts[0].shape[1]
    total = sum(len(part) for part in parts)
    assert function("pack_corpus_size", dtype)(len(parts), total, depth, mask, answer) == lib.nk_success_k
    packed = aligned(answer[0])
    keep = {
        "pointers": ffi.new("nk_u64_t[]", [part.ctypes.data for part in parts]),
        "counts": ffi.new("nk_u64_t[]", [len(part) for part in parts]),
        "row_strides": ffi.new("nk_i64_t[]", [part.strides[0] for part in parts]),
        "element_strides": ffi.new("nk_i64_t[]", [part.strides[1] for part in parts]),
    }
    offsets = ffi.new("nk_u64_t[]", np.cumsum([0, *(len(part) for part in parts)]).tolist())
    job = ffi.new("nk_maxsim_pack_t *")
    job.tokens = {"runs": len(parts), **keep}
    job.offsets, job.documents, job.depth, job.packed = offsets, len(parts), depth, address(packed)
    assert function("pack_corpus", dtype)(job, mask, NULL) == lib.nk_success_k
    return packed


def score(dtype: str, queries: Any, documents: Any, counts: tuple[int, int, int], mask: int, stream: Any = NULL) -> Any:
    """Call ``nk_maxsim_packed_<dtype>_best``: (status, result, which holds the sentinel where nothing was written)."""
    result = ffi.new("nk_f64_t *" if dtype == "f32" else "nk_f32_t *", SENTINEL)
    left, right = (address(side) if isinstance(side, np.ndarray) else side for side in (queries, documents))
    status = function("packed", dtype)(left, right, *counts, result, mask, stream)
    return status, result[0]


every_dtype = pytest.mark.parametrize("dtype", DTYPES)

# ------------------------------------------------------------------------------------------ small functions


def test_every_status_has_a_name_and_a_sentence() -> None:
    elements = ffi.typeof("nk_status_t").elements
    assert {name: value for value, name in elements.items()}["nk_pack_mismatch_k"] == -21
    for value, enumerator in elements.items():
        assert ffi.string(lib.nk_status_name(value)).decode() == enumerator.removeprefix("nk_").removesuffix("_k")
        assert len(ffi.string(lib.nk_status_sentence(value))) >= (4 if value == 0 else 15)
    assert ffi.string(lib.nk_status_name(-9999)).decode() not in set(elements.values())
    assert ffi.string(lib.nk_status_sentence(-9999))


def test_statuses_have_the_values_of_numkong_8_and_ours_are_below() -> None:
    theirs = {
        "success": 0,
        "bad_alloc": -10,
        "unexpected_dimensions": -15,
        "missing_gpu": -16,
        "device_code": -17,
        "device_memory": -18,
        "missing_kernel": -19,
        "misaligned": -20,
        "pack_mismatch": -21,
        "missing_library": -22,
    }
    for value, enumerator in ffi.typeof("nk_status_t").elements.items():
        name = enumerator.removeprefix("nk_").removesuffix("_k")
        assert theirs.pop(name, None) == value or value < -64, name
    assert not theirs


def test_output_dtype_and_error_bound() -> None:
    assert lib.nk_maxsim_output_dtype(lib.nk_f32_k) == lib.nk_f64_k
    assert lib.nk_maxsim_output_dtype(lib.nk_bf16_k) == lib.nk_maxsim_output_dtype(lib.nk_f16_k) == lib.nk_f32_k
    assert lib.nk_maxsim_output_dtype(lib.nk_f64_k) == lib.nk_dtype_unknown_k
    assert lib.nk_maxsim_error_bound(lib.nk_f32_k) == 2.0**-51
    assert lib.nk_maxsim_error_bound(lib.nk_bf16_k) == lib.nk_maxsim_error_bound(lib.nk_f16_k) == 2.0**-22
    assert lib.nk_maxsim_error_bound(lib.nk_f64_k) == 0


def test_capability_masks_nest() -> None:
    detected, compiled = lib.nk_cpu_capabilities_detected(), lib.nk_cpu_capabilities_compiled()
    enabled = lib.nk_cpu_capabilities_enabled()
    assert enabled & ~(detected & compiled) == 0
    assert enabled & 1, "serial cannot be taken away"


def parse(text: bytes | None, base: int) -> tuple[int, int]:
    result = ffi.new("nk_capability_t *", 99)
    return lib.nk_capabilities_parse(NULL if text is None else ffi.new("char[]", text), base, result), result[0]


def test_capabilities_are_parsed() -> None:
    names = {lib.nk_capability_name(1 << bit): 1 << bit for bit in range(64)}
    masks = {ffi.string(name).decode(): mask for name, mask in names.items() if name}
    avx2, fma, f16c, serial = (masks[name] for name in ("avx2", "fma", "f16c", "serial"))
    everything = serial | avx2 | fma | f16c
    assert parse(None, everything) == parse(b"", everything) == (0, everything)
    assert parse(b"haswell", everything) == (0, everything)
    assert parse(b"serial", everything) == (0, serial)
    assert parse(b"avx2,fma", everything) == (0, serial | avx2 | fma)
    assert parse(b"-fma", everything) == (0, everything & ~fma)
    assert parse(b"-serial", everything)[1] & serial
    assert parse(b"nonsense", everything) == (lib.nk_bad_capability_name_k, 99)
    assert parse(b"avx2,nonsense", everything) == (lib.nk_bad_capability_name_k, 99)
    assert lib.nk_capabilities_parse(NULL, 1, NULL) == lib.nk_null_argument_k


def test_the_table_has_unique_names_and_layouts() -> None:
    table = rows()
    assert lib.nk_backend_at(len(table)) == NULL
    assert len({row.layout for row in table}) == len({ffi.string(row.name) for row in table}) == len(table)
    for row in table:
        assert lib.nk_backend_by_layout(row.layout) == row
    assert lib.nk_backend_by_layout(987654) == NULL


# --------------------------------------------------------------------------------------------------- results


@every_dtype
def test_packed_returns_the_angular_score_of_every_row(dtype: str) -> None:
    for mask, counts in itertools.product(
        runnable(dtype), [(1, 1, 1), (7, 9, 33), (0, 3, 8), (3, 0, 8), (33, 49, 128)]
    ):
        query, document = (
            tokens("random", dtype, counts[0], counts[2], 1),
            tokens("random", dtype, counts[1], counts[2], 2),
        )
        packed = pack(query, dtype, mask), pack(document, dtype, mask)
        status, result = score(dtype, *packed, counts, mask)
        assert status == lib.nk_success_k
        expected = reference.maxsim(query, document, metric="angular")[0]
        assert_same_bits(np.array(result, expected.dtype), np.array(expected))
        vectors, depth = ffi.new("nk_size_t *"), ffi.new("nk_size_t *")
        assert function("packed_shape", dtype)(address(packed[1]), vectors, depth, mask, NULL) == lib.nk_success_k
        assert (vectors[0], depth[0]) == counts[1:]


@every_dtype
@pytest.mark.parametrize("metric", METRICS)
def test_corpus_returns_scores_argmax_token_scores_and_bounds(dtype: str, metric: str) -> None:
    queries = [tokens("random", dtype, count, 40, count) for count in (3, 0, 9)]
    documents = [tokens("random", dtype, count, 40, 50 + count) for count in (0, 17, 2, 1)]
    expected = reference.maxsim(
        queries, documents, metric=metric, return_argmax=True, return_token_scores=True, return_bounds=True
    )
    output = expected.scores.dtype
    for mask in runnable(dtype):
        packed = pack_corpus(queries, dtype, mask), pack_corpus(documents, dtype, mask)
        scores, bounds = np.full((3, 6), SENTINEL, output), np.full((3, 6), SENTINEL)
        argmax, token_scores = np.full((3, 6, 11), -99, np.int32), np.full((3, 6, 11), SENTINEL, output)
        job = corpus_job(packed, 3, 4, scores, metric)
        job.bounds = ffi.cast("nk_f64_t *", bounds.ctypes.data)
        job.argmax = ffi.cast("nk_i32_t *", argmax.ctypes.data)
        job.token_scores, job.token_stride = address(token_scores), 11
        assert function("corpus", dtype)(job, mask, NULL) == lib.nk_success_k
        actual = reference.MaxSimResult(scores[:, :4], argmax[:, :4, :9], token_scores[:, :4, :9], bounds[:, :4])
        assert_same_bits(actual.scores, expected.scores)
        for s, query in enumerate(queries):
            count = len(query)
            assert_same_bits(actual.argmax[s, :, :count], expected.argmax[s, :, :count], "argmax")
            assert_same_bits(actual.token_scores[s, :, :count], expected.token_scores[s, :, :count], "token_scores")
        assert (scores[:, 4:] == SENTINEL).all() and (argmax[:, 4:] == -99).all(), "written outside the columns"
        assert (bounds[:, 4:] == SENTINEL).all() and (token_scores[:, 4:] == SENTINEL).all()


def corpus_job(
    packed: tuple[np.ndarray, np.ndarray], queries: int, documents: int, scores: np.ndarray, metric: str
) -> Any:
    """A job over whole collections that writes into a 2-D array of scores."""
    job = ffi.new("nk_maxsim_corpus_t *")
    job.queries, job.documents = address(packed[0]), address(packed[1])
    job.query_end, job.document_end = queries, documents
    job.metric = getattr(lib, f"nk_metric_{metric}_k")
    job.scores, job.score_stride = address(scores), scores.shape[1]
    return job


@every_dtype
def test_corpus_ranges_and_candidates_are_parts_of_the_whole(dtype: str) -> None:
    queries = [tokens("random", dtype, count, 24, count) for count in (3, 1, 9)]
    documents = [tokens("random", dtype, count, 24, 50 + count) for count in (0, 17, 2, 1, 8)]
    whole = reference.maxsim(queries, documents)
    for mask in runnable(dtype):
        packed = pack_corpus(queries, dtype, mask), pack_corpus(documents, dtype, mask)
        scores = np.full((2, 3), SENTINEL, whole.dtype)
        job = corpus_job(packed, 3, 4, scores, "dot")
        job.query_begin, job.document_begin = 1, 1
        assert function("corpus", dtype)(job, mask, NULL) == lib.nk_success_k
        assert_same_bits(scores, whole[1:3, 1:4])
        candidates = np.array([[4, -1, 2], [0, 4, 4]])
        job.candidates, job.candidate_count = ffi.cast("nk_i64_t *", candidates.ctypes.data), 3
        assert function("corpus", dtype)(job, mask, NULL) == lib.nk_success_k
        assert_same_bits(scores, reference.maxsim_candidates(queries[1:], documents, candidates))


def pack_coded(packed: np.ndarray, dtype: str, mask: int, depth: int, **coding: int) -> tuple[int, np.ndarray]:
    """Code three tokens of an exact packing's vectors anew: the status, and the buffer."""
    x = np.linspace(-1, 1, 3 * depth, dtype=np.float32).reshape(3, depth).astype(DTYPES[dtype])
    fields = {"precision": lib.nk_int8_k, **coding}
    header, given = ffi.new("nk_packed_header_t *"), ffi.new("nk_coding_t *", fields)
    backend = lib.nk_backend_best(getattr(lib, f"nk_{dtype}_k"), mask)
    status = lib.nk_packed_describe(backend, getattr(lib, f"nk_{dtype}_k"), given, 1, 3, depth, header)
    if status:
        return status, packed
    buffer = aligned(header.total_bytes)
    keep = [ffi.new("nk_u64_t[]", [x.ctypes.data]), ffi.new("nk_u64_t[]", [3]), ffi.new("nk_u64_t[]", [0, 3])]
    keep += [ffi.new("nk_i64_t[]", [x.strides[0]]), ffi.new("nk_i64_t[]", [x.strides[1]])]
    job = ffi.new("nk_maxsim_pack_t *")
    job.tokens = {"runs": 1, "pointers": keep[0], "counts": keep[1], "row_strides": keep[3], "element_strides": keep[4]}
    job.offsets, job.documents, job.depth, job.packed = keep[2], 1, depth, address(buffer)
    return lib.nk_maxsim_pack_coded(getattr(lib, f"nk_{dtype}_k"), given, job, mask, NULL), buffer


@every_dtype
def test_coded_packings(dtype: str) -> None:
    x = np.linspace(-1, 1, 72, dtype=np.float32).reshape(3, 24).astype(DTYPES[dtype])
    for mask in runnable(dtype):
        exact = pack(x, dtype, mask)
        status, coded = pack_coded(exact, dtype, mask, 24)
        assert status == lib.nk_success_k
        vectors = np.full((3, 24), SENTINEL, np.float32)
        target = ffi.cast("nk_f32_t *", vectors.ctypes.data)
        assert lib.nk_maxsim_decode(address(coded), 1, 3, target) == lib.nk_success_k
        assert_same_bits(vectors[:2], reference.decoded(x, "int8")[1:])
        assert (vectors[2] == SENTINEL).all()
        assert lib.nk_maxsim_decode(address(coded), 1, 4, target) == lib.nk_index_out_of_range_k
        assert lib.nk_maxsim_decode(address(exact), 0, 3, target) == lib.nk_pack_mismatch_k
        assert lib.nk_maxsim_decode(address(coded), 0, 3, NULL) == lib.nk_null_argument_k

        scores = np.full((1, 1), SENTINEL, np.float32)
        for queries, documents, wanted in (
            (exact, coded, lib.nk_success_k),
            (coded, coded, lib.nk_success_k),
            (coded, exact, lib.nk_pack_mismatch_k),
        ):
            scores[:] = SENTINEL
            job = corpus_job((queries, documents), 1, 1, scores, "cosine")
            assert function("corpus", dtype)(job, mask, NULL) == wanted
            assert abs(scores[0, 0] - 3) < 0.1 if wanted == lib.nk_success_k else scores[0, 0] == SENTINEL
        assert score(dtype, exact, coded, (3, 3, 24), mask) == (lib.nk_pack_mismatch_k, SENTINEL)
        unpacked = np.zeros((3, 24), DTYPES[dtype])
        given = address(coded), 0, 3, pointer(unpacked, dtype), mask, NULL
        assert function("unpack", dtype)(*given) == lib.nk_pack_mismatch_k
        for byte in range(HEADER_BYTES):
            damaged = aligned(len(coded))
            damaged[:] = coded
            damaged[byte] ^= 0x10
            assert lib.nk_maxsim_decode(address(damaged), 0, 3, target) == lib.nk_pack_mismatch_k, byte

        assert pack_coded(exact, dtype, mask, 131073)[0] == lib.nk_unexpected_dimensions_k
        for wrong in ({"bits": 2}, {"centroids": 1}, {"precision": 9}, {"precision": lib.nk_residual_k, "bits": 3}):
            assert pack_coded(exact, dtype, mask, 24, **wrong)[0] == lib.nk_unexpected_dimensions_k, wrong
        assert lib.nk_maxsim_pack_coded(0, NULL, NULL, mask, NULL) == lib.nk_null_argument_k


@every_dtype
def test_unpack_and_row_strides(dtype: str) -> None:
    wide = tokens("extremes", dtype, 9, 40, 1)
    for mask in runnable(dtype):
        packed = pack(wide[:, :33], dtype, mask)
        out = np.zeros((4, 33), raw(wide).dtype)
        assert function("unpack", dtype)(address(packed), 3, 7, pointer(out, dtype), mask, NULL) == lib.nk_success_k
        assert np.array_equal(out, raw(wide)[3:7, :33])
        assert function("unpack", dtype)(address(packed), 3, 10, pointer(out, dtype), mask, NULL) == -68
        assert function("unpack", dtype)(address(packed), 7, 3, pointer(out, dtype), mask, NULL) == -68


@every_dtype
def test_find_kernel(dtype: str) -> None:
    kernel, capability = ffi.new("nk_kernel_punned_t *"), ffi.new("nk_capability_t *")
    number, enabled = getattr(lib, f"nk_{dtype}_k"), lib.nk_cpu_capabilities_enabled()
    found = {}
    for kind in ("pack_size", "packed_shape", "pack", "packed", "corpus", "unpack"):
        kind_number = getattr(lib, f"nk_kernel_maxsim_{kind}_k")
        assert lib.nk_maxsim_find_kernel(kind_number, number, enabled, kernel, capability) == lib.nk_success_k
        assert capability[0] == runnable(dtype)[0]
        found[kind] = ffi.cast(ffi.typeof(ffi.addressof(lib, f"nk_maxsim_{kind}_{dtype}_best")), kernel[0])
    assert len(set(found.values())) == 6 and NULL not in found.values()
    x, mask = tokens("random", dtype, 4, 16, 1), capability[0]
    bytes_, result = ffi.new("nk_size_t *"), ffi.new("nk_f64_t *" if dtype == "f32" else "nk_f32_t *")
    assert found["pack_size"](4, 16, mask, bytes_) == 0
    packed = aligned(bytes_[0])
    assert found["pack"](pointer(x, dtype), 4, 16, x.strides[0], address(packed), mask, NULL) == 0
    assert found["packed"](address(packed), address(packed), 4, 4, 16, result, mask, NULL) == 0
    assert result[0] == reference.maxsim(x, x, metric="angular")[0]
    find = lib.nk_maxsim_find_kernel
    kind = lib.nk_kernel_maxsim_pack_k
    assert find(lib.nk_kernel_unknown_k, number, enabled, kernel, capability) == lib.nk_missing_kernel_k
    assert find(999, number, enabled, kernel, capability) == lib.nk_missing_kernel_k
    assert find(kind, number, 0, kernel, capability) == lib.nk_missing_kernel_k
    assert find(kind, lib.nk_f64_k, enabled, kernel, capability) == lib.nk_missing_kernel_k
    assert find(kind, number, enabled, NULL, capability) == lib.nk_null_argument_k
    assert find(kind, number, enabled, kernel, NULL) == lib.nk_null_argument_k


# ---------------------------------------------------------------------------------------------------- misuse


@every_dtype
def test_mixing_rows_dtypes_depths_and_counts(dtype: str) -> None:
    masks = runnable(dtype)
    x = tokens("random", dtype, 4, 16, 1)
    packed = [pack(x, dtype, mask) for mask in masks]
    for (i, left), (j, right), mask in itertools.product(enumerate(packed), enumerate(packed), masks):
        status, result = score(dtype, left, right, (4, 4, 16), mask)
        same = i == j and masks[i] == mask
        assert status == (lib.nk_success_k if same else lib.nk_pack_mismatch_k)
        assert same or result == SENTINEL
    mask = masks[-1]
    for other in set(DTYPES) - {dtype}:
        foreign = pack(tokens("random", other, 4, 16, 1), other, mask)
        for sides in ((packed[-1], foreign), (foreign, packed[-1]), (foreign, foreign)):
            assert score(dtype, *sides, (4, 4, 16), mask) == (lib.nk_pack_mismatch_k, SENTINEL)
    shallow = pack(x[:, :15].copy(), dtype, mask)
    for sides, counts in (
        ((packed[-1], shallow), (4, 4, 16)),
        ((packed[-1], shallow), (4, 4, 15)),
        ((packed[-1], packed[-1]), (4, 4, 15)),
        ((packed[-1], packed[-1]), (3, 4, 16)),
        ((packed[-1], packed[-1]), (4, 5, 16)),
    ):
        assert score(dtype, *sides, counts, mask) == (lib.nk_unexpected_dimensions_k, SENTINEL)


@every_dtype
def test_null_stream_alignment_and_missing_kernel(dtype: str) -> None:
    mask = runnable(dtype)[0]
    x = tokens("random", dtype, 4, 16, 1)
    packed = pack(x, dtype, mask)
    counts, stream = (4, 4, 16), ffi.cast("void *", 1)
    assert score(dtype, NULL, packed, counts, mask) == (lib.nk_null_argument_k, SENTINEL)
    assert score(dtype, packed, NULL, counts, mask) == (lib.nk_null_argument_k, SENTINEL)
    assert score(dtype, packed, packed, counts, mask, stream) == (lib.nk_device_code_k, SENTINEL)
    assert score(dtype, packed, packed, counts, 0) == (lib.nk_missing_kernel_k, SENTINEL)
    call = function("packed", dtype)
    assert call(address(packed), address(packed), *counts, NULL, mask, NULL) == lib.nk_null_argument_k
    moved = aligned(len(packed), shift=4)
    moved[:] = packed
    assert score(dtype, moved, packed, counts, mask) == (lib.nk_misaligned_k, SENTINEL)
    sixteen = aligned(len(packed), shift=16)
    sixteen[:] = packed
    assert score(dtype, sixteen, packed, counts, mask)[0] == lib.nk_success_k

    out = aligned(len(packed))
    make = function("pack", dtype)
    arguments = (pointer(x, dtype), 4, 16, x.strides[0])
    assert make(NULL, 4, 16, x.strides[0], address(out), mask, NULL) == lib.nk_null_argument_k
    assert make(*arguments, NULL, mask, NULL) == lib.nk_null_argument_k
    assert make(*arguments, address(out), mask, stream) == lib.nk_device_code_k
    assert make(*arguments, address(out), 0, NULL) == lib.nk_missing_kernel_k
    assert make(*arguments, ffi.cast("void *", out.ctypes.data + 8), mask, NULL) == lib.nk_misaligned_k
    assert make(*arguments[:3], x.strides[0] - 1, address(out), mask, NULL) == lib.nk_unexpected_dimensions_k
    assert not out.any(), "a failed call wrote"
    assert function("pack_size", dtype)(4, 16, mask, NULL) == lib.nk_null_argument_k
    shape = function("packed_shape", dtype)
    one = ffi.new("nk_size_t *")
    assert shape(address(packed), NULL, one, mask, NULL) == lib.nk_null_argument_k
    assert shape(address(packed), one, NULL, mask, NULL) == lib.nk_null_argument_k
    assert shape(NULL, one, one, mask, NULL) == lib.nk_null_argument_k
    assert shape(address(packed), one, one, mask, stream) == lib.nk_device_code_k


@every_dtype
def test_sizes_that_overflow(dtype: str) -> None:
    answer = ffi.new("nk_size_t *", 7)
    for count, depth in ((2**63, 1), (1, 2**63), (2**40, 2**40), (2**64 - 1, 2**64 - 1), (2**47, 2**47)):
        assert function("pack_size", dtype)(count, depth, runnable(dtype)[0], answer) == lib.nk_size_overflow_k
    assert answer[0] == 7


@every_dtype
def test_every_damaged_header_byte_is_refused(dtype: str) -> None:
    mask = runnable(dtype)[0]
    x = tokens("random", dtype, 4, 16, 1)
    packed = pack(x, dtype, mask)
    for place, flip in itertools.product(range(HEADER_BYTES), (0x01, 0x80, 0xFF)):
        damaged = aligned(len(packed))
        damaged[:] = packed
        damaged[place] ^= flip
        assert score(dtype, damaged, packed, (4, 4, 16), mask) == (lib.nk_pack_mismatch_k, SENTINEL), place
        assert lib.nk_packed_check(address(damaged), len(damaged)) == lib.nk_pack_mismatch_k
    for length in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(packed) - 1):
        assert lib.nk_packed_check(address(packed), length) == lib.nk_pack_mismatch_k
    assert lib.nk_packed_check(address(packed), len(packed)) == lib.nk_success_k


@every_dtype
def test_an_interrupted_packing_is_refused(dtype: str) -> None:
    mask = runnable(dtype)[0]
    zeros = aligned(size(dtype, 4, 16, mask))
    assert score(dtype, zeros, zeros, (4, 4, 16), mask) == (lib.nk_pack_mismatch_k, SENTINEL)


@every_dtype
def test_corpus_jobs_that_do_not_fit(dtype: str) -> None:
    mask = runnable(dtype)[0]
    parts = [tokens("random", dtype, count, 24, count) for count in (3, 0, 9)]
    packed = (pack_corpus(parts, dtype, mask),) * 2
    scores = np.full((3, 3), SENTINEL, np.float64)
    argmax, candidates = np.full((3, 3, 9), -99, np.int32), np.array([[0, 3, -1]] * 3)

    def status(**changes: Any) -> int:
        job = corpus_job(packed, 3, 3, scores, "dot")
        for name, value in changes.items():
            setattr(job, name, value)
        return function("corpus", dtype)(job, mask, NULL)

    i32, i64 = ffi.cast("nk_i32_t *", argmax.ctypes.data), ffi.cast("nk_i64_t *", candidates.ctypes.data)
    assert status(metric=3) == lib.nk_unknown_metric_k
    assert status(query_end=4) == status(document_end=4) == lib.nk_index_out_of_range_k
    assert status(query_begin=3, query_end=2) == status(document_begin=2, document_end=1) == lib.nk_index_out_of_range_k
    assert status(score_stride=2) == lib.nk_unexpected_dimensions_k
    assert status(argmax=i32, token_stride=8) == lib.nk_unexpected_dimensions_k
    assert status(scores=NULL) == status(queries=NULL) == status(documents=NULL) == lib.nk_null_argument_k
    assert status(candidates=i64, candidate_count=3) == lib.nk_index_out_of_range_k
    candidates[:, 1] = -2
    assert status(candidates=i64, candidate_count=3) == lib.nk_index_out_of_range_k
    assert function("corpus", dtype)(NULL, mask, NULL) == lib.nk_null_argument_k
    assert (scores == SENTINEL).all() and (argmax == -99).all(), "a failed call wrote"
    single, whole = parts[0], packed[0]
    assert score(dtype, whole, pack(single, dtype, mask), (12, 3, 24), mask)[0] == lib.nk_unexpected_dimensions_k


@every_dtype
def test_offsets_that_do_not_fit(dtype: str) -> None:
    mask = runnable(dtype)[0]
    x = tokens("random", dtype, 5, 8, 1)
    out, answer = aligned(1 << 16), ffi.new("nk_size_t *")
    assert function("pack_corpus_size", dtype)(3, 5, 8, mask, answer) == lib.nk_success_k
    run = [ffi.new("nk_u64_t[]", [x.ctypes.data]), ffi.new("nk_u64_t[]", [5])]
    strides = [ffi.new("nk_i64_t[]", [x.strides[0]]), ffi.new("nk_i64_t[]", [x.strides[1]])]

    def status(offsets: list[int]) -> int:
        values = ffi.new("nk_u64_t[]", offsets)
        job = ffi.new("nk_maxsim_pack_t *")
        job.tokens = (1, *run, *strides)
        job.offsets, job.documents, job.depth, job.packed = values, len(offsets) - 1, 8, address(out)
        return function("pack_corpus", dtype)(job, mask, NULL)

    for offsets in ([0, 3, 2, 5], [1, 2, 3, 5], [0, 2, 4, 6], [0, 2, 4, 4], [0, 6, 5, 5], [0, 2**63, 5, 5]):
        assert status(offsets) == lib.nk_unexpected_dimensions_k
    assert not out.any(), "a failed call wrote"
    assert status([0, 0, 5, 5]) == lib.nk_success_k


@every_dtype
def test_damaged_offsets_inside_a_buffer_are_never_followed(dtype: str) -> None:
    mask = runnable(dtype)[0]
    parts = [tokens("random", dtype, count, 8, count) for count in (3, 2, 4)]
    packed = pack_corpus(parts, dtype, mask)
    offsets = packed[HEADER_BYTES : HEADER_BYTES + 32].view(np.uint64)
    assert offsets.tolist() == [0, 3, 5, 9]
    scores = np.full((3, 3), SENTINEL, np.float64)
    for place, value in ((1, 6), (2, 2), (3, 10), (3, 2**63), (1, 2**64 - 1)):
        kept = offsets[place]
        offsets[place] = value
        job = corpus_job((packed, packed), 3, 3, scores, "dot")
        assert function("corpus", dtype)(job, mask, NULL) == lib.nk_pack_mismatch_k
        offsets[place] = kept
    assert (scores == SENTINEL).all()


def test_a_c_compiler_and_a_cpp_compiler_take_the_headers(tmp_path: Any) -> None:
    import shutil
    import subprocess

    names = sorted(path.name for path in (ROOT / "include" / "numkong").glob("*.h"))
    for compiler, standard, suffix in (("cc", "c99", "c"), ("c++", "c++11", "cpp")):
        if not shutil.which(compiler):
            pytest.skip(f"no {compiler} on this machine")
        for name in names:
            source = tmp_path / f"use.{suffix}"
            source.write_text(f"#include <numkong/{name}>\nint main(void) {{ return 0; }}\n")
            flags = [f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
            subprocess.run([compiler, *flags, "-I", str(ROOT / "include"), str(source)], check=True)


def test_results_do_not_depend_on_the_buffer_address() -> None:
    x = tokens("random", "f32", 20, 33, 1)
    for mask in runnable("f32"):
        packed = pack(x, "f32", mask)
        results = []
        for shift in (0, 16, 32, 48):
            moved = aligned(len(packed), shift)
            moved[:] = packed
            results.append(score("f32", moved, packed, (20, 20, 33), mask))
        assert len(set(results)) == 1 and results[0][0] == 0
