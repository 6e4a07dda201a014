"""Nearest neighbours in host memory: differences in C, or SciPy's k-d tree where it looks at far fewer pairs.

Both give the same bits. A tree orders points by its own rounding of their distances, so it only proposes: a neighbour
counts when the next one is farther by more than any rounding, and is otherwise chosen among more proposals, in the end
among all points, by the exact values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np

from .arrays import read_collection
from .backends import select
from .reference import squares_of
from .sides import Side, side_of
from .threads import usable_cpus

__all__ = ["nearest"]

# Seconds of cKDTree over those of the AVX2 differences, both directions, one thread of an AMD Zen 3, uniform points:
# 1,000 points 0.6 at depth 3, 1.2 at 6, 1.8 at 8, 4.9 at 16; 16,384 points 0.4 at 3, 0.9 at 6, 1.6 at 8, 8.7 at 12.
# Points on a surface of dimension 2 stay at 0.2 to 0.5 in any depth. So up to this depth the tree is taken, and in
# larger ones a sample of points is looked up both ways first.
TREE_DEPTH = 6
TREE_POINTS = 1024  # of an average cloud; for smaller ones both take less than making the tree and its calls
PROBE_POINTS = 4096  # of an average cloud: below, the differences are over before a probe pays
PROBE = 64  # points looked up both ways
TREE_OVERHEAD = 2  # making a tree and checking what it proposes took about as long as asking it
PROPOSALS = (2, 8, 64)
SURE = 1 + 2.0**-40  # farther than this times the nearest: no rounding of up to 2^12 terms makes it the nearest
BLOCK = 1 << 14  # points whose exact values are taken together: 16 f64 lanes each


def nearest(points: Side, others: Side, threads: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Nearest of the others in the cloud of the same number, for every point.

    Parameters
    ----------
    points, others : Side
        As many clouds, of one type and depth.

    Returns
    -------
    positions, squares : arrays
        int32 ``[points]``, within the other cloud, the lowest of equals and the lowest NaN first, -1 in an empty one;
        float64 squared distances, in the order of `numkong_py.reference.chamfer`.
    """
    row = next((side.source.row for side in (points, others) if side.packed), None) or select(points.dtype)
    if not _tree_is_faster(row, points, others):
        return row.nearest(points, others, threads)
    positions, squares = np.full(len(points.tokens), -1, np.int32), np.full(len(points.tokens), np.inf)
    edges = zip(pairwise(points.offsets.tolist()), pairwise(others.offsets.tolist()))
    for (begin, end), (first, last) in edges:
        if begin < end and first < last:
            found = _by_tree(row, points.tokens[begin:end], others.tokens[first:last], threads)
            positions[begin:end], squares[begin:end] = found
    return positions, squares


# ------------------------------------------------------------------------------------- which way


def _tree_is_faster(row: Any, points: Side, others: Side) -> bool:
    smaller = min(len(points.tokens), len(others.tokens)) / max(1, len(points))
    if smaller < (TREE_POINTS if points.depth <= TREE_DEPTH else PROBE_POINTS) or find_spec("scipy") is None:
        return False
    if not all(np.isfinite(side.tokens).all() for side in (points, others)):
        return False  # a tree refuses them
    return points.depth <= TREE_DEPTH or _probe(row, points, others)


def _probe(row: Any, points: Side, others: Side) -> bool:
    """Look a few points of the largest cloud up both ways, in processor time: the machine may be busy otherwise."""
    cloud = int(np.argmax(np.diff(points.offsets) * np.diff(others.offsets)))
    tokens = points.tokens[points.offsets[cloud] : points.offsets[cloud + 1]]
    sample = np.ascontiguousarray(tokens[:: -(-len(tokens) // PROBE)])
    corpus = others.tokens[others.offsets[cloud] : others.offsets[cloud + 1]]
    tree = _tree(corpus, balanced_tree=False, compact_nodes=False)  # made in a fraction of the time, nearly as fast
    begun = time.thread_time()
    tree.query(sample.astype(np.float64), k=PROPOSALS[0])
    turn = time.thread_time()
    row.nearest(_side(sample), _side(corpus), 1)
    return TREE_OVERHEAD * (turn - begun) < time.thread_time() - turn


# ------------------------------------------------------------------------------------- the tree


def _tree(others: np.ndarray, **options: Any) -> Any:
    from scipy.spatial import cKDTree

    return cKDTree(others.astype(np.float64), **options)


def _side(tokens: np.ndarray) -> Side:
    return side_of(read_collection(tokens, "points"))


def _by_tree(row: Any, points: np.ndarray, others: np.ndarray, threads: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours in one cloud; both sides have points."""
    tree, workers = _tree(others), threads or usable_cpus()
    positions, squares = np.empty(len(points), np.int32), np.empty(len(points))
    left = np.arange(len(points))
    for proposals in PROPOSALS:
        if not len(left):
            return positions, squares
        open_points = []
        for block in _blocks(left, max(1, BLOCK // proposals)):
            distances, proposed = tree.query(points[block].astype(np.float64), k=proposals, workers=workers)
            sure = distances[:, -1] > distances[:, 0] * SURE  # an infinite distance: there are no more points
            chosen = _choose(points[block[sure]], others, np.sort(proposed[sure, :-1], axis=1))  # the last is farther
            positions[block[sure]], squares[block[sure]] = chosen
            open_points.append(block[~sure])
        left = np.concatenate(open_points)
    if len(left):
        positions[left], squares[left] = row.nearest(_side(points[left]), _side(others), threads)
    return positions, squares


def _blocks(indices: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (indices[start : start + size] for start in range(0, len(indices), size))


def _choose(points: np.ndarray, others: np.ndarray, proposed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The proposal of the smallest exact value, the lowest of equals; proposals ascend, [points, count]."""
    none = proposed == len(others)
    differences = points.astype(np.float64)[:, None, :] - others[np.where(none, 0, proposed)].astype(np.float64)
    values = squares_of(differences.reshape(-1, points.shape[1])).reshape(proposed.shape)
    values[none] = np.inf
    best = np.argmin(values, axis=1)[:, None]
    return np.take_along_axis(proposed, best, axis=1)[:, 0], np.take_along_axis(values, best, axis=1)[:, 0]
