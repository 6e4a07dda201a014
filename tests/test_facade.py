"""The Python surface: packed tensors, selection of rows, capabilities, top-k, threads, the cost of a call."""

from __future__ import annotations

import copy
import pickle
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import numkong_py as nk
from numkong_py import reference
from numkong_py.backends import BACKENDS, select
from numkong_py.cpu import ffi, lib, split_documents, split_lists
from numkong_py.packed import from_bytes
from numkong_py.threads import run_all

ROOT = Path(__file__).resolve().parent.parent
RANDOM = np.random.default_rng(3)
LENGTHS = [5, 0, 17, 1, 0, 40, 3, 0]
DOCUMENTS = [RANDOM.standard_normal((count, 20)).astype(np.float32) for count in LENGTHS]
QUERIES = [RANDOM.standard_normal((count, 20)).astype(np.float32) for count in (4, 0, 9)]
CPU_ROWS = [row for row in BACKENDS if row.device == "cpu"]
AVAILABLE = [row for row in CPU_ROWS if row.available]
EVERYTHING = {"return_argmax": True, "return_token_scores": True, "return_bounds": True}


def same(a: nk.MaxSimResult, b: nk.MaxSimResult) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b))


# ------------------------------------------------------------------------------------- packed tensors


def test_what_a_packed_tensor_says() -> None:
    packed = nk.pack(DOCUMENTS, backend="serial")
    assert len(packed) == 8
    assert packed.lengths.tolist() == LENGTHS
    assert packed.offsets.tolist() == [0, *np.cumsum(LENGTHS).tolist()]
    assert (packed.depth, packed.dtype, packed.precision) == (20, "f32", "exact")
    assert (packed.backend, packed.device, packed.single) == ("serial", "cpu", False)
    assert packed.nbytes == nk.pack_size(sum(LENGTHS), 20, "f32", documents=8, backend="serial")
    assert packed.buffer.ctypes.data % 64 == 0 and not packed.buffer.flags.writeable
    for word in ("8", "66", "20", "f32", "exact", "serial", "cpu", str(packed.nbytes)):
        assert word in repr(packed)


@pytest.mark.parametrize("row", AVAILABLE, ids=lambda row: row.name)
def test_unpack_gives_the_bits_back(row: object) -> None:
    for dtype in row.dtypes:
        bits = RANDOM.integers(0, 256, (66, 20 * (4 if dtype == "f32" else 2)), np.uint8)
        tokens = bits.view({"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype])
        packed = nk.pack(tokens, dtype=dtype, offsets=np.concatenate([[0], np.cumsum(LENGTHS)]), backend=row.name)
        assert b"".join(part.tobytes() for part in packed.unpack()) == tokens.tobytes()
        assert packed[2].unpack().tobytes() == tokens[5:22].tobytes()
        assert nk.pack(tokens, dtype=dtype, backend=row.name).unpack().tobytes() == tokens.tobytes()


def test_ranges_are_views_and_gathers_are_new() -> None:
    packed = nk.pack(DOCUMENTS)
    whole = nk.maxsim(QUERIES, packed, **EVERYTHING)
    part = packed[2:6]
    assert part.buffer is packed.buffer and part.lengths.tolist() == LENGTHS[2:6]
    assert same(nk.maxsim(QUERIES, part, **EVERYTHING), nk.MaxSimResult(*(array[:, 2:6] for array in whole)))
    assert part[1:3].lengths.tolist() == LENGTHS[3:5]
    for key in ([5, 0, -1, 5], np.array([True, False] * 4), slice(None, None, -3), np.int32([7])):
        chosen = packed[key]
        scores = nk.maxsim(QUERIES, chosen)
        assert np.array_equal(scores, whole.scores[:, np.asarray(key) if isinstance(key, list) else key])
    assert packed[5].single and nk.maxsim(packed[5], packed).shape == (8,)
    assert np.array_equal(nk.maxsim(packed[5], packed), nk.maxsim(DOCUMENTS[5], DOCUMENTS))
    assert [len(part.unpack()) for part in packed] == LENGTHS
    assert len(packed[3:3]) == len(packed[6:2]) == len(packed[[]]) == 0
    with pytest.raises(nk.IndexOutOfRange):
        packed[8]


def test_candidates_pairs_and_topk_of_a_range() -> None:
    part = nk.pack(DOCUMENTS)[2:7]
    scores = nk.maxsim(QUERIES, part)
    chosen = np.array([[4, -1], [0, 0], [3, 2]])
    found = nk.maxsim_candidates(QUERIES, part, chosen)
    assert found[0, 0] == scores[0, 4] and found[2].tolist() == scores[2, [3, 2]].tolist()
    assert np.isneginf(found[0, 1])
    assert np.array_equal(nk.maxsim_pairs(part, part), np.diag(nk.maxsim(part, part)))
    assert np.array_equal(nk.topk(QUERIES, part, 3)[1], reference.topk(QUERIES, DOCUMENTS[2:7], 3)[1])
    _, indices = nk.topk(QUERIES, part, 2, candidates=chosen)
    assert set(indices[2].tolist()) == {2, 3}
    with pytest.raises(nk.IndexOutOfRange, match=r"candidates\[1, 0\]: 5"):
        nk.maxsim_candidates(QUERIES, part, [[0, 1], [5, 0], [0, 0]])


def test_pickles_and_copies() -> None:
    packed = nk.pack(DOCUMENTS)
    for tensor in (packed, packed[2:6], packed[5], nk.pack(QUERIES[0])):
        for other in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor)):
            assert (other.single, other.backend, other.dtype) == (tensor.single, tensor.backend, tensor.dtype)
            assert other.lengths.tolist() == tensor.lengths.tolist()
            assert np.array_equal(nk.maxsim(QUERIES, other), nk.maxsim(QUERIES, tensor))


def test_from_bytes_checks_and_copies_only_what_is_off_a_boundary() -> None:
    packed = nk.pack(DOCUMENTS)
    assert from_bytes(packed.buffer).buffer.ctypes.data == packed.buffer.ctypes.data
    shifted = np.concatenate([np.zeros(3, np.uint8), packed.buffer])[3:]
    assert np.array_equal(nk.maxsim(QUERIES, from_bytes(shifted.tobytes())), nk.maxsim(QUERIES, packed))
    damaged = packed.buffer.copy()
    damaged[256 + 8 : 256 + 16].view(np.uint64)[0] = 1 << 40
    with pytest.raises(nk.LayoutMismatch, match="offsets"):
        from_bytes(damaged)


def test_moving_between_rows_keeps_the_scores() -> None:
    best = nk.pack(DOCUMENTS)
    for row in AVAILABLE:
        if "f32" not in row.dtypes:
            continue
        moved = best.to(row.name)
        assert moved.backend == row.name
        assert np.array_equal(nk.maxsim(QUERIES, moved), nk.maxsim(QUERIES, best))
    assert best.to(best.backend) is best and best.to("cpu") is best
    with pytest.raises(nk.InvalidArgument, match="nowhere"):
        best.to("nowhere")


def test_mixing_rows_names_both_and_the_fix() -> None:
    if len(AVAILABLE) < 2:
        pytest.skip("one row is available")
    queries, documents = nk.pack(QUERIES, backend="serial"), nk.pack(DOCUMENTS, backend=AVAILABLE[0].name)
    with pytest.raises(nk.LayoutMismatch, match=rf"serial.*{AVAILABLE[0].name}.*\.to\("):
        nk.maxsim_packed(queries, documents)
    assert nk.maxsim(QUERIES, documents).shape == (3, 8)


def test_normalize() -> None:
    packed = nk.pack([*DOCUMENTS, np.zeros((2, 20), np.float32)], normalize=True)
    for stored, given in zip(packed.unpack(), DOCUMENTS):
        assert np.array_equal(stored, reference.normalized(given))
    assert not packed[8].unpack().any()


# ------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize("metric", ["dot", "cosine", "angular"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_scores_are_the_references(metric: str, reduction: str) -> None:
    options = {"metric": metric, "reduction": reduction, **EVERYTHING}
    found, expected = nk.maxsim(QUERIES, DOCUMENTS, **options), reference.maxsim(QUERIES, DOCUMENTS, **options)
    for a, b in zip(found[:3], expected[:3]):
        assert np.array_equal(a, b)
    assert found.scores.dtype == nk.output_dtype("f32") and found.argmax.dtype == np.int32


@pytest.mark.parametrize("threads", [2, 3, 7, 32])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    queries, documents = nk.pack(QUERIES), nk.pack(DOCUMENTS * 9)
    candidates = RANDOM.integers(-1, 72, (3, 11))
    for call in (
        lambda count: nk.maxsim(queries, documents, threads=count, **EVERYTHING),
        lambda count: nk.maxsim(queries, documents[3:], threads=count, **EVERYTHING),
        lambda count: nk.maxsim(documents, queries[:1], threads=count, **EVERYTHING),
        lambda count: nk.maxsim_candidates(queries, documents, candidates, threads=count, **EVERYTHING),
        lambda count: nk.maxsim_candidates(queries[0], documents, candidates[0], threads=count, **EVERYTHING),
        lambda count: nk.maxsim_pairs(documents, documents, threads=count, **EVERYTHING),
    ):
        assert same(call(1), call(threads))


def test_threads_of_the_caller_share_packed_tensors() -> None:
    queries, documents = nk.pack(QUERIES), nk.pack(DOCUMENTS * 9)
    expected = nk.maxsim(queries, documents, threads=1)
    with ThreadPoolExecutor(8) as pool:
        for scores in pool.map(lambda count: nk.maxsim(queries, documents, threads=count), [1, 2, 3, None] * 16):
            assert np.array_equal(scores, expected)


def test_pieces_cover_everything_once() -> None:
    queries, documents = nk.pack(QUERIES), nk.pack(DOCUMENTS)
    for count in range(2, 30):
        for pieces, columns in ((split_documents(queries, documents, count), 8), (split_lists(queries, 5, count), 5)):
            seen = np.zeros((3, columns), int)
            for first_query, last_query, first, last in pieces:
                seen[first_query:last_query, first:last] += 1
            assert (seen == 1).all()
            assert len(pieces) <= count


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_piece_is_done_once_by_whoever_is_free(threads: int) -> None:
    done: list[int] = []
    run_all(done.append, range(40), threads)
    assert sorted(done) == list(range(40))


def test_the_error_of_a_piece_is_raised_and_nothing_new_begins() -> None:
    begun: list[int] = []

    def fail(piece: int) -> None:
        begun.append(piece)
        raise MemoryError(piece)

    with pytest.raises(MemoryError):
        run_all(fail, range(1000), 3)
    assert len(begun) <= 3


def test_out_of_pairs_candidates_and_single_queries() -> None:
    for call, shape in (
        (lambda out: nk.maxsim(QUERIES[0], DOCUMENTS, out=out), (8,)),
        (lambda out: nk.maxsim(QUERIES, DOCUMENTS, out=out), (3, 8)),
        (lambda out: nk.maxsim_pairs(DOCUMENTS, DOCUMENTS, out=out), (8,)),
        (lambda out: nk.maxsim_candidates(QUERIES[0], DOCUMENTS, [3, -1], out=out), (2,)),
    ):
        out = np.zeros(shape)
        assert call(out) is out and np.array_equal(out, call(None))
        with pytest.raises(nk.ShapeMismatch, match="out"):
            call(np.zeros((9, 9)))
        with pytest.raises(nk.UnsupportedDtype, match="out"):
            call(np.zeros(shape, np.float32))


def test_empty_value() -> None:
    assert nk.maxsim(QUERIES[0], DOCUMENTS, empty=-7.5)[1] == -7.5
    assert nk.maxsim(QUERIES, DOCUMENTS, empty=-7.5)[1].tolist() == [0] * 8


def test_sizes_beyond_64_bits() -> None:
    for count, depth in ((1 << 70, 4), (1 << 63, 4), (1 << 40, 1 << 40)):
        with pytest.raises(nk.ShapeMismatch):
            nk.pack_size(count, depth, "f32")


def test_options_that_do_not_exist() -> None:
    with pytest.raises(TypeError, match="metrics"):
        nk.maxsim_packed(nk.pack(QUERIES), nk.pack(DOCUMENTS), metrics="dot")


# ------------------------------------------------------------------------------------- top-k


@pytest.mark.parametrize("metric", ["dot", "cosine", "angular"])
@pytest.mark.parametrize("block", [None, 1, 3, 100])
def test_topk_is_a_sort_of_the_scores(metric: str, block: int | None) -> None:
    documents = [*DOCUMENTS, DOCUMENTS[2], np.full((1, 20), np.nan, np.float32), DOCUMENTS[2], DOCUMENTS[0]]
    for k in (1, 5, 12):
        scores, indices = nk.topk(QUERIES, documents, k, metric=metric, block=block)
        expected = reference.topk(QUERIES, documents, k, metric=metric)
        assert np.array_equal(indices, expected[1])
        assert np.array_equal(scores, expected[0], equal_nan=True)


def test_topk_of_fewer_documents_than_k() -> None:
    scores, indices = nk.topk(QUERIES[0], DOCUMENTS[:2], 4)
    assert indices.tolist() == [0, 1, -1, -1] and np.isneginf(scores[1:]).all()
    scores, indices = nk.topk(QUERIES, [], 2, metric="angular")
    assert indices.tolist() == [[-1, -1]] * 3 and np.isposinf(scores).all()


def test_topk_progress() -> None:
    done = []
    nk.topk(QUERIES, DOCUMENTS, 2, block=3, progress=done.append)
    assert done == [3, 3, 2]


# ------------------------------------------------------------------------------------- rows and capabilities


def test_capabilities_come_from_c() -> None:
    for flag in nk.Capability:
        assert ffi.string(lib.nk_capability_name(flag.value)).decode() == flag.name
    assert nk.enabled_capabilities() in nk.capabilities()
    assert nk.enabled_capabilities() in nk.compiled_capabilities()
    assert str(nk.Capability(0)) == "none" and str(nk.Capability.avx2 | nk.Capability.fma) == "avx2 fma"


@pytest.mark.parametrize("row", [row for row in CPU_ROWS if row.built], ids=lambda row: row.name)
def test_the_mask_that_a_row_requires_selects_it(row: object) -> None:
    for dtype in row.dtypes:
        number = getattr(lib, f"nk_{dtype}_k")
        best = lib.nk_backend_best(number, int(row.required))
        if best:
            assert ffi.string(best.name).decode() == row.name


def test_selection_by_mask_and_by_name() -> None:
    assert select("f32", capabilities=nk.Capability.serial).name == "serial"
    assert select("f32").name == next(row.name for row in AVAILABLE if "f32" in row.dtypes)
    assert nk.find_kernel("maxsim_packed", np.float16, nk.Capability.serial).name == "serial"
    assert nk.pack(QUERIES[0], capabilities=nk.Capability.serial).backend == "serial"
    for row in CPU_ROWS:
        if "f32" not in row.dtypes:
            with pytest.raises(nk.MissingKernel, match=f"{row.name}.*f32"):
                nk.pack(QUERIES[0], backend=row.name)
    with pytest.raises(nk.MissingKernel, match="capabilities 0x0"):
        nk.find_kernel("pack", "f32", 0)


def test_reasons() -> None:
    for row in CPU_ROWS:
        assert (row.reason is None) == row.available
        assert row.name in repr(row)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "-fma")
    if nk.Capability.fma in nk.capabilities():
        assert nk.Capability.fma not in nk.enabled_capabilities()
        haswell = next(row for row in CPU_ROWS if row.name == "haswell")
        assert haswell.reason == "fma is taken away by NUMKONG_CAPABILITIES"
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "serial,avx3")
    with pytest.raises(nk.InvalidArgument, match="'avx3'"):
        nk.pack(QUERIES[0])


def test_a_tensor_of_a_row_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    if AVAILABLE[0].name == "serial":
        pytest.skip("only the serial row is available")
    data = pickle.dumps(nk.pack(DOCUMENTS))
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "serial")
    packed = pickle.loads(data)
    with pytest.raises(nk.BackendUnavailable, match=r"\.to\("):
        nk.maxsim(QUERIES, packed)
    moved = packed.to("cpu")
    assert moved.backend == "serial"
    assert np.array_equal(nk.maxsim(QUERIES, moved), nk.maxsim(QUERIES, DOCUMENTS))


# ------------------------------------------------------------------------------------- the README


def test_the_code_in_the_readme_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # it saves a file
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert AVAILABLE[0].name in capsys.readouterr().out


# ------------------------------------------------------------------------------------- the cost of a call


def test_overhead_of_a_packed_call_is_under_15_us() -> None:
    queries, documents = nk.pack(QUERIES[0]), nk.pack(DOCUMENTS[:1] * 10)
    scores = np.empty(10)
    job = ffi.new("nk_maxsim_corpus_t *")
    job.queries, job.documents, job.scores = queries.pointer, documents.pointer, ffi.from_buffer(scores)
    job.query_end, job.document_end, job.score_stride = 1, 10, 10
    mask = int(queries.row.required)
    python, c = [], []
    for _ in range(3000):
        start = time.perf_counter_ns()
        nk.maxsim_packed(queries, documents)
        middle = time.perf_counter_ns()
        lib.nk_maxsim_corpus_f32_best(job, mask, ffi.NULL)
        python.append(middle - start)
        c.append(time.perf_counter_ns() - middle)
    # the fastest tenth: what the call costs when nothing else takes the processor
    overhead = np.percentile(python, 10) - np.percentile(c, 10)
    assert overhead < 15_000, f"{overhead / 1000:.1f} us"
