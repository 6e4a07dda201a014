"""Sizes past 32 bits, in files that are holes but for what is looked at: tokens, documents and bytes beyond memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import DTYPES, ROOT, assert_same_bits

import numkong_py as nk
from numkong_py import storage
from numkong_py.backends import BACKENDS
from numkong_py.layout import HEADER, read_header

RANDOM = np.random.default_rng(32)
AVAILABLE = [row for row in BACKENDS if row.device == "cpu" and row.available]
REGIONS = slice(56, 120)  # of a packed header: where offsets, documents, square, scale, residual, reach, ... start
linux = pytest.mark.skipif(sys.platform != "linux", reason="sparse files, and memory in /proc, as Linux has them")


# ------------------------------------------------------------------------------------------- files of holes


def checksum(head: bytes) -> int:
    """The packed header's checksum, as c/packed.c has it."""
    value = 0xCBF29CE484222325
    for word in np.frombuffer(head, "<u8")[:-1].tolist():
        value = (value ^ word) * 0x100000001B3 % (1 << 64)
        value ^= value >> 29
    return value


def regions_of(packed: nk.PackedTensor) -> list[int]:
    return np.frombuffer(packed.buffer[REGIONS].tobytes(), "<u8").tolist()


def tile_tokens(row: str, dtype: str) -> int:
    """Tokens of a tile of the screening plane, 0 for rows without one."""
    *_, screen, originals = regions_of(nk.pack(np.ones((1, 64), DTYPES[dtype]), backend=row))
    return (originals - screen) // 64


def sparse_file(
    path: Path,
    offsets: np.ndarray,
    depth: int,
    last: nk.PackedTensor,
    extras: Mapping[str, np.ndarray] = storage.NO_EXTRAS,
) -> str:
    """A file of the row of `last`, its last document; all other tokens are zero and a hole.

    Returns the hash of its head.
    """
    documents, tokens, itemsize = len(offsets) - 1, int(offsets[-1]), DTYPES[last.dtype].itemsize
    tile, steps, first = tile_tokens(last.backend, last.dtype), -(-depth // 4), tokens - last.tokens
    assert len(last) == 1 and (not tile or first % tile == 0)
    lanes = -(-tokens // tile) * tile if tile else 0
    per_item = (8, 48, 8, 4, 4, 4, 4 * steps, depth * itemsize)
    counts = (documents + 1, documents, tokens, lanes, lanes, lanes, lanes, tokens)
    starts, end = [], HEADER.itemsize
    for size, count in zip(per_item, counts):
        starts.append(-(-end // 64) * 64)
        end = starts[-1] + size * count
    head = bytearray(last.buffer[: HEADER.itemsize].tobytes())
    head[24:120] = np.array([documents, tokens, depth, end, *starts], "<u8").tobytes()
    head[-8:] = checksum(bytes(head)).to_bytes(8, "little")
    header = read_header(np.frombuffer(head, np.uint8))
    table = storage._table(header, last.dtype)
    metadata = storage._metadata(header, last.dtype, last.backend, False)
    stored = offsets.astype("<i8").tobytes()
    metadata |= {storage.HASH + "header": storage.digest([head]), storage.HASH + "offsets": storage.digest([stored])}
    beside = storage._aligned_extras(extras, end)
    table |= storage._extra_table(beside, end)
    metadata |= {storage.HASH + name: storage.digest([array]) for name, array in beside.items()}
    text = storage._encode(metadata, table)

    pieces = {0: head, HEADER.itemsize: stored, end: b"".join(array.tobytes() for array in beside.values())}
    small = [*regions_of(last), last.nbytes]
    for number in range(1, len(starts)):
        place = starts[number] + per_item[number] * (documents - 1 if number == 1 else first)
        pieces[place] = last.buffer[small[number] : small[number + 1]][: end - place]
    with path.open("wb") as file:
        file.write(text)
        for place, data in sorted(pieces.items()):
            file.seek(len(text) + place)
            file.write(bytes(data))
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no sparse files")
    return storage.digest([text])


@pytest.mark.parametrize("row", AVAILABLE, ids=lambda row: row.name)
def test_the_files_of_these_tests_are_right(row: Any, tmp_path: Path) -> None:
    for dtype in row.dtypes:
        document = RANDOM.standard_normal((40, 20)).astype(DTYPES[dtype])
        lengths = [5, 0, 17, 10, 0, 40]
        blank = [np.zeros((count, 20), DTYPES[dtype]) for count in lengths[:-1]] + [document]
        packed = nk.pack([document], backend=row.name)
        sparse_file(tmp_path / "x", np.cumsum([0, *lengths]), 20, packed)
        opened = nk.open(tmp_path / "x")
        assert (opened.backend, opened.nbytes) == (row.name, nk.pack(blank, backend=row.name).nbytes)
        queries = [document[:3], document[7:20]]
        for metric in ("dot", "cosine", "angular"):
            options = {"metric": metric, "return_argmax": True, "return_bounds": True}
            found, wanted = nk.maxsim(queries, opened, **options), nk.maxsim(queries, blank, **options)
            assert_same_bits(found.scores, wanted.scores)
            assert_same_bits(found.argmax[:, -1], wanted.argmax[:, -1], "argmax")
            assert_same_bits(found.bounds[:, -1], wanted.bounds[:, -1], "bounds")


# ------------------------------------------------------------------------------------------- past 32 bits


@linux
@pytest.mark.parametrize("row", AVAILABLE, ids=lambda row: row.name)
def test_more_tokens_than_32_bits_count(row: Any, tmp_path: Path) -> None:
    dtype = row.dtypes[-1] if "f16" not in row.dtypes else "f16"
    count = (1 << 32) + 1000
    document = RANDOM.standard_normal((40, 2)).astype(DTYPES[dtype])
    offsets = np.array([0, 0, 1 << 32, count - 40, count])
    sparse_file(tmp_path / "x", offsets, 2, nk.pack([document], backend=row.name))
    opened = nk.open(tmp_path / "x")
    assert opened.backend == row.name and opened.nbytes > 12 << 32
    assert opened.tokens == count and opened.lengths.tolist() == [0, 1 << 32, 960, 40]
    assert opened[-1].unpack().tobytes() == document.tobytes()
    query = nk.pack(document[:5], backend=row.name)
    options = {"return_argmax": True, "return_token_scores": True, "return_bounds": True}
    wanted = nk.maxsim(query, [np.zeros((960, 2), DTYPES[dtype]), document], **options)
    for found in (nk.maxsim(query, opened[-2:], **options), nk.maxsim_candidates(query, opened, [2, 3], **options)):
        for name, left, right in zip(wanted._fields, found, wanted):
            assert_same_bits(left[1:], right[1:], name)
            assert_same_bits(left[:1], right[:1], name) if name in ("scores", "token_scores") else None
    best = nk.topk(query, opened, 2, candidates=[2, 3])[1]
    assert best.tolist() == [2 + place for place in nk.topk(query, opened[-2:], 2)[1].tolist()]
    opened[-2:].save(tmp_path / "y")
    assert nk.open(tmp_path / "y", verify="full")[-1].unpack().tobytes() == document.tobytes()


@linux
def test_a_document_whose_positions_do_not_fit_an_argmax_is_refused(tmp_path: Path) -> None:
    """Not after hours, and not with a negative position: before anything is scored."""
    document = np.ones((16, 2), np.float16)
    offsets = np.array([0, 16, 16 + (1 << 31), 32 + (1 << 31)])
    sparse_file(tmp_path / "x", offsets, 2, nk.pack([document], backend="serial"))
    opened = nk.open(tmp_path / "x")
    for call in (nk.maxsim, lambda q, docs: nk.topk(q, docs, 1), lambda q, docs: nk.maxsim_candidates(q, docs, [[1]])):
        with pytest.raises(
            nk.ShapeMismatch, match=r"document 1 of .* has 2147483648 tokens.*at most 2147483647.*split"
        ):
            call([document], opened)
    assert nk.maxsim_candidates([document], opened, [[2, -1]]).tolist() == [[32.0, -np.inf]]
    assert nk.maxsim([document], opened[2:]).tolist() == [[32.0]]


@pytest.mark.parametrize("row", AVAILABLE, ids=lambda row: row.name)
def test_many_documents_of_one_token(row: Any, tmp_path: Path) -> None:
    dtype = DTYPES[row.dtypes[-1]]
    tokens = RANDOM.integers(-8, 9, (1_100_000, 2)).astype(dtype)  # so that sums are exact
    nk.pack(tokens, offsets=np.arange(len(tokens) + 1), backend=row.name).save(tmp_path / "x")
    opened = nk.open(tmp_path / "x")
    assert len(opened) == 1_100_000 and opened[-1].unpack().tobytes() == tokens[-1:].tobytes()
    query = np.array([[3, -1], [0, 2]], dtype)
    scores = (tokens.astype(np.float64) @ query.astype(np.float64).T).sum(axis=1)
    assert np.array_equal(nk.maxsim(query, opened), scores)
    best, where = nk.topk(query, opened, 1000, block=300_000)
    order = np.argsort(-scores, kind="stable")[:1000]
    assert np.array_equal(where, order) and np.array_equal(best, scores[order])


# ------------------------------------------------------------------------------------------- time and memory


@linux
@pytest.mark.parametrize("row", AVAILABLE, ids=lambda row: row.name)
def test_opening_20_gb_takes_no_time_and_no_memory(row: Any, tmp_path: Path) -> None:
    dtype = row.dtypes[-1] if "f16" not in row.dtypes else "f16"
    document = RANDOM.standard_normal((256, 128)).astype(DTYPES[dtype])
    offsets = np.arange(310_001, dtype=np.int64) * 256
    sparse_file(tmp_path / "x", offsets, 128, nk.pack([document], backend=row.name))
    assert (tmp_path / "x").stat().st_size > 20e9
    code = (
        "import json, sys, time, ml_dtypes, numpy as np, numkong_py as nk\n"
        "def memory():\n"
        "    return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "query = np.ones((32, 128), sys.argv[2])\n"
        "nk.maxsim(query, [query], threads=1)\n"
        "before, seconds = memory(), []\n"
        "for _ in range(5):\n"
        "    opened = None\n"
        "    begin = time.perf_counter()\n"
        "    opened = nk.open(sys.argv[1])\n"
        "    seconds.append(time.perf_counter() - begin)\n"
        "after = memory()\n"
        "nk.maxsim(query, opened[-10:], threads=1)\n"
        "print(json.dumps([seconds, after - before, memory() - after]))\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path / "x"), DTYPES[dtype].name]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    seconds, opening, scoring = json.loads(done.stdout)
    milliseconds = " ".join(f"{1e3 * each:.1f}" for each in seconds)
    print(f"opened in {milliseconds} ms and {opening / 1e6:.1f} MB; 10 documents scored in {scoring / 1e6:.1f} MB")
    assert min(seconds) < 0.05 and opening < 20e6 and scoring < 20e6
