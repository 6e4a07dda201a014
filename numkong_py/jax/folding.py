"""Batch axes into the kernel: what `vmap` added in front becomes more queries, more documents, or lists of candidates.

Every operand of a primitive has the same number of leading axes, each as long as the batch or 1 where `vmap` did not
map that operand. An axis that only the queries have makes more query sets, one that only the documents have more
documents; an axis that both have makes groups, which see each other only through candidates. So one call does it all,
and an operand that is shared stays one operand: its gradient is summed inside the call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

__all__ = ["RANKS", "VALID_RANKS", "Folding"]

RANKS = {"full": 3, "lengths": 3, "mask": 3, "spans": 2, "packed": 1}  # of tokens
VALID_RANKS = {"lengths": 1, "mask": 2, "spans": 2}


@dataclass(frozen=True)
class Folding:
    """Which batch axes are groups, which are queries' and which are documents'.

    Attributes
    ----------
    sizes : tuple of int
        Of all batch axes.
    both, rows, columns : tuple of int
        The axes that make groups, more query sets, and more documents.
    """

    sizes: tuple[int, ...]
    both: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(
        cls, queries: list[tuple[int, ...]], documents: list[tuple[int, ...]], lists: tuple[int, ...] | None
    ) -> Folding:
        """Read the leading axes of what belongs to the queries, to the documents, and of the candidates."""
        leads = [*queries, *documents, *([] if lists is None else [lists])]
        sizes = tuple(max(extents) for extents in zip(*leads)) if leads[0] else ()
        both, rows, columns = [], [], []
        for axis, size in enumerate(sizes):
            by_query = any(lead[axis] > 1 for lead in queries)
            by_document = any(lead[axis] > 1 for lead in documents)
            if size == 1:
                continue
            if by_document and (by_query or lists is not None):
                both.append(axis)
            elif by_document:
                columns.append(axis)
            else:
                rows.append(axis)
        return cls(sizes, tuple(both), tuple(rows), tuple(columns))

    def _count(self, axes: tuple[int, ...]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def _gather(self, array: Any, axes: tuple[int, ...]) -> Any:
        """Bring the chosen batch axes to the front, in order, at full length; the others (of length 1) go."""
        spread = tuple(self.sizes[axis] if axis in axes else 1 for axis in range(len(self.sizes)))
        rest = array.shape[len(self.sizes) :]
        if array.shape[: len(spread)] != spread:
            array = jnp.broadcast_to(array, (*spread, *rest))
        kept = (*axes, *(axis for axis in range(len(spread)) if axis not in axes))
        if kept != tuple(range(len(spread))):
            array = jnp.transpose(array, (*kept, *range(len(spread), array.ndim)))
        return array.reshape((self._count(axes), *rest))

    def fold_side(self, tokens: Any, valid: Any, layout: str, axes: tuple[int, ...]) -> tuple[Any, Any]:
        """Tokens and what is valid of one side, its batch axes made more sets."""
        if layout == "packed":
            return tokens.reshape(tokens.shape[-1:]), None
        tokens = self._gather(tokens, axes)
        copies, rows = tokens.shape[:2]
        tokens = tokens.reshape((-1, *tokens.shape[2:]))
        if valid is None:
            return tokens, None
        valid = self._gather(valid, axes)
        if layout == "spans":
            valid = valid + (jnp.arange(copies, dtype=valid.dtype) * rows)[:, None, None]
        return tokens, valid.reshape((-1, *valid.shape[2:]))

    def fold_queries(self, tokens: Any, valid: Any, layout: str) -> tuple[Any, Any]:
        """Queries of all groups and row axes."""
        return self.fold_side(tokens, valid, layout, (*self.both, *self.rows))

    def fold_documents(self, tokens: Any, valid: Any, layout: str) -> tuple[Any, Any]:
        """Documents of all groups and column axes."""
        return self.fold_side(tokens, valid, layout, (*self.both, *self.columns))

    @property
    def groups(self) -> int:
        """Groups of query sets and documents that see only each other."""
        return self._count(self.both)

    @property
    def copies(self) -> int:
        """Query sets of the folded call for one of the call before."""
        return self._count((*self.both, *self.rows))

    def fold_lists(self, lists: Any) -> Any:
        """Candidates ``[*sizes or 1, queries, count]`` as rows of the folded call, still counted within their group."""
        lists = self._gather(lists, (*self.both, *self.rows))
        return lists.reshape(-1, lists.shape[-1])

    def unfold_scores(self, scores: Any, queries: int) -> Any:
        """Results ``[rows, columns, ...]`` of the folded call as ``[*sizes, queries, columns, ...]``."""
        axes = (*self.both, *self.rows, *self.columns)
        inner = scores.shape[2:]
        extents = [self.sizes[axis] for axis in (*self.both, *self.rows)]
        columns = scores.shape[1] // self._count(self.columns)
        scores = scores.reshape(*extents, queries, *(self.sizes[axis] for axis in self.columns), columns, *inner)
        places = {axis: place for place, axis in enumerate((*self.both, *self.rows))}
        places |= {axis: len(extents) + 1 + place for place, axis in enumerate(self.columns)}
        order = [*(places[axis] for axis in sorted(axes)), len(extents), len(axes) + 1]
        scores = jnp.transpose(scores, (*order, *range(len(axes) + 2, scores.ndim)))
        return scores.reshape(*self.sizes, queries, columns, *inner)

    def fold_scores(self, values: Any) -> Any:
        """Undo `unfold_scores`: ``[*sizes or 1, queries, columns, ...]`` as ``[rows, columns, ...]``."""
        lead = len(self.sizes)
        inner = values.shape[lead + 2 :]
        values = jnp.broadcast_to(values, (*self.sizes, *values.shape[lead:]))
        queries, columns = values.shape[lead : lead + 2]
        ones = [axis for axis in range(lead) if self.sizes[axis] == 1]
        rest = range(lead + 2, values.ndim)
        values = jnp.transpose(values, (*self.both, *self.rows, lead, *self.columns, lead + 1, *ones, *rest))
        rows = self._count((*self.both, *self.rows)) * queries
        return values.reshape(rows, self._count(self.columns) * columns, *inner)

    def unfold_gradient(self, gradient: Any, axes: tuple[int, ...], shape: tuple[int, ...]) -> Any:
        """Gradient of a folded side as the side's own shape; an axis that the side does not have is summed."""
        lead = len(self.sizes)
        gradient = gradient.reshape(*(self.sizes[axis] for axis in axes), *shape[lead:])
        order = sorted(range(len(axes)), key=lambda place: axes[place])
        gradient = jnp.transpose(gradient, (*order, *range(len(axes), gradient.ndim)))
        full = tuple(self.sizes[axis] if axis in axes else 1 for axis in range(lead))
        gradient = gradient.reshape(*full, *shape[lead:])
        summed = tuple(axis for axis in range(lead) if full[axis] != shape[axis])
        return jnp.sum(gradient, summed, keepdims=True) if summed else gradient
