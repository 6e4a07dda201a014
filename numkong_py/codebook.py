"""Codebooks of residual packings: centroids, and what the differences from them are rounded to (ColBERTv2, PLAID)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .arrays import collection
from .coded import Regions, summarise
from .errors import InvalidArgument, MissingKernel, ShapeMismatch, UnsupportedDtype
from .layout import Coding

__all__ = ["BLOCK", "Codebook", "Encoded", "fill", "pack_buckets", "train_codebook", "unpack_buckets"]

BLOCK = 1 << 14  # tokens encoded at a time
PRODUCTS = 1 << 22  # of tokens and centroids held at a time
BITS = (1, 2, 4, 8)
LANES = 16
LEAST_SCALE, LARGEST_SCALE = 2.0**-87, 2.0**120  # smaller scales count as zero, larger ones could overflow
WEIGHTS_AT = 64  # in the codebook of a packing: its scale, the bias of the weights' codes, at 64 those codes
CENTROIDS_AT = 320  # and the centroids' codes


class Encoded(NamedTuple):
    """A block of coded tokens, and what bounds need of them."""

    ids: np.ndarray  # uint32 [count]
    residuals: np.ndarray  # uint8 [count, bytes]
    scales: np.ndarray  # float32 [count]
    norms: np.ndarray  # float64 [count], at least the norms of the tokens, infinite where one is not finite
    losses: np.ndarray  # float64 [count], at least the norms of what the codes leave over


class _Codes(NamedTuple):
    """A codebook in integers at one scale; a centroid's code and a weight's add up to at most 127."""

    scale: np.float32
    centroids: np.ndarray  # int16 [count, depth]
    weights: np.ndarray  # int16 [2^bits]


@dataclass(frozen=True, eq=False)
class Codebook:
    """What ``pack(precision="residual")`` codes tokens with (Santhanam et al., ColBERTv2, NAACL 2022, section 3.3).

    A token becomes the number of its nearest centroid and a bucket for every element of its difference from that.

    The arrays are copied as float32 and cannot be written to. Every packing holds the codebook's codes, so scoring does
    not need this object; to pack more documents with it, keep it (``np.savez``).

    Parameters
    ----------
    centroids : array
        ``[count, depth]``, finite.
    weights : array
        ``[2^bits]`` for 1, 2, 4 or 8 bits, ascending: what an element of a bucket is decoded to.
    cutoffs : array, optional
        ``[2^bits - 1]``, ascending: bucket b holds elements above cutoff b - 1, and up to cutoff b. Default: half-way
        between neighbouring weights.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, InvalidArgument

    Examples
    --------
    >>> codebook = Codebook(np.float32([[1, 0], [0, 1]]), np.float32([-0.1, 0.1]))
    >>> codebook.bits, codebook.depth, codebook.cutoffs
    (1, 2, array([0.], dtype=float32))
    """

    centroids: np.ndarray
    weights: np.ndarray
    cutoffs: np.ndarray | None = None

    def __post_init__(self) -> None:
        centroids, weights = _floats(self.centroids, "centroids", 2), _floats(self.weights, "weights", 1)
        if 0 in centroids.shape:
            raise ShapeMismatch(f"centroids: shape {centroids.shape}, wanted at least one centroid of depth 1 or more")
        if len(weights) not in [1 << bits for bits in BITS]:
            raise ShapeMismatch(f"weights: {len(weights)} of them, wanted 2, 4, 16 or 256, for 1, 2, 4 or 8 bits")
        middles = (weights[1:].astype(np.float64) + weights[:-1]) / 2
        cutoffs = _floats(middles if self.cutoffs is None else self.cutoffs, "cutoffs", 1)
        if len(cutoffs) != len(weights) - 1:
            raise ShapeMismatch(f"cutoffs: {len(cutoffs)} of them, wanted {len(weights) - 1}, one fewer than weights")
        for name, values in (("weights", weights), ("cutoffs", cutoffs)):
            if (np.diff(values) < 0).any():
                raise InvalidArgument(f"{name}: not in ascending order; pass np.sort({name})")
        if not max(np.abs(centroids).max(), np.abs(weights).max()) > 0:
            raise InvalidArgument("centroids: all zero, and so are the weights; they cannot stand for any token")
        for name, values in (("centroids", centroids), ("weights", weights), ("cutoffs", cutoffs)):
            object.__setattr__(self, name, values)

    def __repr__(self) -> str:
        return f"<numkong_py.Codebook: {len(self.centroids)} centroids x {self.depth}, {self.bits} bits>"

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return len(self.weights).bit_length() - 1

    @property
    def depth(self) -> int:
        """Elements of a token."""
        return self.centroids.shape[1]

    @property
    def coding(self) -> Coding:
        """What the header of a packing says of it."""
        return Coding("residual", self.bits, len(self.centroids))

    @cached_property
    def codes(self) -> _Codes:
        """Centroids and weights in units of (max|centroid| + max|weight|) / 126, rounded to nearest even."""
        largest = [np.abs(values).max().astype(np.float64) for values in (self.centroids, self.weights)]
        scale = np.float32(sum(largest) / 126)
        centroids, weights = (np.rint(v / np.float64(scale)).astype(np.int16) for v in (self.centroids, self.weights))
        return _Codes(scale, centroids, weights)

    @cached_property
    def _half_squares(self) -> np.ndarray:
        wide = self.centroids.astype(np.float64)
        return (wide * wide).sum(axis=1) / 2

    def store(self, target: np.ndarray) -> None:
        """Write its codes into the codebook of a packing: unsigned, with biases that add up to 128."""
        scale, centroids, weights = self.codes
        bias = int(np.abs(weights).max())
        target[:4] = np.frombuffer(scale.tobytes(), np.uint8)
        target[4] = bias
        target[WEIGHTS_AT : WEIGHTS_AT + len(weights)] = weights + bias
        words = -(-self.depth // 4) * 4
        rows = target[CENTROIDS_AT : CENTROIDS_AT + len(centroids) * words].reshape(len(centroids), words)
        rows[...] = 128 - bias
        rows[:, : self.depth] = centroids + (128 - bias)

    def encode(self, x: np.ndarray) -> Encoded:
        """Code a block of tokens, float32 [count, depth]."""
        finite = np.isfinite(x).all(axis=1)
        x = np.where(finite[:, None], x, np.float32(0))
        ids = self.nearest(x)
        buckets = np.searchsorted(self.cutoffs, x - self.centroids[ids], side="left").astype(np.uint8)
        return self.fit(x, finite, ids, buckets)

    def nearest(self, x: np.ndarray) -> np.ndarray:
        """The nearest centroid of every token, the lowest of equals.

        Products in float32 propose one; where others are within their rounding, float64 products decide.
        """
        rows = max(1, PRODUCTS // len(self.centroids))
        parts = [self._nearest(x[begin : begin + rows]) for begin in range(0, len(x), rows)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def _nearest(self, x: np.ndarray) -> np.ndarray:
        wide, squares = x.astype(np.float64), self._half_squares
        largest = np.abs(wide).max(axis=1)
        inverse = np.divide(1, largest, out=np.zeros(len(x)), where=largest > 0)
        units = (wide * inverse[:, None]).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            values = units @ self.centroids.T - np.outer(inverse, squares).astype(np.float32)
            best = values.argmax(axis=1)
            reach = np.sqrt(self.depth * 2 * squares.max()) + inverse * squares.max()  # at least a product of norms
            least = values[np.arange(len(x)), best] - (self.depth + 8) * 2.0**-22 * reach
            close = np.flatnonzero(~((values >= least[:, None]).sum(axis=1) == 1))
        best[close] = (wide[close] @ self.centroids.T.astype(np.float64) - squares).argmax(axis=1)
        return best

    def fit(self, x: np.ndarray, finite: np.ndarray, ids: np.ndarray, buckets: np.ndarray) -> Encoded:
        """Tokens with these centroids and buckets: least-squares scales, none below zero."""
        codes = self.codes.centroids[ids] + self.codes.weights[buckets]
        scales = np.where(finite, fitted_scales(x, codes), np.float32(np.nan))
        wide = x.astype(np.float64)
        rest = wide - codes * np.where(finite, scales, 0).astype(np.float64)[:, None]
        norms, losses = (np.sqrt((part * part).sum(axis=1)) for part in (wide, rest))
        norms, losses = norms * (1 + 2.0**-40), losses * (1 + (self.depth + 64) * 2.0**-52)
        return Encoded(
            ids.astype(np.uint32),
            pack_buckets(buckets, self.bits),
            scales,
            np.where(finite, norms, np.inf),
            np.where(finite, losses, np.inf),
        )


def _floats(values: Any, name: str, dimensions: int) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise UnsupportedDtype(f"{name}: dtype {array.dtype}, wanted floating-point numbers; pass {name}.astype('f4')")
    if array.ndim != dimensions:
        raise ShapeMismatch(f"{name}: shape {array.shape}, wanted {dimensions} dimension{'s' * (dimensions > 1)}")
    array = array.astype(np.float32)
    if not np.isfinite(array).all() or np.abs(array).max(initial=0) > 2.0**100:
        raise InvalidArgument(f"{name}: has a NaN, an infinity or a number past 2^100")
    array.flags.writeable = False
    return array


def fitted_scales(x: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """x . codes / codes . codes in float32, the dot summed in float64 in the order of a pair value."""
    sums = np.zeros((len(x), LANES))
    for begin in range(0, x.shape[1], LANES):
        products = x[:, begin : begin + LANES].astype(np.float64) * codes[:, begin : begin + LANES]
        sums[:, : products.shape[1]] += products
    for width in (8, 4, 2, 1):
        sums = sums[:, :width] + sums[:, width:]
    squares = (codes.astype(np.int64) ** 2).sum(axis=1)
    scales = np.divide(sums[:, 0], squares, out=np.zeros(len(x)), where=squares > 0)
    return np.where(scales < LEAST_SCALE, 0, np.minimum(scales, LARGEST_SCALE)).astype(np.float32)


def pack_buckets(buckets: np.ndarray, bits: int) -> np.ndarray:
    """Buckets [count, depth] as PLAID's bytes, padded to whole words of four elements.

    Elements follow one another from a byte's highest bit down, each with its own lowest bit first.
    """
    count, depth = buckets.shape
    padded = np.zeros((count, -(-depth // 4) * 4), np.uint8)
    padded[:, :depth] = buckets
    single = np.unpackbits(padded[:, :, None], axis=2, count=bits, bitorder="little")
    return np.packbits(single.reshape(count, -1), axis=1)


def unpack_buckets(residuals: np.ndarray, bits: int, depth: int) -> np.ndarray:
    """The reverse of `pack_buckets`."""
    single = np.unpackbits(residuals, axis=1)[:, : depth * bits]
    return np.packbits(single.reshape(len(residuals), depth, bits), axis=2, bitorder="little")[:, :, 0]


def store_encoded(target: Regions, begin: int, block: Encoded) -> None:
    """Write a block of coded tokens into a packing that was laid out for them."""
    places = np.arange(begin, begin + len(block.ids))
    tile, lane = np.divmod(places, target.header.tile_tokens)
    target.plane[tile, :, lane, 0] = block.residuals
    target.ids[places] = block.ids
    target.scale[places] = block.scales


def fill(target: Regions, codebook: Codebook, blocks: Any) -> None:
    """Fill a packing that was laid out for the tokens of all blocks, one after the other."""
    codebook.store(target.codebook)
    norms, losses = (np.empty(target.header.tokens) for _ in range(2))
    begin = 0
    for block in blocks:
        end = begin + len(block.ids)
        store_encoded(target, begin, block)
        norms[begin:end], losses[begin:end] = block.norms, block.losses
        begin = end
    summarise(target, norms, losses)


def train_codebook(x: Any, *, centroids: int, bits: int = 2, seed: int = 0) -> Codebook:
    """Train a codebook on tokens: k-means for the centroids, quantiles of the differences for the buckets.

    A sample will do: PLAID trains about ``16 sqrt(tokens)`` centroids on a few hundred tokens for each. The same tokens
    and seed give the same codebook with the same version of scikit-learn.

    Parameters
    ----------
    x : array, list of arrays or Collection
        Tokens, as `pack` takes them, in host memory.
    centroids : int
        At most the number of tokens.
    bits : {1, 2, 4, 8}
        Of an element: cutoffs are the quantiles at b / 2^bits, weights those half-way between.
    seed : int

    Returns
    -------
    Codebook

    Raises
    ------
    MissingKernel
        scikit-learn is not installed.
    InvalidArgument, ShapeMismatch, UnsupportedDtype

    Examples
    --------
    >>> tokens = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    >>> train_codebook(tokens, centroids=16)  # doctest: +SKIP
    <numkong_py.Codebook: 16 centroids x 8, 2 bits>
    """
    try:
        from sklearn.cluster import MiniBatchKMeans
    except ImportError as error:
        raise MissingKernel(
            'train_codebook needs scikit-learn: pip install "numkong_py[codebook]"; or pass the arrays of a codebook '
            "to nk.Codebook"
        ) from error
    if bits not in BITS:
        raise InvalidArgument(f"bits: {bits!r}, wanted 1, 2, 4 or 8")
    found = collection(x)
    if found.runs is None:
        raise InvalidArgument(f"x: on {found.device}; pass a copy in host memory")
    blocks = [block.astype(np.float32) for block in found.blocks(BLOCK)]
    tokens = np.concatenate([np.zeros((0, found.depth), np.float32), *blocks])
    if not 1 <= centroids <= len(tokens):
        raise InvalidArgument(f"centroids: {centroids}, wanted 1 to {len(tokens)}, the number of tokens")
    if not np.isfinite(tokens).all():
        raise InvalidArgument("x: has a NaN or an infinity; remove those tokens")
    means = MiniBatchKMeans(centroids, random_state=seed, n_init=1, batch_size=4096).fit(tokens)
    found_centroids = means.cluster_centers_.astype(np.float32)
    unbucketed = Codebook(found_centroids, np.float32([-1, 1]))
    nearest = np.concatenate([unbucketed.nearest(tokens[at : at + BLOCK]) for at in range(0, len(tokens), BLOCK)])
    differences = tokens - found_centroids[nearest]
    quantiles = np.arange(1 << bits) / (1 << bits)
    weights = np.quantile(differences, quantiles + 0.5 / (1 << bits))
    return Codebook(found_centroids, weights, np.quantile(differences, quantiles[1:]))
