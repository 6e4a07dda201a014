"""Documents that are scored where their arrays lie: the bits of packed ones, on every row of this machine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import ROOT

import numkong_py as nk
from numkong_py.arrays import read_collection
from numkong_py.backends import BACKENDS, select
from numkong_py.cpu import ffi, lib

RANDOM = np.random.default_rng(11)
ROWS = [row for row in BACKENDS if row.device == "cpu" and row.available]
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
EVERYTHING = {"return_argmax": True, "return_token_scores": True, "return_bounds": True}
BLOCK = 768  # tokens of a block in c/scoring.inc; documents below lie around it, at it and far past it
LENGTHS = [0, 300, 300, 300, 0, BLOCK - 1, 1, BLOCK, 1, BLOCK + 1, 3, 2 * BLOCK + 5, 0, 7]


def tokens(count: int, depth: int, dtype: str = "f32") -> np.ndarray:
    return RANDOM.standard_normal((count, depth)).astype(DTYPES[dtype])


def agree(row: str, queries: Any, documents: Any, metric: str = "dot", threads: int = 1) -> None:
    """Every output of arrays is that of the packed documents, to the bit, and the arrays were not packed."""
    packed = nk.pack(queries, backend=row)
    assert packed.row.in_place(read_collection(documents, "docs")) is not None
    found = nk.maxsim(packed, documents, metric=metric, threads=threads, **EVERYTHING)
    wanted = nk.maxsim(packed, nk.pack(documents, backend=row), metric=metric, threads=1, **EVERYTHING)
    for name, a, b in zip(found._fields, found, wanted):
        assert a.tobytes() == b.tobytes(), (row, name)


@pytest.mark.parametrize("metric", ["dot", "cosine", "angular"])
@pytest.mark.parametrize(("row", "dtype"), [(row.name, dtype) for row in ROWS for dtype in row.dtypes])
def test_bits_of_packed_documents(row: str, dtype: str, metric: str) -> None:
    for depth in (1, 7, 64, 130):
        queries = [tokens(count, depth, dtype) for count in (5, 0, 40)]
        documents = [tokens(count, depth, dtype) for count in LENGTHS]
        for threads in (1, 3):
            agree(row, queries, documents, metric, threads)


@pytest.mark.parametrize("row", [row.name for row in ROWS if "f32" in row.dtypes])
def test_values_that_no_screen_bounds(row: str) -> None:
    documents = [tokens(count, 32) for count in LENGTHS]
    documents[1][7, 3], documents[2][:] = np.nan, 0
    documents[5][2, 0], documents[7] = np.inf, documents[7] * np.float32(1e-38)
    documents[9] += np.float32(20)  # its mean holds nearly all of it
    queries = [tokens(9, 32), np.zeros((2, 32), np.float32), tokens(3, 32) * np.float32(1e30)]
    for metric in ("dot", "cosine", "angular"):
        agree(row, queries, documents, metric)


@pytest.mark.parametrize("row", [row.name for row in ROWS if "f32" in row.dtypes])
def test_many_query_tokens_are_several_chunks(row: str) -> None:
    agree(row, [tokens(1500, 16) for _ in range(3)], [tokens(count, 16) for count in LENGTHS])


def test_layouts_that_are_read_in_place() -> None:
    row, query = select("f32", "cpu").name, tokens(6, 24)
    padded = tokens(5 * 40, 24).reshape(5, 40, 24)
    valid = RANDOM.random((5, 40)) < 0.6
    readonly = padded.copy()
    readonly.flags.writeable = False
    for documents in (
        padded,
        readonly,
        padded[::-1, ::2],
        np.broadcast_to(padded[:1], (4, 40, 24)),
        [padded[0, :, :].copy(), padded[1, ::-3], tokens(9, 48)[:, 5:29]],
        nk.collection(padded, lengths=[0, 3, 40, 1, 39]),
        nk.collection(padded, mask=valid),
        nk.collection(padded.reshape(200, 24), offsets=[0, 0, 13, 200]),
        [],
    ):
        agree(row, query, documents if len(documents) else np.zeros((0, 4, 24), np.float32))


def test_other_layouts_are_packed_first() -> None:
    row, query = select("f32", "cpu"), tokens(6, 24)
    unaligned = np.frombuffer(b"x" + tokens(30, 24).tobytes(), np.uint8)[1:].view(np.float32).reshape(30, 24)
    for documents in ([tokens(24, 30).T], [tokens(9, 48)[:, ::2]], [tokens(9, 24)[:, ::-1]], [unaligned]):
        assert row.in_place(read_collection(documents, "docs")) is None
        wanted = nk.maxsim(query, nk.pack(documents), **EVERYTHING)
        for a, b in zip(nk.maxsim(query, documents, **EVERYTHING), wanted):
            assert a.tobytes() == b.tobytes()


def test_memory_does_not_grow_with_the_documents() -> None:
    code = (
        "import re, numpy as np, numkong_py as nk\n"
        "from pathlib import Path\n"
        "def peak(): return int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "q, docs = np.ones((32, 128), np.float32), np.ones((400, 300, 128), np.float32)\n"
        "nk.maxsim(q, docs[:9], threads=2)\n"
        "before = peak()\n"
        "nk.maxsim(q, docs, threads=2)\n"
        "print(peak() - before)\n"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("peak memory is read from /proc")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 16 << 10, "kB more for 60 MB of documents"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"depth": 8}, "nk_unexpected_dimensions_k"),
        ({"normalize": 1}, "nk_unexpected_dimensions_k"),
        ({"offsets": ffi.NULL}, "nk_null_argument_k"),
        ({"documents": 3}, "nk_unexpected_dimensions_k"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[str, Any], status: str) -> None:
    row = ROWS[-1]
    query, documents = nk.pack(tokens(3, 16), backend=row.name), row.in_place(read_collection([tokens(5, 16)] * 2, "x"))
    job = ffi.new("nk_maxsim_corpus_t *")
    scores = np.zeros(2)
    job.queries, job.arrays, job.scores = query.pointer, documents.job, ffi.from_buffer(scores)
    job.query_end, job.document_end, job.score_stride = 1, 2, 2
    assert lib.nk_maxsim_corpus_f32_best(job, int(row.required), ffi.NULL) == lib.nk_success_k
    for name, value in change.items():
        setattr(documents.job, name, value)
    assert lib.nk_maxsim_corpus_f32_best(job, int(row.required), ffi.NULL) == getattr(lib, status)
