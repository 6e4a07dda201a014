"""Arrays as they come: libraries, strides, byte orders, read-only and mapped memory, masks, empty collections."""

from __future__ import annotations

import array
import hashlib
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import ROOT, lay_out, tokens

import numkong_py as nk
from numkong_py.arrays import collection, view
from numkong_py.cpu import ffi
from numkong_py.layout import HEADER, MAGIC, Header

RANDOM = np.random.default_rng(2)
TOKENS = RANDOM.standard_normal((12, 6)).astype(np.float32)
QUERY = RANDOM.standard_normal((3, 6)).astype(np.float32)
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def structured(x: np.ndarray) -> np.ndarray:
    """The same values as a field of 9-byte (or wider) records, so that nothing is aligned."""
    records = np.zeros(x.shape, [("flag", "u1"), ("value", x.dtype), ("rest", "u1", 8 - x.dtype.itemsize)])
    records["value"] = x
    assert records.strides[-1] == 9
    return records["value"]


STRIDED = {
    "reversed tokens": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "reversed elements": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "every second token": lambda x: np.repeat(x, 2, axis=0)[::2],
    "every third element": lambda x: np.repeat(x, 3, axis=1)[:, ::3],
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "columns of a wider array": lambda x: np.concatenate([x, x, x], axis=1)[:, x.shape[1] : 2 * x.shape[1]],
    "fields of 9-byte records": structured,
    "backwards every way": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", STRIDED)
def test_strides_give_what_the_contiguous_copy_gives(name: str, dtype: str) -> None:
    tokens = TOKENS.astype(DTYPES[dtype])
    strided = STRIDED[name](tokens)
    assert np.array_equal(strided, tokens) and strided.strides != tokens.strides
    for keywords in ({}, {"offsets": [0, 5, 5, 12]}, {"mask": np.arange(12) % 3 != 1}):
        assert np.array_equal(nk.pack(strided, **keywords).buffer, nk.pack(tokens, **keywords).buffer)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_strides_of_zero(dtype: str) -> None:
    row = TOKENS[:1].astype(DTYPES[dtype])
    assert np.array_equal(nk.pack(np.broadcast_to(row, (7, 6))).buffer, nk.pack(np.repeat(row, 7, axis=0)).buffer)
    column = TOKENS[:, :1].astype(DTYPES[dtype])
    assert np.array_equal(
        nk.pack(np.broadcast_to(column, (12, 6))).buffer, nk.pack(np.repeat(column, 6, axis=1)).buffer
    )


def test_padded_strides_in_every_axis() -> None:
    padded = RANDOM.standard_normal((4, 5, 6)).astype(np.float32)
    mask = RANDOM.random((4, 5)) > 0.4
    for strided in (
        padded[::-1],
        padded[:, ::-1],
        padded[..., ::-1],
        padded.transpose(2, 0, 1).copy().transpose(1, 2, 0),
    ):
        for keywords in ({}, {"lengths": [0, 5, 2, 1]}, {"mask": mask}):
            expected = nk.pack(np.ascontiguousarray(strided), **keywords)
            assert np.array_equal(nk.pack(strided, **keywords).buffer, expected.buffer)


# ------------------------------------------------------------------------------------- memory of other kinds


def test_read_only_and_mapped(tmp_path: Path) -> None:
    expected = nk.pack(TOKENS).buffer
    frozen = TOKENS.copy()
    frozen.flags.writeable = False
    assert np.array_equal(nk.pack(frozen).buffer, expected)
    np.save(tmp_path / "tokens.npy", TOKENS)
    assert np.array_equal(nk.pack(np.load(tmp_path / "tokens.npy", mmap_mode="r")).buffer, expected)


def test_buffer_protocol() -> None:
    flat = array.array("f", TOKENS.ravel().tolist())
    assert np.array_equal(nk.pack(memoryview(flat).cast("B").cast("f", TOKENS.shape)).buffer, nk.pack(TOKENS).buffer)


class DlpackOnly:
    """An array of a library that nobody has heard of."""

    def __init__(self, x: np.ndarray) -> None:
        self._x = x

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._x.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self._x.__dlpack_device__()


def test_dlpack() -> None:
    assert np.array_equal(nk.pack(DlpackOnly(TOKENS[::-2])).buffer, nk.pack(TOKENS[::-2].copy()).buffer)


class OnAnotherDevice(DlpackOnly):
    def __dlpack_device__(self) -> Any:
        return (8, 0)


def test_a_device_that_no_row_reaches() -> None:
    with pytest.raises(nk.DeviceMismatch, match="DLPack device 8"):
        nk.pack(OnAnotherDevice(TOKENS))


def test_views_copy_nothing() -> None:
    for x in (TOKENS[::-1], [TOKENS[::-1]]):
        runs = collection(x).runs
        assert [part.tolist() for part in runs] == [[TOKENS[11:].ctypes.data], [12], [-24], [4]]


def test_bfloat16_bits() -> None:
    bits = TOKENS.astype(ml_dtypes.bfloat16)
    expected = nk.pack(bits).buffer
    assert np.array_equal(nk.pack(bits.view(np.uint16), dtype="bf16").buffer, expected)
    assert np.array_equal(nk.pack(bits.view(np.int16), dtype="bf16").buffer, expected)
    assert np.array_equal(nk.pack(bits, dtype=ml_dtypes.bfloat16).buffer, expected)
    with pytest.raises(nk.UnsupportedDtype, match="bits of bfloat16"):
        nk.pack(bits.view(np.uint16))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_the_other_byte_order_is_refused(dtype: str) -> None:
    swapped = TOKENS.astype(DTYPES[dtype]).astype(np.dtype(DTYPES[dtype]).newbyteorder("S"))
    with pytest.raises(nk.UnsupportedDtype, match=r'newbyteorder\("="\)'):
        nk.pack(swapped)
    assert np.array_equal(
        nk.pack(swapped.astype(swapped.dtype.newbyteorder("="))).buffer, nk.pack(TOKENS.astype(DTYPES[dtype])).buffer
    )


def test_masked_arrays_are_refused_because_their_mask_would_be_lost() -> None:
    with pytest.raises(nk.UnsupportedDtype, match="mask="):
        nk.pack(np.ma.masked_array(TOKENS, TOKENS > 0))


def test_object_arrays_and_data_without_arrays() -> None:
    for x in (np.array([TOKENS, TOKENS[:2]], object), "tokens", 3.0, {"x": TOKENS}, None):
        with pytest.raises(TypeError, match="x"):
            nk.pack(x)
    with pytest.raises(nk.UnsupportedDtype, match=r"np.asarray\(x, np.float32\)"):
        nk.pack([[1.0, 2.0]])


# ------------------------------------------------------------------------------------- collections


def test_all_layouts_of_one_collection_give_the_same_bytes() -> None:
    lengths = np.array([3, 0, 5, 0, 4, 0])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    listed = [TOKENS[start:stop] for start, stop in pairwise(offsets)]
    padded = np.full((6, 5, 6), np.nan, np.float32)
    holes = np.full((6, 9, 6), 1e4, np.float32)
    mask = np.zeros((6, 9), bool)
    for index, part in enumerate(listed):
        padded[index, : len(part)] = part
        places = np.sort(RANDOM.permutation(9)[: len(part)])
        holes[index, places] = part
        mask[index, places] = True
    expected = nk.pack(listed)
    assert expected.lengths.tolist() == lengths.tolist()
    packings = (
        nk.pack(TOKENS, offsets=offsets),
        nk.pack(TOKENS, offsets=offsets.astype(np.uint32)),
        nk.pack(padded, lengths=lengths.tolist()),
        nk.pack(holes, mask=mask),
        nk.pack(holes, mask=mask.astype(np.uint8)),
        nk.pack(holes, mask=mask.tolist()),
        nk.pack(nk.collection(holes, mask=mask)),
        nk.pack(tuple(listed)),
    )
    for packed in packings:
        assert np.array_equal(packed.buffer, expected.buffer)


def test_positions_undo_a_mask() -> None:
    padded = RANDOM.standard_normal((3, 4, 6)).astype(np.float32)
    mask = np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1]], bool)
    documents = nk.collection(padded, mask=mask)
    winners = nk.maxsim(QUERY, documents, return_argmax=True).argmax
    scores = QUERY @ padded.transpose(0, 2, 1)
    for document in (0, 2):
        places = documents.positions[documents.offsets[document] + winners[document]]
        assert np.array_equal(places, np.where(mask[document], scores[document], -np.inf).argmax(axis=1))
    assert (winners[1] == -1).all()
    assert nk.collection(TOKENS, offsets=[0, 5, 5, 12]).positions.tolist() == [*range(5), *range(7)]
    assert nk.collection(TOKENS, mask=np.arange(12) % 2).positions.tolist() == [1, 3, 5, 7, 9, 11]


def test_empty_collections() -> None:
    for documents in (
        [],
        nk.pack([], depth=6),
        nk.collection([], depth=6),
        np.zeros((0, 4, 6), np.float32),
        nk.pack(TOKENS[:0], offsets=[0]),
    ):
        assert nk.maxsim(QUERY, documents).shape == (0,)
        assert nk.maxsim([QUERY, QUERY], documents, return_argmax=True).argmax.shape == (2, 0, 3)
    assert nk.maxsim([], [TOKENS]).shape == (0, 1)
    assert len(nk.pack([], depth=6, dtype="bf16")) == 0
    with pytest.raises(nk.ShapeMismatch, match="depth="):
        nk.pack([])
    with pytest.raises(nk.ShapeMismatch, match="depth="):
        nk.maxsim([], [])


def test_trailing_empty_documents_are_kept() -> None:
    for packed in (nk.pack(TOKENS, offsets=[0, 12, 12, 12]), nk.pack([TOKENS, TOKENS[:0], TOKENS[:0]])):
        assert len(packed) == 3
        assert np.isneginf(nk.maxsim(QUERY, packed)[1:]).all()


def test_one_set_and_a_batch_of_one() -> None:
    assert nk.maxsim(QUERY, [TOKENS]).shape == (1,)
    assert nk.maxsim(QUERY[None], [TOKENS]).shape == (1, 1)
    assert nk.maxsim([QUERY], TOKENS).shape == (1, 1)
    assert nk.maxsim(nk.pack(QUERY), TOKENS[None]).shape == (1,)
    assert nk.maxsim(nk.pack([QUERY]), TOKENS).shape == (1, 1)
    assert nk.maxsim(nk.pack([QUERY, QUERY])[0], TOKENS).shape == (1,)


# ------------------------------------------------------------------------------------- other libraries


def test_torch() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.from_numpy(TOKENS.copy()).requires_grad_()
    assert np.array_equal(nk.pack(tensor).buffer, nk.pack(TOKENS).buffer)
    assert np.array_equal(nk.pack(tensor.t().contiguous().t()).buffer, nk.pack(TOKENS).buffer)
    for torch_type, numpy_type in ((torch.bfloat16, ml_dtypes.bfloat16), (torch.float16, np.float16)):
        narrow = tensor.to(torch_type)
        assert np.array_equal(nk.pack(narrow).buffer, nk.pack(TOKENS.astype(numpy_type)).buffer)
        assert np.array_equal(
            nk.pack(narrow.flip(0)[:, ::2]).buffer, nk.pack(TOKENS.astype(numpy_type)[::-1, ::2]).buffer
        )
    assert isinstance(nk.maxsim(tensor, [tensor]), np.ndarray)
    mask = torch.arange(12) % 3 == 0
    assert np.array_equal(nk.pack(tensor, mask=mask).buffer, nk.pack(TOKENS[::3].copy()).buffer)
    padded = tensor.reshape(3, 4, 6)
    lengths = torch.tensor([4, 0, 2])
    assert nk.pack(padded, lengths=lengths).lengths.tolist() == [4, 0, 2]
    with pytest.raises(nk.UnsupportedDtype, match="float64"):
        nk.pack(tensor.double())
    with pytest.raises(nk.DeviceMismatch, match="meta"):
        nk.pack(tensor.to("meta"))


def test_jax() -> None:
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    for numpy_type in DTYPES.values():
        tokens = TOKENS.astype(numpy_type)
        device_array = jnp.asarray(tokens)
        assert np.array_equal(nk.pack(device_array).buffer, nk.pack(tokens).buffer)
        assert view(device_array).address == device_array.unsafe_buffer_pointer()
    assert nk.pack(jnp.asarray(TOKENS), mask=jnp.arange(12) % 2 == 0).tokens == 6


# ------------------------------------------------------------------------------------- the packed header


def test_the_header_is_the_c_struct() -> None:
    fields = dict(ffi.typeof("nk_packed_header_t").fields)
    assert HEADER.itemsize == ffi.sizeof("nk_packed_header_t") and HEADER.names == Header._fields
    for name, (dtype, place) in HEADER.fields.items():
        assert (place, dtype.itemsize) == (fields[name].offset, ffi.sizeof(fields[name].type)), name
    assert nk.pack(TOKENS).buffer[: len(MAGIC)].tobytes() == MAGIC


# ------------------------------------------------------------------------------------------- other processes


def test_a_pickled_collection_holds_its_tokens_and_no_addresses(tmp_path: Path) -> None:
    """Addresses of another process are read without a complaint, or end this one with a signal."""
    found = []
    for dtype in DTYPES:
        parts = [tokens("random", dtype, count, 12, count)[:, ::2] for count in (3, 0, 5, 1)]
        laid_out = [lay_out(parts, layout) for layout in ("one", "list", "offsets", "lengths", "mask")]
        found += [collection(each.x, **each.keywords) for each in laid_out]
    found.append(nk.collection(np.zeros((2, 0, 6), np.float32)))
    (tmp_path / "x").write_bytes(pickle.dumps(found))
    code = (
        "import hashlib, pickle, sys, numkong_py as nk\n"
        "for x in pickle.load(open(sys.argv[1], 'rb')):\n"
        "    packed = hashlib.sha256(nk.pack(x).buffer).hexdigest()\n"
        "    print(x.single, len(x), x.positions.tolist(), packed)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    assert done.stdout.splitlines() == [
        f"{x.single} {len(x)} {x.positions.tolist()} {hashlib.sha256(nk.pack(x).buffer).hexdigest()}" for x in found
    ]
