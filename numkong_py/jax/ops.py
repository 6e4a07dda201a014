"""The public functions: arrays of any layout in, scores out."""

from __future__ import annotations

import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cpu import METRICS
from ..errors import InvalidArgument, ShapeMismatch, UnsupportedDtype
from ..reference import MaxSimResult
from .primitives import score
from .sides import Side, read_side

__all__ = ["maxsim", "maxsim_candidates", "maxsim_pairs", "topk"]

REDUCTIONS = {"sum": False, "mean": True}


def _check_pair(queries: Side, documents: Side) -> None:
    for name, error in (("dtype", UnsupportedDtype), ("depth", ShapeMismatch)):
        found, other = getattr(queries.facts, name), getattr(documents.facts, name)
        if found != other:
            raise error(f"q: {name} {found}, and docs: {name} {other}; wanted one {name}; convert one of them")


def _layouts(
    q_mask: Any = None,
    docs_mask: Any = None,
    *,
    q_lengths: Any = None,
    docs_lengths: Any = None,
    q_offsets: Any = None,
    docs_offsets: Any = None,
    q_longest: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What belongs to the queries and what to the documents, as `read_side` takes it."""
    queries = {"mask": q_mask, "lengths": q_lengths, "offsets": q_offsets, "longest": q_longest}
    return queries, {"mask": docs_mask, "lengths": docs_lengths, "offsets": docs_offsets}


LAYOUT_OPTIONS = tuple(inspect.signature(_layouts).parameters)


def _read_both(q: Any, docs: Any, options: dict[str, Any]) -> tuple[Side, Side]:
    """Both sides, and the options of their layouts taken out of `options`."""
    of_queries, of_documents = _layouts(**{name: options.pop(name) for name in LAYOUT_OPTIONS if name in options})
    queries, documents = read_side(q, "q", **of_queries), read_side(docs, "docs", **of_documents)
    _check_pair(queries, documents)
    return queries, documents


def _score(
    queries: Side,
    documents: Side,
    candidates: Any,
    axis: int | None,
    *,
    metric: str = "dot",
    reduction: str = "sum",
    empty: float | None = None,
    return_argmax: bool = False,
    return_token_scores: bool = False,
    return_bounds: bool = False,
) -> Any:
    """Score with the options of `maxsim`, and drop an axis of length one from the results."""
    for name, value, known in (("metric", metric, METRICS), ("reduction", reduction, REDUCTIONS)):
        if value not in known:
            raise InvalidArgument(f"{name}: {value!r}, wanted one of {', '.join(known)}")
    wanted = {"argmax": return_argmax, "token_scores": return_token_scores, "bounds": return_bounds}
    outputs = tuple(name for name, asked in wanted.items() if asked)
    results = score(
        queries,
        documents,
        candidates,
        metric=metric,
        mean=REDUCTIONS[reduction],
        empty=None if empty is None else float(empty),
        outputs=outputs,
    )
    if axis is not None:
        results = [jnp.squeeze(result, axis) for result in results]
    if not outputs:
        return results[0]
    found = dict(zip(outputs, results[1:]))
    return MaxSimResult(results[0], *(found.get(name) for name in wanted))


def maxsim(q: Any, docs: Any, q_mask: Any = None, docs_mask: Any = None, **options: Any) -> Any:
    """Score every query against every document: the sum over query tokens of the best similarity.

    ``score = sum_i max_j <q_i, d_j>`` (Khattab and Zaharia, ColBERT, SIGIR 2020, equation 3), as a primitive of JAX: it
    works under `jax.jit`, `jax.grad`, `jax.vmap` and ``shard_map``. The derivative is that at the forward's winners
    (the lowest of equal ones), which are all that is kept for the backward pass.

    Parameters
    ----------
    q : array, list of arrays, Collection, PackedTensor or Packed
        ``[tokens, depth]`` is one query; ``[queries, longest, depth]``, or ``[total, depth]`` with `q_offsets`, many.
    docs : array, list of arrays, Collection, PackedTensor or Packed
        The same; one 2-D array is a collection of one document. A packed side has no gradient.
    q_mask, docs_mask : bool array, optional
        ``[sets, longest]`` (``[tokens]`` for one set): true where a token is valid, holes allowed.
    q_lengths, docs_lengths : int array, optional
        ``[sets]``: only the first tokens of every set are valid.
    q_offsets, docs_offsets : int array, optional
        ``[sets + 1]``, from 0: set b is rows offsets[b] .. offsets[b + 1]. Rows past the last offset belong to nobody.
    q_longest : int, optional
        Most tokens of a query where traced `q_offsets` do not tell; smaller is less memory for the argmax.
    metric : {"dot", "cosine", "angular"}
    reduction : {"sum", "mean"}
    empty : float, optional
        Score of a document without tokens; default -inf, for angular +inf.
    return_argmax, return_token_scores, return_bounds : bool
        Ask for a `MaxSimResult`. Only the scores have a derivative: with token scores or bounds, differentiation is
        refused.

    Returns
    -------
    array or MaxSimResult
        Scores ``[queries, documents]``, ``[documents]`` for one 2-D query: float32, or float64 for float32 tokens where
        ``jax_enable_x64`` is on. An empty query scores 0; a NaN makes that query's or that document's scores NaN.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, InvalidArgument
        For what is known when tracing. Values (lengths, offsets, candidates out of range) raise JAX's runtime error.

    Examples
    --------
    >>> documents = jnp.asarray([[[2.0, 0.0], [0.0, 3.0]], [[1.0, 1.0], [9.0, 9.0]]])
    >>> loss = lambda q: maxsim(q, documents, docs_lengths=jnp.asarray([2, 1])).sum()
    >>> [x.tolist() for x in jax.value_and_grad(loss)(jnp.eye(2))]
    [7.0, [[3.0, 1.0], [1.0, 4.0]]]
    """
    queries, documents = _read_both(q, docs, options := {"q_mask": q_mask, "docs_mask": docs_mask, **options})
    return _score(queries, documents, None, 0 if queries.single else None, **options)


def maxsim_pairs(q: Any, docs: Any, q_mask: Any = None, docs_mask: Any = None, **options: Any) -> Any:
    """Score the i-th query against the i-th document.

    Parameters
    ----------
    q, docs, q_mask, docs_mask, **options
        As for `maxsim`; as many queries as documents. Results lose the query axis.

    Raises
    ------
    ShapeMismatch
        The counts differ. Others as for `maxsim`.

    Examples
    --------
    >>> maxsim_pairs(jnp.asarray([[[1.0, 0.0]], [[0.0, 1.0]]]), jnp.asarray([[[2.0, 3.0]], [[4.0, 5.0]]])).tolist()
    [2.0, 5.0]
    """
    queries, documents = _read_both(q, docs, options := {"q_mask": q_mask, "docs_mask": docs_mask, **options})
    if queries.sets != documents.sets:
        raise ShapeMismatch(f"q: {queries.sets} queries, and docs: {documents.sets} documents; wanted as many")
    if {queries.facts.layout, documents.facts.layout} & {"spans", "packed"}:
        return _score(queries, documents, jnp.arange(queries.sets, dtype=np.int32)[:, None], 1, **options)

    def one(q: Any, q_valid: Any, docs: Any, docs_valid: Any) -> Any:
        return _score(_set_of(queries, q, q_valid), _set_of(documents, docs, docs_valid), None, None, **options)

    results = jax.vmap(one)(queries.tokens, queries.valid, documents.tokens, documents.valid)
    return jax.tree.map(lambda x: jnp.squeeze(x, (1, 2)), results)


def _set_of(side: Side, tokens: Any, valid: Any) -> Side:
    """A side of one of its sets."""
    return side._replace(tokens=tokens[None], valid=None if valid is None else valid[None])


def _read_candidates(candidates: Any, queries: Side) -> jax.Array:
    candidates = jnp.asarray(candidates)
    if not jnp.issubdtype(candidates.dtype, jnp.integer):
        raise UnsupportedDtype(f"candidates: dtype {candidates.dtype}; wanted integers")
    if candidates.ndim == 1 and queries.sets == 1:
        candidates = candidates[None]
    if candidates.ndim != 2 or len(candidates) != queries.sets:
        raise ShapeMismatch(f"candidates: shape {candidates.shape}, wanted [{queries.sets}, count]")
    return candidates if candidates.dtype in (jnp.int32, jnp.int64) else candidates.astype(jnp.int32)


def maxsim_candidates(
    q: Any, docs: Any, candidates: Any, q_mask: Any = None, docs_mask: Any = None, **options: Any
) -> Any:
    """Score every query against its own list of documents, as in reranking and distillation.

    Parameters
    ----------
    q, docs, q_mask, docs_mask, **options
        As for `maxsim`.
    candidates : int array
        ``[queries, count]`` indices of documents (``[count]`` for one query); -1 is none and scores like an empty
        document.

    Returns
    -------
    array or MaxSimResult
        Scores ``[queries, count]``, ``[count]`` for one 2-D query.

    Raises
    ------
    ShapeMismatch, UnsupportedDtype
        Others as for `maxsim`; an index out of range raises JAX's runtime error.

    Examples
    --------
    >>> documents = jnp.asarray([[[2.0, 3.0]], [[4.0, 5.0]]])
    >>> maxsim_candidates(jnp.asarray([[1.0, 0.0]]), documents, jnp.asarray([1, -1, 0])).tolist()
    [4.0, -inf, 2.0]
    """
    queries, documents = _read_both(q, docs, options := {"q_mask": q_mask, "docs_mask": docs_mask, **options})
    lists = _read_candidates(candidates, queries)
    return _score(queries, documents, lists, 0 if queries.single else None, **options)


# ------------------------------------------------------------------------------------- top-k


def _take(array: Any, places: Any) -> Any:
    return jnp.take_along_axis(array, places, axis=-1)


def _best_in_order(scores: Any, k: int) -> Any:
    """Places of the best k scores, larger first, then the lower place; -inf after every number, NaN last.

    XLA's own top-k of float32 is hundreds of times as fast on CPUs as a sort, but takes a NaN for the largest number.
    So it ranks the numbers, and in a second run what is none: -inf before NaN.
    """
    numbers, places = jax.lax.top_k(jnp.where(jnp.isnan(scores), -jnp.inf, scores), k)
    kinds = jnp.where(scores == -jnp.inf, 2.0, jnp.where(jnp.isnan(scores), 1.0, 0.0)).astype(np.float32)
    _, others = jax.lax.top_k(kinds, k)
    ranked = jnp.sum(numbers > -jnp.inf, -1, keepdims=True)
    rank = jnp.arange(k)
    return jnp.where(rank < ranked, places, _take(others, jnp.maximum(rank - ranked, 0)))


def _select(scores: Any, indices: Any, k: int, descending: bool, ordered: bool) -> tuple[Any, Any]:
    """The best k of every row, best first, ties by index; `ordered` says that indices ascend within a row."""
    keys = jnp.where(scores == 0, 0, scores if descending else -scores)  # -0 and +0 are one number
    kept = min(k, scores.shape[-1])
    if ordered:
        places = _best_in_order(keys, kept)
        best = _take(scores, places), _take(indices, places)
    else:
        order = (jnp.isnan(keys), -keys, indices, scores)
        _, _, found, values = jax.lax.sort(order, dimension=-1, num_keys=3)
        best = values[..., :kept], found[..., :kept]
    missing = [(0, 0)] * (scores.ndim - 1) + [(0, k - kept)]
    worst = -math.inf if descending else math.inf
    return jnp.pad(best[0], missing, constant_values=worst), jnp.pad(best[1], missing, constant_values=-1)


def topk(
    q: Any,
    docs: Any,
    k: int,
    q_mask: Any = None,
    docs_mask: Any = None,
    *,
    candidates: Any = None,
    axis_name: Any = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Find the best k documents of every query, exactly.

    Parameters
    ----------
    q, docs, q_mask, docs_mask, **options
        As for `maxsim`, without the ``return_`` options.
    k : int
    candidates : int array, optional
        ``[queries, count]``: look only among these documents; -1 is none.
    axis_name : str or tuple of str, optional
        Inside ``shard_map`` over documents: the mesh axes that they are sharded along, in order. Every device finds its
        own best k, these are gathered and merged, and indices count through all documents.

    Returns
    -------
    scores, indices : arrays
        ``[queries, k]`` (``[k]`` for one 2-D query); int32 indices, int64 where ``jax_enable_x64`` is on. Best first
        (for angular: lowest first), ties by index, then empty documents, NaN last; index -1 where there are fewer than
        k documents. Scores have their derivative, indices none.

    Raises
    ------
    InvalidArgument
        k is not a count. Others as for `maxsim`.

    Examples
    --------
    >>> documents = jnp.asarray([[[2.0, 3.0]], [[4.0, 5.0]], [[4.0, 6.0]]])
    >>> [x.tolist() for x in topk(jnp.asarray([[1.0, 0.0]]), documents, 2)]
    [[4.0, 4.0], [1, 2]]
    """
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise InvalidArgument(f"k: {k!r}, wanted an integer of at least 1")
    queries, documents = _read_both(q, docs, options := {"q_mask": q_mask, "docs_mask": docs_mask, **options})
    descending = options.get("metric", "dot") != "angular"
    integer = jax.dtypes.canonicalize_dtype(np.int64)
    lists = None if candidates is None else _read_candidates(candidates, queries)
    scores = _score(queries, documents, lists, None, **options)
    indices = jnp.arange(scores.shape[-1], dtype=integer) if lists is None else lists.astype(integer)
    best = _select(scores, jnp.broadcast_to(indices, scores.shape), k, descending, lists is None)
    if axis_name is not None:
        best = _merge(*best, k, descending, documents.sets, axis_name)
    return (best[0][0], best[1][0]) if queries.single else best


def _gather(values: Any, axis_name: Any) -> Any:
    """Every device's values side by side, on all devices: a sum, which `shard_map` knows to leave them all the same."""
    place, count = jax.lax.axis_index(axis_name), jax.lax.psum(1, axis_name)
    mine = jnp.arange(count)[:, None] == place
    spread = jnp.where(mine, values[..., None, :], 0)
    return jax.lax.psum(spread, axis_name).reshape(*values.shape[:-1], -1)


def _merge(scores: Any, indices: Any, k: int, descending: bool, documents: int, axis_name: Any) -> tuple[Any, Any]:
    """Gather every device's best k and keep the best of them."""
    first = jax.lax.axis_index(axis_name).astype(indices.dtype) * documents
    indices = jnp.where(indices < 0, indices, indices + first)
    return _select(_gather(scores, axis_name), _gather(indices, axis_name), k, descending, False)
