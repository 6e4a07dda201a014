"""Wrong inputs from Python: every one a `NumKongError` of the right kind, that names the argument and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import DTYPES, packed_bytes, tokens

import numkong_py as nk

F32 = np.float32
X = np.ones((6, 4), F32)
PADDED = np.ones((2, 3, 4), F32)
DOCUMENTS = [X, X[:2]]
AVAILABLE = [row for row in nk.backends() if row.device == "cpu" and row.available]

# What is called, the exception it must raise, and words that its message must hold.
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    # element types
    "float64": (lambda: nk.pack(X.astype(np.float64)), nk.UnsupportedDtype, ("x", "float64", "astype")),
    "int64": (lambda: nk.pack(np.ones((2, 3), np.int64)), nk.UnsupportedDtype, ("x", "int64", "astype")),
    "uint16 without a dtype": (lambda: nk.pack(np.ones((2, 3), np.uint16)), nk.UnsupportedDtype, ("x", "bf16")),
    "bool": (lambda: nk.pack(np.ones((2, 3), bool)), nk.UnsupportedDtype, ("x", "bool")),
    "complex": (lambda: nk.pack(np.ones((2, 3), np.complex64)), nk.UnsupportedDtype, ("x", "complex64")),
    "object": (lambda: nk.pack(np.array([X, X[:2]], object)), nk.UnsupportedDtype, ("x", "object")),
    "strings": (lambda: nk.pack(np.array([["a", "b"]])), nk.UnsupportedDtype, ("x",)),
    "fp8": (lambda: nk.pack(X.astype(ml_dtypes.float8_e4m3fn)), nk.UnsupportedDtype, ("x", "float8")),
    "list of floats": (lambda: nk.pack([1.0, 2.0]), nk.UnsupportedDtype, ("x", "np.asarray")),
    "list of lists": (lambda: nk.pack([[1.0, 2.0]]), nk.UnsupportedDtype, ("x", "np.asarray")),
    "a string": (lambda: nk.pack("tokens.npy"), nk.UnsupportedDtype, ("x",)),
    "None": (lambda: nk.pack(None), nk.UnsupportedDtype, ("x",)),
    "a number": (lambda: nk.pack(3.0), nk.UnsupportedDtype, ("x",)),
    "masked array": (lambda: nk.pack(np.ma.masked_array(X)), nk.UnsupportedDtype, ("x", "mask=")),
    "dtype that is not the array's": (lambda: nk.pack(X, dtype="bf16"), nk.UnsupportedDtype, ("x", "bf16", "astype")),
    "dtype that does not exist": (lambda: nk.pack(X, dtype="f8"), nk.UnsupportedDtype, ("dtype", "f32")),
    "a list of two dtypes": (lambda: nk.pack([X, X.astype(np.float16)]), nk.UnsupportedDtype, ("x[1]", "f16", "f32")),
    "query of another dtype": (lambda: nk.maxsim(X.astype(np.float16), DOCUMENTS), nk.UnsupportedDtype, ("f16", "f32")),
    "query of float64": (lambda: nk.maxsim(X.astype(np.float64), X), nk.UnsupportedDtype, ("q", "float64", "astype")),
    "documents of float64": (lambda: nk.maxsim(X, [X.astype(float)]), nk.UnsupportedDtype, ("docs[0]", "float64")),
    # shapes
    "one dimension": (lambda: nk.pack(X[0]), nk.ShapeMismatch, ("x", "(4,)", "[None, :]")),
    "no dimension": (lambda: nk.pack(np.array(1, F32)), nk.ShapeMismatch, ("x", "()")),
    "four dimensions": (lambda: nk.pack(np.ones((1, 2, 3, 4), F32)), nk.ShapeMismatch, ("x", "(1, 2, 3, 4)")),
    "depth zero": (lambda: nk.pack(np.ones((3, 0), F32)), nk.ShapeMismatch, ("x", "depth")),
    "a list of two depths": (lambda: nk.pack([X, X[:, :3]]), nk.ShapeMismatch, ("x[1]", "3", "4")),
    "a list of one and two dimensions": (lambda: nk.pack([X, X[0]]), nk.ShapeMismatch, ("x[1]", "(4,)")),
    "an empty list": (lambda: nk.pack([]), nk.ShapeMismatch, ("x", "depth")),
    "depths of query and documents": (lambda: nk.maxsim(X[:, :3], X), nk.ShapeMismatch, ("3", "4", "depth")),
    "pairs of different counts": (lambda: nk.maxsim_pairs([X], DOCUMENTS), nk.ShapeMismatch, ("1", "2")),
    # offsets, lengths, masks
    "offsets from 1": (lambda: nk.pack(X, offsets=[1, 6]), nk.ShapeMismatch, ("offsets", "1", "6")),
    "offsets too short": (lambda: nk.pack(X, offsets=[0, 5]), nk.ShapeMismatch, ("offsets", "5", "6")),
    "offsets too long": (lambda: nk.pack(X, offsets=[0, 7]), nk.ShapeMismatch, ("offsets", "7", "6")),
    "offsets that fall": (lambda: nk.pack(X, offsets=[0, 4, 3, 6]), nk.ShapeMismatch, ("offsets", "4", "3", "cumsum")),
    "offsets without entries": (lambda: nk.pack(X, offsets=[]), nk.ShapeMismatch, ("offsets", "count + 1")),
    "offsets of two dimensions": (lambda: nk.pack(X, offsets=[[0, 6]]), nk.ShapeMismatch, ("offsets", "(1, 2)")),
    "offsets that are floats": (lambda: nk.pack(X, offsets=[0.0, 6.0]), nk.UnsupportedDtype, ("offsets", "float64")),
    "offsets of a padded array": (lambda: nk.pack(PADDED, offsets=[0, 2]), nk.ShapeMismatch, ("offsets", "(2, 3, 4)")),
    "offsets of a list": (lambda: nk.pack(DOCUMENTS, offsets=[0, 8]), ValueError, ("offsets", "list")),
    "lengths too many": (lambda: nk.pack(PADDED, lengths=[1, 2, 3]), nk.ShapeMismatch, ("lengths", "(3,)", "(2,)")),
    "lengths too large": (lambda: nk.pack(PADDED, lengths=[1, 4]), nk.ShapeMismatch, ("lengths", "4", "3")),
    "lengths below zero": (lambda: nk.pack(PADDED, lengths=[1, -1]), nk.ShapeMismatch, ("lengths", "-1")),
    "lengths that are floats": (lambda: nk.pack(PADDED, lengths=[1.0, 2.0]), nk.UnsupportedDtype, ("lengths", "float")),
    "lengths that are bools": (lambda: nk.pack(PADDED, lengths=[True, True]), nk.UnsupportedDtype, ("lengths", "bool")),
    "lengths of one set": (lambda: nk.pack(X, lengths=[3, 3]), nk.ShapeMismatch, ("lengths", "offsets=")),
    "mask of another shape": (
        lambda: nk.pack(PADDED, mask=np.ones((2, 4), bool)),
        nk.ShapeMismatch,
        ("mask", "(2, 4)"),
    ),
    "mask of twos": (lambda: nk.pack(PADDED, mask=np.full((2, 3), 2)), nk.ShapeMismatch, ("mask", "2")),
    "mask of floats": (lambda: nk.pack(PADDED, mask=np.ones((2, 3))), nk.UnsupportedDtype, ("mask", "float64")),
    "mask and lengths": (
        lambda: nk.pack(PADDED, mask=np.ones((2, 3), bool), lengths=[1, 2]),
        ValueError,
        ("lengths", "mask"),
    ),
    # candidates
    "candidate past the end": (lambda: nk.maxsim_candidates(X, DOCUMENTS, [[2]]), ValueError, ("candidates", "2")),
    "candidate below -1": (lambda: nk.maxsim_candidates(X, DOCUMENTS, [[-2]]), ValueError, ("candidates", "-2")),
    "candidates that are floats": (
        lambda: nk.maxsim_candidates(X, DOCUMENTS, np.zeros((1, 1))),
        nk.UnsupportedDtype,
        ("candidates", "float64"),
    ),
    "candidates for more queries": (
        lambda: nk.maxsim_candidates([X], DOCUMENTS, np.zeros((2, 1), int)),
        nk.ShapeMismatch,
        ("candidates", "(2, 1)"),
    ),
    # options
    "metric": (lambda: nk.maxsim(X, X, metric="euclidean"), ValueError, ("metric", "euclidean", "cosine")),
    "reduction": (lambda: nk.maxsim(X, X, reduction="max"), ValueError, ("reduction", "max", "mean")),
    "no threads": (lambda: nk.maxsim(X, X, threads=0), ValueError, ("threads", "0")),
    "minus one thread": (lambda: nk.maxsim(X, X, threads=-1), ValueError, ("threads", "-1")),
    "half a thread": (lambda: nk.maxsim(X, X, threads=1.5), ValueError, ("threads", "1.5")),
    "precision": (lambda: nk.pack(X, precision="half"), ValueError, ("precision", "half", "exact")),
    "unknown backend": (lambda: nk.pack(X, backend="pentium"), ValueError, ("backend", "pentium", "serial")),
    "no capability": (lambda: nk.pack(X, capabilities=0), nk.MissingKernel, ("f32",)),
    "unknown device": (lambda: nk.pack(X, device="tpu"), ValueError, ("device", "tpu", "cpu")),
    "no documents wanted": (lambda: nk.topk(X, DOCUMENTS, 0), ValueError, ("k", "0")),
    "half a document": (lambda: nk.topk(X, DOCUMENTS, 1.5), (TypeError, ValueError), ("k", "1.5")),
    "a kernel that does not exist": (lambda: nk.find_kernel("matmul", "f32"), ValueError, ("kind", "matmul")),
    "output dtype of float64": (lambda: nk.output_dtype("f64"), nk.UnsupportedDtype, ("f64", "f32")),
    "error bound of int8": (lambda: nk.error_bound(np.int8), nk.UnsupportedDtype, ("int8",)),
    "size of a negative count": (lambda: nk.pack_size(-1, 4, "f32"), ValueError, ("count", "-1")),
    "size of depth zero": (lambda: nk.pack_size(1, 0, "f32"), ValueError, ("depth", "0")),
    # finiteness
    "a NaN, checked": (
        lambda: nk.pack(np.where(np.arange(24).reshape(6, 4) == 9, np.nan, X).astype(F32), check_finite=True),
        ValueError,
        ("x", "2"),
    ),
    "an infinity, checked": (
        lambda: nk.pack([X, np.full((1, 4), np.inf, F32)], check_finite=True),
        ValueError,
        ("x", "finite"),
    ),
    # packed tensors
    "packed documents with lengths": (lambda: nk.pack(nk.collection(X), lengths=[1]), ValueError, ("lengths",)),
    "packed_shape of a short buffer": (lambda: nk.packed_shape(np.zeros(16, np.uint8)), nk.LayoutMismatch, ("16",)),
    "packed_shape of zeros": (lambda: nk.packed_shape(np.zeros(4096, np.uint8)), nk.LayoutMismatch, ()),
    "packed_shape of an array": (lambda: nk.packed_shape(X), (nk.LayoutMismatch, TypeError), ()),
    "packed_shape of text": (lambda: nk.packed_shape("file"), TypeError, ()),
    "maxsim_packed of an array": (lambda: nk.maxsim_packed(X, nk.pack(X)), TypeError, ("nk.pack",)),
    "maxsim_packed with array documents": (lambda: nk.maxsim_packed(nk.pack(X), X), TypeError, ("nk.pack",)),
    "index past the end": (lambda: nk.pack(DOCUMENTS)[2], IndexError, ("2",)),
    "index that is text": (lambda: nk.pack(DOCUMENTS)["a"], TypeError, ()),
    "gather past the end": (lambda: nk.pack(DOCUMENTS)[[0, 5]], IndexError, ("5",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(name: str) -> None:
    function, kind, words = WRONG[name]
    with pytest.raises(kind) as caught:
        function()
    assert isinstance(caught.value, nk.NumKongError), f"{type(caught.value)} is not a NumKongError"
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_exceptions_specialise_built_ins() -> None:
    for error, built_in in {
        nk.UnsupportedDtype: TypeError,
        nk.ShapeMismatch: ValueError,
        nk.DeviceMismatch: ValueError,
        nk.LayoutMismatch: ValueError,
        nk.MissingKernel: ValueError,
        nk.BackendUnavailable: RuntimeError,
        nk.CorruptFile: OSError,
    }.items():
        assert issubclass(error, nk.NumKongError) and issubclass(error, built_in)


# ------------------------------------------------------------------------------------------------- mixing


@pytest.mark.skipif(len(AVAILABLE) < 2, reason="only one CPU row is available here")
def test_two_rows_do_not_mix() -> None:
    packed = [nk.pack(X, backend=row.name) for row in AVAILABLE if "f32" in row.dtypes]
    for i, left in enumerate(packed):
        for j, right in enumerate(packed):
            if i == j:
                assert nk.maxsim_packed(left, right).shape == (1,)
                continue
            for score in (nk.maxsim_packed, nk.maxsim, nk.maxsim_pairs):
                with pytest.raises(nk.LayoutMismatch) as error:
                    score(left, right)
                names = [getattr(side.backend, "name", side.backend) for side in (left, right)]
                assert all(name in str(error.value) for name in names), error.value


def test_two_dtypes_and_two_depths_do_not_mix() -> None:
    packed = {dtype: nk.pack(X.astype(DTYPES[dtype]), backend="serial") for dtype in DTYPES}
    for left, right in [("bf16", "f16"), ("f16", "f32"), ("f32", "bf16")]:
        with pytest.raises(nk.UnsupportedDtype) as error:
            nk.maxsim_packed(packed[left], packed[right])
        assert left in str(error.value) and right in str(error.value)
    with pytest.raises(nk.ShapeMismatch) as caught:
        nk.maxsim_packed(nk.pack(X[:, :3].copy(), backend="serial"), packed["f32"])
    assert "3" in str(caught.value) and "4" in str(caught.value)


def test_an_array_scores_against_a_packed_tensor_of_any_row() -> None:
    expected = nk.maxsim(X, DOCUMENTS)
    for row in AVAILABLE:
        if "f32" in row.dtypes:
            assert np.array_equal(nk.maxsim(X, nk.pack(DOCUMENTS, backend=row.name)), expected)
            assert np.array_equal(nk.maxsim(nk.pack(X, backend=row.name), DOCUMENTS), expected)


# ----------------------------------------------------------------------------------------------- outputs


@pytest.mark.parametrize(
    ("out", "words"),
    [
        (np.zeros(3), ("out", "(3,)", "(2,)")),
        (np.zeros((2, 1)), ("out", "(2, 1)", "(2,)")),
        (np.zeros(2, F32), ("out", "float32", "float64")),
        (np.zeros(2, np.int64), ("out", "int64", "float64")),
        ([0.0, 0.0], ("out",)),
    ],
)
def test_wrong_out(out: Any, words: tuple[str, ...]) -> None:
    before = np.array(out)
    with pytest.raises(nk.NumKongError) as error:
        nk.maxsim(X, DOCUMENTS, out=out)
    assert all(word in str(error.value) for word in words), error.value
    assert np.array_equal(np.array(out), before)


def test_read_only_out() -> None:
    out = np.zeros(2)
    out.flags.writeable = False
    with pytest.raises(nk.NumKongError, match="out"):
        nk.maxsim(X, DOCUMENTS, out=out)
    assert not out.any()


def test_out_is_filled_and_returned() -> None:
    for out in (np.zeros(2), np.zeros(4)[::2], np.zeros(2)[::-1]):
        assert nk.maxsim(X, DOCUMENTS, out=out) is out
        assert np.array_equal(out, nk.maxsim(X, DOCUMENTS))


def test_nothing_is_written_to_out_where_an_input_is_wrong() -> None:
    out = np.full(2, -5.0)
    for query in (X[:, :3], X.astype(np.float16)):
        with pytest.raises(nk.NumKongError):
            nk.maxsim(query, DOCUMENTS, out=out)
    with pytest.raises(nk.NumKongError):
        nk.maxsim_candidates(X, DOCUMENTS, [0, 7], out=out)
    assert (out == -5).all()


# ---------------------------------------------------------------------------------------- damaged buffers


@pytest.mark.parametrize("dtype", DTYPES)
def test_truncated_and_damaged_bytes_are_refused(dtype: str) -> None:
    packed = nk.pack([tokens("random", dtype, count, 9, count) for count in (3, 0, 5)])
    whole = packed_bytes(packed)
    assert nk.packed_shape(packed) == nk.packed_shape(whole) == (8, 9)
    for length in (0, 8, 255, 256, len(whole) // 2, len(whole) - 1):
        with pytest.raises(nk.LayoutMismatch):
            nk.packed_shape(whole[:length].copy())
    for place in range(0, 256, 5):
        damaged = whole.copy()
        damaged[place] ^= 0x10
        with pytest.raises(nk.LayoutMismatch):
            nk.packed_shape(damaged)


def test_a_packed_tensor_is_no_array() -> None:
    packed = nk.pack(DOCUMENTS)
    for operation in (lambda: packed + 1, lambda: packed * 2, lambda: packed @ X.T, lambda: float(packed)):
        with pytest.raises(TypeError):
            operation()


def test_forced_rows_that_cannot_run_say_why() -> None:
    for row in nk.backends():
        if row.device == "cpu" and not row.available:
            with pytest.raises(nk.NumKongError) as error:
                nk.pack(X.astype(DTYPES[next(name for name in row.dtypes if name in DTYPES)]), backend=row.name)
            assert row.name in str(error.value) and row.reason in str(error.value)


def test_environment_takes_capabilities_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "serial")
    assert [row.name for row in nk.backends() if row.device == "cpu" and row.available] == ["serial"]
    assert "NUMKONG_CAPABILITIES" in next(row.reason for row in nk.backends() if row.name == AVAILABLE[0].name) or (
        AVAILABLE[0].name == "serial"
    )
    assert getattr(nk.pack(X).backend, "name", nk.pack(X).backend) == "serial"
    monkeypatch.setenv("NUMKONG_CAPABILITIES", "haswel")
    with pytest.raises(nk.NumKongError, match="haswel"):
        nk.enabled_capabilities()
