"""The Chamfer distance and its gradient: arguments are read and checked here, a device's own module does the work.

Host arrays are searched by `numkong_py.cpu`. CUDA arrays go to ``numkong_py.cuda.chamfer``, whose functions are called
as ::

    chamfer(p, q, *, reduction, squared, both) -> (distances, nearest_of_p, nearest_of_q)
    chamfer_grad(p, q, upstream, *, nearest, reduction, squared, both, need, dtype) -> (p gradient, q gradient)

    p, q : Side            (`numkong_py.sides`) of equally many clouds on one device, of one dtype and depth; ``source``
                           is a Collection of device arrays or a PackedTensor of a CUDA row
    distances              float64 [clouds]
    nearest_of_p           int32 [points of p]: position, within the same cloud of q, of the nearest point (the lowest
                           of equals), -1 where that cloud is empty; nearest_of_q likewise, None without `both`
    upstream               whatever the caller gave; its shape broadcasts to [clouds]
    nearest                None, or the pair that `chamfer` returned
    reduction : str        "sum" or "mean"; squared, both : bool
    need : (bool, bool)    which gradients are wanted; the other one is returned as None
    dtype : str            of both gradients: "f32", or the input's short name; laid out as ``Side.shape`` and
                           ``Side.places`` say
"""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .arrays import read_indices, read_numbers
from .dtypes import NUMPY_DTYPES
from .errors import IndexOutOfRange, InvalidArgument, ShapeMismatch
from .neighbours import nearest as search
from .ops import REDUCTIONS, read_pair
from .reference import rounded
from .sides import Side, read_grad_dtype, read_need, read_upstream, shape_of, side_of

__all__ = ["ChamferResult", "chamfer", "chamfer_grad"]


class ChamferResult(NamedTuple):
    """Distances, and for every point its nearest neighbour's position in the same cloud of the other side.

    Attributes
    ----------
    distances : array
        float64 ``[clouds]``, or a number for two 2-D arrays.
    nearest_of_p, nearest_of_q : arrays
        int32 ``[points]``, -1 where the other cloud is empty; the second is None without `both`.
    """

    distances: Any
    nearest_of_p: Any
    nearest_of_q: Any


def chamfer(
    p: Any,
    q: Any,
    *,
    reduction: str = "mean",
    squared: bool = True,
    both: bool = True,
    return_nearest: bool = False,
    threads: int | None = None,
) -> Any:
    """Chamfer distance between point clouds: how far every point is from the nearest one of the other cloud.

    ``sum_i min_j |p_i - q_j|^2 + sum_j min_i |p_i - q_j|^2`` (Fan, Su and Guibas, CVPR 2017, equation 2), each sum
    divided by its count for ``"mean"``. Distances are sums of squared differences in float64, so clouds far from the
    origin lose nothing.

    Parameters
    ----------
    p, q : array, list of arrays, Collection or PackedTensor
        One cloud ``[points, depth]`` each, or equally many clouds; bf16, f16 or f32, any depth.
    reduction : {"mean", "sum"}
    squared : bool
        False takes plain distances.
    both : bool
        False leaves out the distances from the points of `q`.
    return_nearest : bool
        Ask for a `ChamferResult`, whose neighbours spare `chamfer_grad` the search.
    threads : int, optional
        Threads to use; the bits do not depend on it.

    Returns
    -------
    float64, array or ChamferResult
        A number for two 2-D arrays, else ``[clouds]``. An empty cloud is 0 from its own points and +inf from the points
        of another.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, DeviceMismatch, LayoutMismatch, InvalidArgument, BackendUnavailable

    Examples
    --------
    >>> float(chamfer(np.float32([[0, 0], [1, 0]]), np.float32([[0, 1]])))
    2.5
    """
    p, q = _clouds(p, q, reduction)
    options = {"reduction": reduction, "squared": bool(squared), "both": bool(both)}
    if p.device != "cpu":
        found = import_module(".cuda.chamfer", __package__).chamfer(p, q, **options)
    else:
        found = _on_host(p, q, threads, **options)
    distances = found[0][0] if p.single and q.single else found[0]
    return ChamferResult(distances, *found[1:]) if return_nearest else distances


def chamfer_grad(
    p: Any,
    q: Any,
    upstream: Any = 1.0,
    *,
    nearest: Any = None,
    reduction: str = "mean",
    squared: bool = True,
    both: bool = True,
    need: Any = ("p", "q"),
    grad_dtype: Any = None,
    threads: int | None = None,
) -> tuple[Any, Any]:
    """Differentiate `chamfer` at the nearest neighbours.

    A pair of neighbours pulls both its points: ``2 (p_i - q_j)``, or the unit vector for plain distances (0 where the
    points coincide). Sums are taken in float64 in a fixed order and rounded once.

    Parameters
    ----------
    p, q, reduction, squared, both, threads
        As for `chamfer`.
    upstream : array or number
        Derivative of the loss by the distances; broadcasts to ``[clouds]``.
    nearest : tuple of int arrays, optional
        ``(nearest_of_p, nearest_of_q)`` of the forward: spares the search.
    need : tuple of str
        ``("p", "q")``, or only the side whose gradient is wanted; the other one is None.
    grad_dtype : dtype, optional
        float32 (the default) or the type of the points.

    Returns
    -------
    p_gradient, q_gradient : arrays
        Shaped as the input for one 2-D array and for padded ones, else one ``[points, depth]`` array. Clouds without
        points, and those whose upstream is exactly 0, add nothing.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, DeviceMismatch, LayoutMismatch, InvalidArgument, BackendUnavailable
    IndexOutOfRange
        `nearest` names a point that does not exist.

    Examples
    --------
    >>> chamfer_grad(np.float32([[0, 0]]), np.float32([[0, 1]]))
    (array([[ 0., -4.]], dtype=float32), array([[0., 4.]], dtype=float32))
    """
    p, q = _clouds(p, q, reduction)
    upstream = read_upstream(upstream, (len(p),), "distances")
    options = {"reduction": reduction, "squared": bool(squared), "both": bool(both)}
    options |= {"need": read_need(need, ("p", "q")), "dtype": read_grad_dtype(grad_dtype, p.dtype)}
    nearest = _read_nearest(nearest, p, q, options["both"])
    if p.device != "cpu":
        return import_module(".cuda.chamfer", __package__).chamfer_grad(p, q, upstream, nearest=nearest, **options)
    return _gradients_on_host(p, q, upstream, nearest, threads, **options)


# ------------------------------------------------------------------------------------- arguments


def _clouds(p: Any, q: Any, reduction: str) -> tuple[Side, Side]:
    if reduction not in REDUCTIONS:
        raise InvalidArgument(f"reduction: {reduction!r}, wanted one of {', '.join(REDUCTIONS)}")
    first, second = (side_of(side) for side in read_pair(p, q, ("p", "q")))
    for name, side in (("p", first), ("q", second)):
        if side.packed and side.source.precision != "exact":
            raise InvalidArgument(
                f"{name}: packed with precision {side.source.precision!r}, and distances are between exact points; "
                f"pass the points, or what {name}.unpack() gives"
            )
    if len(first) != len(second):
        raise ShapeMismatch(f"p: {len(first)} clouds, and q: {len(second)} clouds; wanted as many")
    return first, second


def _read_nearest(nearest: Any, p: Side, q: Side, both: bool) -> Any:
    """The neighbours as they were given, checked in shape, and in host memory in value."""
    if nearest is None:
        return None
    wanted = ((int(p.offsets[-1]),), (int(q.offsets[-1]),))[: 2 if both else 1]
    given = tuple(nearest)[: len(wanted)]
    found = tuple(shape_of(array) for array in given)
    if found != wanted:
        raise ShapeMismatch(
            f"nearest: shapes {found}, wanted {wanted}; pass (r.nearest_of_p, r.nearest_of_q) of "
            "r = nk.chamfer(..., return_nearest=True)"
        )
    if p.device != "cpu":
        return given
    checked = []
    for name, array, points, others in zip("pq", given, (p, q), (q, p)):
        indices = read_indices(array, f"nearest_of_{name}")
        if (indices >= np.repeat(np.diff(others.offsets), np.diff(points.offsets))).any():
            raise IndexOutOfRange(f"nearest_of_{name}: names a point past the end of its cloud")
        checked.append(indices)
    return tuple(checked)


# ------------------------------------------------------------------------------------- in host memory


def _on_host(p: Side, q: Side, threads: int | None, *, reduction: str, squared: bool, both: bool) -> tuple[Any, ...]:
    distances = np.zeros(len(p))
    found = []
    for points, others in ((p, q), (q, p))[: 2 if both else 1]:
        nearest, squares = search(points, others, threads)
        found.append(nearest)
        distances += _reduce(squares if squared else np.sqrt(squares), points.offsets, reduction)
    return (distances, *found, None)[:3]


def _reduce(values: np.ndarray, offsets: np.ndarray, reduction: str) -> np.ndarray:
    """Sums of sets in ascending order, or their means; 0 for a set without values."""
    sums = np.zeros(len(offsets) - 1)
    with np.errstate(all="ignore"):
        for index, (begin, end) in enumerate(pairwise(offsets.tolist())):
            if begin < end:
                sums[index] = np.add.accumulate(values[begin:end])[-1]
        return sums / np.maximum(np.diff(offsets), 1) if REDUCTIONS[reduction] else sums


def _gradients_on_host(
    p: Side,
    q: Side,
    upstream: Any,
    nearest: Any,
    threads: int | None,
    *,
    reduction: str,
    squared: bool,
    both: bool,
    need: tuple[bool, bool],
    dtype: str,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    upstream = np.broadcast_to(read_numbers(upstream, "upstream"), (len(p),))
    sums = [np.zeros((int(side.offsets[-1]), side.depth)) if wanted else None for side, wanted in zip((p, q), need)]
    for index, (points, others) in enumerate(((p, q), (q, p))[: 2 if both else 1]):
        found = search(points, others, threads)[0] if nearest is None else nearest[index]
        steps, partners = _pulls(points, others, found, upstream, reduction, squared)
        if sums[index] is not None:
            sums[index] += steps
        if sums[1 - index] is not None:
            _subtract_at(sums[1 - index], partners, steps)
    gradients = [None if total is None else _laid_out(total, side, dtype) for side, total in zip((p, q), sums)]
    return gradients[0], gradients[1]


def _pulls(
    points: Side, others: Side, nearest: np.ndarray, upstream: np.ndarray, reduction: str, squared: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Derivative by every point of its own distance, float64 [points, depth], and the number of the other point.

    The number is -1, and the derivative 0, where there is none or where the upstream is exactly 0.
    """
    counts = np.diff(points.offsets)
    weights = np.repeat(upstream / np.maximum(counts, 1) if REDUCTIONS[reduction] else upstream, counts)
    silent = (nearest < 0) | (np.repeat(upstream, counts) == 0)
    partners = np.where(silent, -1, nearest + np.repeat(others.offsets[:-1], counts))
    if silent.all():
        return np.zeros(points.tokens.shape), partners
    with np.errstate(all="ignore"):
        steps = points.tokens.astype(np.float64) - others.tokens[partners].astype(np.float64)
        if squared:
            weights = 2.0 * weights
        else:
            lengths = np.sqrt((steps * steps).sum(axis=1))
            weights = np.divide(weights, lengths, out=np.zeros_like(weights), where=lengths != 0)
        steps *= weights[:, None]
    steps[silent] = 0.0
    return steps, partners


def _subtract_at(sums: np.ndarray, rows: np.ndarray, steps: np.ndarray) -> None:
    """sums[rows] -= steps, rows in ascending order of the steps; a row of -1 is none."""
    counted = rows >= 0
    for k in range(sums.shape[1]):
        sums[:, k] -= np.bincount(rows[counted], steps[counted, k], len(sums))


def _laid_out(total: np.ndarray, side: Side, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        rows = rounded(total, NUMPY_DTYPES[dtype])
    gradient = side.empty_gradient(NUMPY_DTYPES[dtype])
    gradient.reshape(-1, side.depth)[slice(None) if side.places is None else side.places] = rows
    return gradient
