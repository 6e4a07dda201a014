"""Files of other programs: what is read and in which order, what is refused and why; what is written comes back."""

from __future__ import annotations

import itertools
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import DTYPES, assert_same_bits

import numkong_py as nk
from numkong_py import interop
from numkong_py.backends import BACKENDS

RANDOM = np.random.default_rng(88)
LENGTHS = [5, 0, 17, 1, 0]
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
SETS = [RANDOM.standard_normal((count, 6)).astype(np.float32) for count in LENGTHS]
ROWS = [row for row in BACKENDS if row.device == "cpu" and row.available]


def contents(sets: Any) -> list[bytes]:
    return [np.ascontiguousarray(part).tobytes() for part in nk.pack(sets).unpack()]


# ------------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("suffix", list(interop.WRITERS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_list", [False, True], ids=["one array", "a list"])
def test_there_and_back_bit_for_bit(suffix: str, dtype: str, as_list: bool, tmp_path: Path) -> None:
    bits = RANDOM.integers(0, 256, (23, 6 * DTYPES[dtype].itemsize), np.uint8)  # NaN and infinities too
    for row in ROWS:
        if dtype not in row.dtypes:
            continue
        packed = nk.pack(bits.view(DTYPES[dtype]), offsets=OFFSETS, backend=row.name)
        nk.write_tokens(packed, tmp_path / f"x{suffix}", as_list=as_list)
        sets, ids = nk.read_tokens(tmp_path / f"x{suffix}")
        assert (sets.dtype, sets.lengths.tolist(), ids) == (dtype, LENGTHS, None)
        assert b"".join(contents(sets)) == bits.tobytes()
        assert nk.pack(sets, backend=row.name).buffer.tobytes() == packed.buffer.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trips_between_all_rows_that_run_here(dtype: str, tmp_path: Path) -> None:
    """From every row through a file to every other row and back: vectors, packed bytes and scores keep their bits."""
    bits = RANDOM.integers(0, 256, (23, 6 * DTYPES[dtype].itemsize), np.uint8)  # NaN and infinities too
    names = [row.name for row in ROWS if dtype in row.dtypes]
    packed = {name: nk.pack(bits.view(DTYPES[dtype]), offsets=OFFSETS, backend=name) for name in names}
    query = RANDOM.standard_normal((4, 6)).astype(DTYPES[dtype])
    wanted = nk.maxsim(query, packed["serial"], return_argmax=True, return_bounds=True)
    for name, other in itertools.product(names, names):
        packed[name].save(tmp_path / name)
        moved = nk.open(tmp_path / name, verify="full").to(other)
        moved.save(tmp_path / "moved")
        back = nk.open(tmp_path / "moved", verify="full")
        assert (moved.backend, back.backend) == (other, other)
        assert back.buffer.tobytes() == packed[other].buffer.tobytes()
        assert back.to(name).buffer.tobytes() == packed[name].buffer.tobytes()
        assert b"".join(part.tobytes() for part in back.unpack()) == bits.tobytes()
        found = nk.maxsim(query, back, return_argmax=True, return_bounds=True)
        for field in ("scores", "argmax", "bounds"):
            assert_same_bits(getattr(found, field), getattr(wanted, field), f"{name} to {other}: {field}")


@pytest.mark.parametrize("suffix", list(interop.WRITERS))
def test_pieces_ranges_and_single_sets(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "PIECE", 5 * 6 * 4)
    packed = nk.pack(SETS)
    done: list[int] = []
    nk.write_tokens(packed[2:], tmp_path / f"x{suffix}", progress=done.append)
    assert contents(nk.read_tokens(tmp_path / f"x{suffix}").sets) == [part.tobytes() for part in SETS[2:]]
    assert sum(done) == 18 and max(done) == 5
    nk.write_tokens(packed[2], tmp_path / f"x{suffix}")
    assert nk.read_tokens(tmp_path / f"x{suffix}").sets.single
    nk.write_tokens(nk.pack([], depth=3, dtype="bf16"), tmp_path / f"x{suffix}")
    sets = nk.read_tokens(tmp_path / f"x{suffix}").sets
    assert (len(sets), sets.depth, sets.dtype) == (0, 3, "bf16")


def test_a_mapped_file_is_exported(tmp_path: Path) -> None:
    nk.pack(SETS).save(tmp_path / "packed")
    nk.write_tokens(nk.open(tmp_path / "packed"), tmp_path / "x.npz", ids=["a", "b", "ccc", "", "é"])
    sets, ids = nk.read_tokens(tmp_path / "x.npz")
    assert contents(sets) == [part.tobytes() for part in SETS] and ids == ["a", "b", "ccc", "", "é"]
    assert sorted(os.listdir(tmp_path)) == ["packed", "x.npz"]


def test_numpy_and_safetensors_read_what_is_written(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    packed = nk.pack([part.astype(ml_dtypes.bfloat16) for part in SETS])
    flat = np.concatenate(SETS).astype(ml_dtypes.bfloat16)
    nk.write_tokens(packed, tmp_path / "x.safetensors", ids=range(10, 15))
    read = library.load_file(tmp_path / "x.safetensors")
    assert read["tokens"].dtype == ml_dtypes.bfloat16 and read["tokens"].tobytes() == flat.tobytes()
    assert read["offsets"].tolist() == OFFSETS.tolist() and read["ids"].tolist() == [10, 11, 12, 13, 14]
    head = (tmp_path / "x.safetensors").read_bytes()[:8]
    assert (8 + int.from_bytes(head, "little")) % 64 == 0
    nk.write_tokens(packed, tmp_path / "x.npz", as_list=True)
    with np.load(tmp_path / "x.npz") as file:
        assert file.files == ["arr_0", "arr_1", "arr_2", "arr_3", "arr_4", "dtype"]
        assert b"".join(file[f"arr_{i}"].tobytes() for i in range(5)) == flat.tobytes()
    assert zipfile.ZipFile(tmp_path / "x.npz").testzip() is None


# ------------------------------------------------------------------------------------------- what is read


def test_layouts_of_files(tmp_path: Path) -> None:
    padded = np.full((5, 17, 6), np.nan, np.float32)
    mask = np.zeros((5, 17), bool)
    for row, part in enumerate(SETS):
        padded[row, : len(part)], mask[row, : len(part)] = part, True
    flat = np.concatenate(SETS)
    for arrays in (
        {"tokens": flat, "offsets": OFFSETS},
        {"x": padded, "lengths": np.array(LENGTHS)},
        {"mask": mask, "embeddings": padded},
        dict(zip("edcba", SETS)),
    ):
        np.savez_compressed(tmp_path / "x.npz", **arrays)
        sets, ids = nk.read_tokens(tmp_path / "x.npz")
        assert contents(sets) == [part.tobytes() for part in SETS]
        assert ids == (["e", "d", "c", "b", "a"] if "e" in arrays else None)
    np.save(tmp_path / "x.npy", flat)
    assert nk.read_tokens(tmp_path / "x.npy").sets.single


def test_order_of_names(tmp_path: Path) -> None:
    """A writer that sorts by name puts the tenth array before the second; a .npz has an order and keeps it."""
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    many = {f"arr_{i}": np.full((1, 2), i, np.float32) for i in range(12)}
    library.save_file(many, tmp_path / "x.safetensors")
    sets, ids = nk.read_tokens(tmp_path / "x.safetensors")
    assert [part[0, 0] for part in nk.pack(sets).unpack()] == list(range(12)) and ids is None
    library.save_file({f"page {i}, line 7": x for i, x in enumerate(many.values())}, tmp_path / "x.safetensors")
    sets, ids = nk.read_tokens(tmp_path / "x.safetensors")
    assert [part[0, 0] for part in nk.pack(sets).unpack()] == list(range(12))
    assert ids == [f"page {i}, line 7" for i in range(12)]
    np.savez(tmp_path / "x.npz", **{"9": many["arr_9"], "10": many["arr_10"], "2": many["arr_2"]})
    sets, ids = nk.read_tokens(tmp_path / "x.npz")
    assert [part[0, 0] for part in nk.pack(sets).unpack()] == [9, 10, 2] and ids == ["9", "10", "2"]


def test_bfloat16_in_numpy_files(tmp_path: Path) -> None:
    flat = np.concatenate(SETS).astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "x.npz", tokens=flat, offsets=OFFSETS)
    with pytest.raises(nk.UnsupportedDtype, match=r'view\(np.uint16\) with dtype="bf16"'):
        nk.read_tokens(tmp_path / "x.npz")
    assert b"".join(contents(nk.read_tokens(tmp_path / "x.npz", dtype="bf16").sets)) == flat.tobytes()
    np.savez(tmp_path / "x.npz", tokens=flat.view(np.uint16), offsets=OFFSETS, dtype="f31")
    with pytest.raises(nk.UnsupportedDtype, match=r"x.npz: dtype: 'f31' is not scored"):
        nk.read_tokens(tmp_path / "x.npz")


# ------------------------------------------------------------------------------------------- what is refused


def ragged_objects() -> np.ndarray:
    ragged = np.empty(len(SETS), object)
    ragged[:] = SETS
    return ragged


def test_object_arrays_are_refused_with_the_reason_and_the_call(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", ragged_objects())
    np.savez(tmp_path / "x.npz", ragged_objects())
    for name in ("x.npy", "x.npz"):
        with pytest.raises(nk.UnsupportedDtype, match=r"object array of shape \(5,\).*any code.*np.savez\(path, \*arr"):
            nk.read_tokens(tmp_path / name)
    arrays = np.load(tmp_path / "x.npy", allow_pickle=True)
    np.savez(tmp_path / "x.npz", *arrays)  # the call that the message names
    assert contents(nk.read_tokens(tmp_path / "x.npz").sets) == [part.tobytes() for part in SETS]


def test_object_arrays_in_memory_and_of_ids(tmp_path: Path) -> None:
    with pytest.raises(nk.UnsupportedDtype, match=r"list\(x\) if it holds one array a set"):
        nk.pack(ragged_objects())
    assert contents(list(ragged_objects())) == [part.tobytes() for part in SETS]
    np.savez(tmp_path / "x.npz", tokens=np.concatenate(SETS), offsets=OFFSETS, ids=np.array(list("abcde"), object))
    with pytest.raises(nk.UnsupportedDtype, match=r"x.npz: ids: an object array.*save ids.astype\(str\)"):
        nk.read_tokens(tmp_path / "x.npz")


@pytest.mark.parametrize(
    "arrays, error, message",
    [
        ({"x": np.zeros((3, 4))}, nk.UnsupportedDtype, r"float64.*astype\(np.float32\)"),
        ({"x": np.zeros((3, 4), ">f4")}, nk.UnsupportedDtype, "byte order"),
        ({"a": SETS[0], "b": SETS[2][:, :3]}, nk.ShapeMismatch, "depth 3"),
        ({"a": SETS[0], "b": SETS[2], "offsets": OFFSETS}, nk.InvalidArgument, "offsets beside 2 arrays"),
        ({"a": np.concatenate(SETS), "offsets": OFFSETS[:-2]}, nk.ShapeMismatch, "offsets"),
        ({"a": np.concatenate(SETS), "offsets": OFFSETS, "ids": np.arange(4)}, nk.ShapeMismatch, r"wanted \(5,\)"),
    ],
    ids=range(6),
)
def test_wrong_contents_name_the_file(arrays: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(error, match=f"wrong.npz.*{message}"):
        nk.read_tokens(tmp_path / "wrong.npz")


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".safetensors"])
def test_damaged_files(suffix: str, tmp_path: Path) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    path = tmp_path / f"damaged{suffix}"
    if suffix == ".npy":
        np.save(path, SETS[0])
    else:
        nk.write_tokens(nk.pack(SETS), path)
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(nk.CorruptFile, match="damaged"):
            nk.read_tokens(path)
    with pytest.raises(FileNotFoundError):
        nk.read_tokens(tmp_path / f"missing{suffix}")


def test_what_cannot_be_written(tmp_path: Path) -> None:
    packed = nk.pack(SETS)
    for path, options, error, message in (
        ("x.csv", {}, nk.InvalidArgument, ".npz or .safetensors"),
        ("x.npy", {}, nk.InvalidArgument, ".npz or .safetensors"),
        ("x.npz", {"ids": ["a"]}, nk.ShapeMismatch, "1, wanted 5"),
        ("x.npz", {"ids": ["a", 1, "b", "c", "d"]}, nk.InvalidArgument, "int, str"),
        ("x.npz", {"ids": ["a", "b\0", "c", "d", "e"]}, nk.InvalidArgument, "str; wanted"),
        ("x.npz", {"ids": [0, 1, 2, 3, 1 << 63]}, nk.InvalidArgument, "64-bit"),
        ("x.safetensors", {"ids": list("abcde")}, nk.InvalidArgument, "as_list=True"),
        ("x.npz", {"ids": list("abcda"), "as_list": True}, nk.InvalidArgument, "twice"),
        ("x.npz", {"ids": ["a", "b", "c", "d", "mask"], "as_list": True}, nk.InvalidArgument, "mask"),
    ):
        with pytest.raises(error, match=message):
            nk.write_tokens(packed, tmp_path / path, **options)
    with pytest.raises(nk.InvalidArgument, match="no depth"):
        nk.write_tokens(packed[:0], tmp_path / "x.npz", as_list=True)
    assert os.listdir(tmp_path) == []
    (tmp_path / "x.npz").write_bytes(b"old")
    with pytest.raises(RuntimeError, match="in the middle"):
        nk.write_tokens(packed, tmp_path / "x.npz", progress=interrupt)
    assert (tmp_path / "x.npz").read_bytes() == b"old" and os.listdir(tmp_path) == ["x.npz"]


def interrupt(count: int) -> None:
    if count:
        raise RuntimeError("in the middle")


def test_names_of_arrays_are_ids(tmp_path: Path) -> None:
    pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    names = ["doc/1", "doc/10", "doc/2", "ü", "x y"]
    for suffix in interop.WRITERS:
        nk.write_tokens(nk.pack(SETS), tmp_path / f"x{suffix}", ids=names, as_list=True)
        sets, ids = nk.read_tokens(tmp_path / f"x{suffix}")
        assert dict(zip(ids, contents(sets))) == dict(zip(names, (part.tobytes() for part in SETS)))
    table = (tmp_path / "x.safetensors").read_bytes()
    assert set(json.loads(table[8 : 8 + int.from_bytes(table[:8], "little")])) == set(names)
