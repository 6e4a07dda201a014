"""Codebooks of residual packings: checks, encoding in blocks, training, and the arrays of a PLAID index."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import assert_same_bits

import numkong_py as nk
from numkong_py import codebook, reference

RNG = np.random.default_rng(5)


def book(bits: int, depth: int = 24, count: int = 9) -> nk.Codebook:
    rng = np.random.default_rng(bits)
    return nk.Codebook(rng.normal(0, 0.3, (count, depth)), np.sort(rng.normal(0, 0.1, 1 << bits)))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_buckets_lie_in_plaids_order(bits: int) -> None:
    """The first element is in the highest bits of a byte, its lowest bit first (ColBERT's residual codec)."""
    buckets = RNG.integers(0, 1 << bits, (7, 24)).astype(np.uint8)
    expected = [
        [sum((int(b) >> bit & 1) << (7 - place * bits - bit) for place, b in enumerate(part) for bit in range(bits))
         for part in row.reshape(-1, 8 // bits)]
        for row in buckets
    ]  # fmt: skip
    packed = codebook.pack_buckets(buckets, bits)
    assert np.array_equal(packed, np.uint8(expected))
    assert np.array_equal(codebook.unpack_buckets(packed, bits, 24), buckets)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_plaid_index_decodes_to_its_unit_vectors(bits: int) -> None:
    """Codes and scales are the nearest to PLAID's own decoding, within half a unit of each of the two integers."""
    found = book(bits)
    buckets, ids = RNG.integers(0, 1 << bits, (40, 24)).astype(np.uint8), RNG.integers(0, 9, 40)
    packed = nk.from_plaid(ids.astype(np.int32), codebook.pack_buckets(buckets, bits), found, [3, 0, 37])
    assert packed.precision == "residual" and packed.lengths.tolist() == [3, 0, 37]
    decoded = found.centroids[ids].astype(np.float64) + found.weights[buckets]
    norms = np.linalg.norm(decoded, axis=1, keepdims=True)
    actual = np.concatenate(packed.unpack())
    assert (np.linalg.norm(actual - decoded / norms, axis=1) <= found.codes.scale * 24**0.5 / norms[:, 0]).all()
    query = RNG.standard_normal((5, 24)).astype(np.float32)
    units = np.split((decoded / norms).astype(np.float32), [3, 3])
    result, exact = nk.maxsim(query, packed, return_bounds=True), nk.maxsim(query, units)
    finite = np.isfinite(exact)
    assert (np.abs(result.scores[finite] - exact[finite]) <= result.bounds[finite]).all()


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, found = RNG.standard_normal((50, 24)).astype(np.float32), book(2)
    whole = nk.pack([x[:7], x[7:]], precision="residual", codebook=found)
    monkeypatch.setattr("numkong_py.packed.BLOCK", 6)
    monkeypatch.setattr(codebook, "PRODUCTS", 20)
    again = nk.pack([x[:7], x[7:]], precision="residual", codebook=found)
    assert np.array_equal(whole.buffer, again.buffer)
    unit = nk.pack(x, precision="residual", codebook=found, normalize=True)
    assert_same_bits(unit.unpack(), reference.decoded(reference.normalized(x), "residual", found))


def test_training_is_a_function_of_tokens_and_seed() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn, the extra codebook, is not installed")
    x = RNG.standard_normal((600, 16)).astype(np.float32)
    first, again = (nk.train_codebook(x, centroids=20, bits=2, seed=3) for _ in range(2))
    for name in ("centroids", "weights", "cutoffs"):
        assert np.array_equal(getattr(first, name), getattr(again, name)), name
    differences = x - first.centroids[first.nearest(x)]
    shares = np.histogram(differences, [-np.inf, *first.cutoffs, np.inf])[0] / differences.size
    assert np.allclose(shares, 0.25, atol=1e-3), "quantiles"
    books = [nk.train_codebook(x, centroids=20, bits=bits) for bits in (1, 2, 4, 8)]
    losses = [np.linalg.norm(nk.pack(x, precision="residual", codebook=found).unpack() - x) for found in books]
    assert losses == sorted(losses, reverse=True)


def test_training_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sklearn.cluster", None)
    with pytest.raises(nk.MissingKernel, match=r"pip install .numkong_py\[codebook\]"):
        nk.train_codebook(np.ones((4, 4), np.float32), centroids=2)


def test_errors_name_what_came_and_the_fix() -> None:
    x, found = np.ones((3, 24), np.float32), book(2)
    ids, residuals = np.int32([0, 1, 2]), np.zeros((3, 6), np.uint8)
    cases = [
        (nk.UnsupportedDtype, "centroids: dtype int64", lambda: nk.Codebook(np.ones((2, 4), int), found.weights)),
        (nk.ShapeMismatch, r"centroids: shape \(4,\)", lambda: nk.Codebook(np.ones(4), found.weights)),
        (nk.ShapeMismatch, "weights: 3 of them", lambda: nk.Codebook(found.centroids, np.ones(3))),
        (nk.ShapeMismatch, "cutoffs: 2 of them", lambda: nk.Codebook(found.centroids, found.weights, np.ones(2))),
        (nk.InvalidArgument, "weights: not in asc", lambda: nk.Codebook(found.centroids, found.weights[::-1])),
        (nk.InvalidArgument, "centroids: has a NaN", lambda: nk.Codebook(np.full((2, 4), np.nan), found.weights)),
        (nk.InvalidArgument, "codebook: a NoneType.*train_codebook", lambda: nk.pack(x, precision="residual")),
        (nk.InvalidArgument, "codebook: precision 'int8'", lambda: nk.pack(x, precision="int8", codebook=found)),
        (nk.ShapeMismatch, "depth 4.*24", lambda: nk.pack(x[:, :4], precision="residual", codebook=found)),
        (nk.UnsupportedDtype, "residuals: dtype int8", lambda: nk.from_plaid(ids, residuals.view("i1"), found, [3])),
        (nk.ShapeMismatch, "residuals: shape", lambda: nk.from_plaid(ids, residuals[:, :5], found, [3])),
        (nk.ShapeMismatch, "doclens: their sum is 2", lambda: nk.from_plaid(ids, residuals, found, [2])),
        (nk.IndexOutOfRange, r"codes\[1\]: 9", lambda: nk.from_plaid([0, 9, 1], residuals, found, [3])),
    ]
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
