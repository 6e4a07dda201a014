"""Backward passes of MaxSim: arguments are read and checked here, and a device's own module does the work.

Host arrays go to `numkong_py.cpu`. CUDA arrays go to ``numkong_py.cuda.gradient.maxsim_grad``, which is called as ::

    maxsim_grad(queries, documents, upstream, *, shape, argmax, candidates, metric, reduction, need, dtype)

    queries, documents : Side    (`numkong_py.sides`) on one device, of one dtype and depth. ``source`` is a Collection
                                 of device arrays (to be viewed by ``cuda.collection.pack(copy=False)``) or a
                                 PackedTensor of a CUDA row (``source.pointer`` is its CudaCollection, sets ``begin`` ..
                                 ``end``); ``offsets``, ``shape`` and ``places`` lie in host memory
    upstream                     whatever the caller gave: a number, a host or a device array; its shape broadcasts to
    shape : tuple                the scores' as the caller sees them: [queries, slots], [slots] for one 2-D query,
                                 [queries] for pairs. Reshaped to (len(queries), slots) it is the kernels' order
    argmax : array or None       the forward's, int32 ``[*shape, longest query]``, checked in shape only: values out of
                                 range count as none. None: the function runs the forward itself
    candidates : array or None   None: all pairs, slots are documents. Else integers [len(queries), slots] in host or
                                 device memory: document of each slot, counted from the first of `documents`; anything
                                 negative or too large is none. Pairs arrive as ``arange(len(queries))[:, None]``
    metric, reduction : str      "dot", "cosine" or "angular"; "sum" or "mean"
    need : (bool, bool)          whether the queries' and whether the documents' gradient is wanted
    dtype : str                  of both gradients: "f32", or the input's short name

and returns (query gradient or None, document gradient or None): arrays of the sides' ``shape`` in that dtype (bf16 as
the CUDA rows hand it out), every row that ``places`` does not name +0. It neither waits for the device nor checks
values.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from .arrays import collection, read_indices, read_numbers
from .backends import select
from .cpu import METRICS, PAST_THE_END
from .errors import IndexOutOfRange, InvalidArgument, ShapeMismatch
from .ops import REDUCTIONS, pack_pair, read_pair
from .packed import PackedTensor
from .sides import Side, read_grad_dtype, read_need, read_upstream, shape_of, side_of

__all__ = ["maxsim_candidates_grad", "maxsim_grad", "maxsim_pairs_grad"]


def maxsim_grad(
    q: Any,
    docs: Any,
    upstream: Any,
    *,
    argmax: Any = None,
    metric: str = "dot",
    reduction: str = "sum",
    need: Any = ("queries", "documents"),
    grad_dtype: Any = None,
    threads: int | None = None,
) -> tuple[Any, Any]:
    """Differentiate the scores of `maxsim` at the best tokens.

    ``dQ_i = sum_b g_b d_b,j*`` and ``dD_j = sum g q_i`` over the query tokens whose best token is j, accumulated in
    float64 in ascending order and rounded once, so the bits depend neither on threads nor on what else is in the call.
    The lowest token of a tie gets all of the gradient. Cosine and angular differentiate the normalisation (a zero
    vector gets 0). Masked tokens, empty sets and scores whose upstream is exactly 0 get or give 0, never NaN.

    Parameters
    ----------
    q, docs : array, list of arrays, Collection or PackedTensor
        As for `maxsim`. Of documents packed with another precision than exact, the winners alone are decoded, and only
        ``need="queries"`` can be had.
    upstream : array or number
        Derivative of the loss by the scores; any shape that broadcasts to theirs.
    argmax : int array, optional
        Of the forward, ``[*scores, longest query]``: spares scoring once more.
    metric, reduction, threads
        As for `maxsim`.
    need : tuple of str
        ``("queries", "documents")``, or only the side whose gradient is wanted; the other one is None.
    grad_dtype : dtype, optional
        float32 (the default) or the type of the tokens.

    Returns
    -------
    query_gradient, document_gradient : arrays
        Shaped as the input for one 2-D array and for padded ones, else (lists, offsets, packed) one
        ``[tokens, depth]`` array.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, DeviceMismatch, LayoutMismatch, InvalidArgument, BackendUnavailable
    IndexOutOfRange
        The argmax names a token that does not exist.

    Examples
    --------
    >>> query = np.float32([[1, 0], [0, 1]])
    >>> query_gradient, document_gradient = maxsim_grad(query, [np.float32([[2, 0], [0, 3]])], 10)
    >>> query_gradient
    array([[20.,  0.],
           [ 0., 30.]], dtype=float32)
    """
    queries, documents = _sides(q, docs)
    shape = (len(documents),) if queries.single else (len(queries), len(documents))
    options = {"metric": metric, "reduction": reduction, "need": need, "grad_dtype": grad_dtype, "threads": threads}
    return _gradients(queries, documents, upstream, shape, argmax, None, **options)


def maxsim_pairs_grad(q: Any, docs: Any, upstream: Any, **options: Any) -> tuple[Any, Any]:
    """Differentiate the scores of `maxsim_pairs`; options and results as for `maxsim_grad`.

    Parameters
    ----------
    q, docs : list of arrays, array, Collection or PackedTensor
        As many queries as documents.
    upstream : array or number
        Broadcasts to ``[count]``.

    Examples
    --------
    >>> queries, documents = np.float32([[[1, 0]], [[0, 1]]]), np.float32([[[2, 3]], [[4, 5]]])
    >>> maxsim_pairs_grad(queries, documents, [1, 2])[0]
    array([[[ 2.,  3.]],
           [[ 8., 10.]]], dtype=float32)
    """
    queries, documents = _sides(q, docs)
    if len(queries) != len(documents):
        raise ShapeMismatch(f"q: {len(queries)} queries, and docs: {len(documents)} documents; wanted as many")
    candidates = np.arange(len(queries))[:, None]
    return _gradients(queries, documents, upstream, (len(queries),), candidates=candidates, **options)


def maxsim_candidates_grad(q: Any, docs: Any, candidates: Any, upstream: Any, **options: Any) -> tuple[Any, Any]:
    """Differentiate the scores of `maxsim_candidates`; options and results as for `maxsim_grad`.

    Parameters
    ----------
    q, docs : list of arrays, array, Collection or PackedTensor
    candidates : int array
        ``[queries, count]`` (``[count]`` for one query), -1 for none; a document may be named more than once.
    upstream : array or number
        Broadcasts to the candidates' shape.

    Raises
    ------
    IndexOutOfRange
        Others as for `maxsim_grad`.

    Examples
    --------
    >>> query, documents = np.float32([[1, 0]]), [np.float32([[2, 3]]), np.float32([[4, 5]])]
    >>> maxsim_candidates_grad(query, documents, [1, -1, 1], [1, 2, 3])
    (array([[16., 20.]], dtype=float32), array([[0., 0.],
           [4., 0.]], dtype=float32))
    """
    queries, documents = _sides(q, docs)
    found = shape_of(candidates)
    if len(found) == 1 and len(queries) == 1:
        found = (1, *found)
    if len(found) != 2 or found[0] != len(queries):
        raise ShapeMismatch(f"candidates: shape {found}, wanted [{len(queries)}, count], one row for every query set")
    shape = found[1:] if queries.single else found
    return _gradients(queries, documents, upstream, shape, candidates=candidates, **options)


# ------------------------------------------------------------------------------------- one way to go back


def _sides(q: Any, docs: Any) -> tuple[Side, Side]:
    """Read both sides."""
    queries, documents = read_pair(q, docs)
    if _is_coded(queries):
        raise InvalidArgument(
            f"q: packed with precision {queries.precision!r}, and codes have no gradient; pass the arrays, or pack "
            'them with precision="exact"'
        )
    return side_of(queries), side_of(documents)


def _is_coded(source: Any) -> bool:
    return isinstance(source, PackedTensor) and source.precision != "exact"


def _gradients(
    queries: Side,
    documents: Side,
    upstream: Any,
    shape: tuple[int, ...],
    argmax: Any = None,
    candidates: Any = None,
    *,
    metric: str = "dot",
    reduction: str = "sum",
    need: Any = ("queries", "documents"),
    grad_dtype: Any = None,
    threads: int | None = None,
) -> tuple[Any, Any]:
    """Check what is left to check, and call the device's module."""
    if metric not in METRICS:
        raise InvalidArgument(f"metric: {metric!r}, wanted one of {', '.join(METRICS)}")
    if reduction not in REDUCTIONS:
        raise InvalidArgument(f"reduction: {reduction!r}, wanted one of {', '.join(REDUCTIONS)}")
    upstream = read_upstream(upstream, shape)
    wanted = (*shape, queries.longest)
    if argmax is not None and shape_of(argmax) != wanted:
        raise ShapeMismatch(
            f"argmax: shape {shape_of(argmax)}, wanted {wanted}; pass what the same call of maxsim returned"
        )
    options = {"metric": metric, "reduction": reduction, "need": read_need(need, ("queries", "documents"))}
    coded = _is_coded(documents.source)
    if coded and options["need"][1]:
        raise InvalidArgument(
            f"docs: packed with precision {documents.source.precision!r}, and codes have no gradient; pass "
            'need="queries", or the arrays as docs'
        )
    options["dtype"] = read_grad_dtype(grad_dtype, "f32" if coded else documents.dtype)
    if documents.device != "cpu":
        device = import_module(".cuda.gradient", __package__)
        return device.maxsim_grad(
            queries, documents, upstream, shape=shape, argmax=argmax, candidates=candidates, **options
        )
    return _on_host(queries, documents, upstream, shape, argmax, candidates, threads, **options)


def _on_host(
    queries: Side,
    documents: Side,
    upstream: Any,
    shape: tuple[int, ...],
    argmax: Any,
    candidates: Any,
    threads: int | None,
    *,
    metric: str,
    reduction: str,
    need: tuple[bool, bool],
    dtype: str,
) -> tuple[np.ndarray | None, np.ndarray | None]:
    row = next((side.source.row for side in (documents, queries) if side.packed), None) or select(documents.dtype)
    if candidates is not None:
        candidates = row.read_candidates(candidates, len(queries), documents)
    slots = len(documents) if candidates is None else candidates.shape[1]
    options = {"candidates": candidates, "metric": METRICS[metric], "threads": threads}
    upstream = np.broadcast_to(read_numbers(upstream, "upstream"), shape)
    upstream = upstream[:, None] if len(shape) == 1 and not queries.single else upstream.reshape(len(queries), slots)
    if argmax is None:
        queries, documents, argmax = _forward(queries, documents, **options)
    argmax = _read_argmax(argmax).reshape(len(queries), slots, queries.longest)
    if _is_coded(documents.source):
        documents, argmax = _decode_winners(queries, documents, argmax, candidates)
        queries = replace(queries, widened=True)
    options |= {"mean": REDUCTIONS[reduction], "dtype": dtype}
    gradients = [
        row.gradient(queries, documents, upstream, argmax, of_documents=of_documents, **options) if wanted else None
        for of_documents, wanted in zip((False, True), need)
    ]
    return gradients[0], gradients[1]


def _forward(
    queries: Side, documents: Side, *, candidates: np.ndarray | None, metric: int, threads: int | None
) -> tuple[Side, Side, np.ndarray]:
    """The winners; and the sides packed, which spares another copy of tokens that do not lie side by side."""
    packed = pack_pair(queries.source, documents.source)
    if candidates is not None:
        candidates = packed[1].row.read_candidates(candidates, len(queries), packed[1])
    result = packed[1].row.score(*packed, candidates=candidates, metric=metric, threads=threads, return_argmax=True)
    return replace(queries, source=packed[0]), replace(documents, source=packed[1]), result.argmax


def _decode_winners(
    queries: Side, documents: Side, argmax: np.ndarray, candidates: np.ndarray | None
) -> tuple[Side, np.ndarray]:
    """Coded documents of which only the winners are left, decoded; and the argmax within them."""
    columns = np.arange(len(documents))[None, :] if candidates is None else candidates
    number = np.broadcast_to(columns[:, :, None], argmax.shape)
    within = np.arange(queries.longest) < np.diff(queries.offsets)[:, None, None]
    won = (argmax >= 0) & (number >= 0) & within
    number, winner = number[won], argmax[won].astype(np.int64)
    if (winner >= np.diff(documents.offsets)[number]).any():
        raise IndexOutOfRange(PAST_THE_END)
    tokens, places = np.unique(documents.offsets[number] + winner, return_inverse=True)
    offsets = np.searchsorted(tokens, documents.offsets)
    among = np.full(argmax.shape, -1, np.int32)
    among[won] = places - offsets[number]
    packed = documents.source
    first = packed.contents.offsets[packed.begin]
    decoded = collection(packed.row.decode(packed.contents, first + tokens), offsets=offsets)
    return side_of(decoded), among


def _read_argmax(argmax: Any) -> np.ndarray:
    """Contiguous int32; what does not fit stays out of range."""
    if isinstance(argmax, np.ndarray) and argmax.dtype == np.int32:
        return np.ascontiguousarray(argmax)
    return np.clip(read_indices(argmax, "argmax"), -1, np.iinfo(np.int32).max).astype(np.int32)
