"""Queries and documents as JAX sees them: any layout becomes tokens, what is valid in them, and static facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import Collection
from ..dtypes import find_name
from ..errors import InvalidArgument, ShapeMismatch, UnsupportedDtype
from ..packed import PackedTensor

__all__ = ["Facts", "Packed", "Side", "output_dtype", "packed", "read_side", "set_count"]


class Facts(NamedTuple):
    """What is static about one side: hashable, part of every compiled call."""

    layout: str  # "full", "lengths", "mask", "spans" or "packed"
    dtype: str
    depth: int
    longest: int  # no set has more tokens
    sets: int  # of a packed buffer; elsewhere the arrays' shapes say it
    begin: int  # first set of a packed buffer


class Side(NamedTuple):
    """One side of a call: tokens ``[sets, longest, depth]`` or ``[total, depth]``, and lengths, mask, spans or None."""

    tokens: Any
    valid: Any
    facts: Facts
    single: bool  # one 2-D array: results have no axis for it

    @property
    def sets(self) -> int:
        """How many token sets there are."""
        return set_count(self.tokens, self.valid, self.facts)


def output_dtype(dtype: str) -> str:
    """Type of scores: float32, or float64 for f32 tokens where ``jax_enable_x64`` is on."""
    return jax.dtypes.canonicalize_dtype(np.float64).name if dtype == "f32" else "float32"


def set_count(tokens: Any, valid: Any, facts: Facts) -> int:
    """Sets of one side, of arrays or their abstract values, without what `vmap` put in front."""
    if facts.layout == "packed":
        return facts.sets
    return valid.shape[-2] if facts.layout == "spans" else tokens.shape[-3]


# ------------------------------------------------------------------------------------- packed corpora


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Packed:
    """A packed collection as a pytree: its bytes are the one leaf, everything else is static.

    Made by `packed`. Pass it to jitted functions as an argument: closed over, its bytes would become a constant of the
    compiled program. Its tokens have no gradient.

    Attributes
    ----------
    buffer : array
        uint8, the bytes of a `PackedTensor`.
    facts : Facts
    single : bool
    """

    buffer: Any
    facts: Facts
    single: bool

    def __len__(self) -> int:
        return self.facts.sets

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Facts, bool]]:
        """Leaf and static part."""
        return (self.buffer,), (self.facts, self.single)

    @classmethod
    def tree_unflatten(cls, static: tuple[Facts, bool], leaves: tuple[Any]) -> Packed:
        """Undo `tree_flatten`."""
        return cls(leaves[0], *static)


def packed(x: PackedTensor) -> Packed:
    """Give JAX a packed collection, without a copy where its bytes start on a multiple of 64 (`pack` sees to that).

    Parameters
    ----------
    x : PackedTensor
        In host memory; it stays alive as long as the result.

    Raises
    ------
    InvalidArgument
        It is packed on a device, or coded.

    Examples
    --------
    >>> import numkong_py as nk
    >>> packed(nk.pack([np.ones((3, 4), np.float32)])).facts.longest
    3
    """
    if x.device != "cpu":
        raise InvalidArgument(f'docs: packed on {x.device}, wanted host memory; pass x.to("cpu")')
    if x.precision != "exact":
        raise InvalidArgument(
            f"docs: packed with precision {x.precision!r}, and JAX scores exact packings; pass NumPy arrays "
            "(np.asarray) as queries, or nk.pack(docs) of the vectors"
        )
    x.require()
    facts = Facts("packed", x.dtype, x.depth, x.longest, len(x), x.begin)
    host = jax.local_devices(backend="cpu")[0]
    return Packed(jax.device_put(x.buffer, host, may_alias=True), facts, x.single)


def _flatten_tensor(x: PackedTensor) -> tuple[tuple[Any], tuple[Facts, bool]]:
    return packed(x).tree_flatten()


jax.tree_util.register_pytree_node(PackedTensor, _flatten_tensor, Packed.tree_unflatten)


# ------------------------------------------------------------------------------------- arrays


def _dtype_of(x: Any, argument: str) -> str:
    name = find_name(np.dtype(x.dtype))
    if name is None:
        raise UnsupportedDtype(
            f"{argument}: dtype {x.dtype}, shape {x.shape}; wanted bfloat16, float16 or float32; "
            f"pass {argument}.astype(jnp.float32)"
        )
    return name


def _check_index(x: Any, argument: str, shape: tuple[int, ...]) -> Any:
    x = x if isinstance(x, np.ndarray) else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise UnsupportedDtype(f"{argument}: dtype {x.dtype}; wanted integers; pass {argument}.astype(jnp.int32)")
    if x.shape != shape:
        raise ShapeMismatch(f"{argument}: shape {x.shape}, wanted {shape}")
    return x if x.dtype in (jnp.int32, jnp.int64) else x.astype(jnp.int32)


def _check_mask(mask: Any, argument: str, shape: tuple[int, ...]) -> jax.Array:
    mask = jnp.asarray(mask)
    if mask.shape != shape:
        raise ShapeMismatch(f"{argument}_mask: shape {mask.shape}, wanted {shape}, one entry for every token")
    if mask.dtype != bool and not jnp.issubdtype(mask.dtype, jnp.integer):
        raise UnsupportedDtype(f"{argument}_mask: dtype {mask.dtype}, wanted bool; pass {argument}_mask != 0")
    return mask if mask.dtype == bool else mask != 0


def _spans(offsets: Any, argument: str, total: int) -> tuple[Any, int]:
    """First row and the one after the last of every set, and the most tokens that one can have."""
    known = not isinstance(offsets, jax.core.Tracer)
    offsets = np.asarray(offsets) if known else offsets
    if offsets.ndim != 1 or len(offsets) == 0:
        raise ShapeMismatch(f"{argument}_offsets: shape {offsets.shape}, wanted [count + 1], from 0 to {total}")
    offsets = _check_index(offsets, f"{argument}_offsets", offsets.shape)
    library = np if known else jnp
    spans = library.stack([offsets[:-1], offsets[1:]], axis=-1)
    return spans, int(np.diff(spans).max(initial=0)) if known else total


def _read_list(arrays: Any, argument: str) -> Side:
    if len(arrays) == 0:
        raise ShapeMismatch(f"{argument}: an empty list has no depth; pass an array of shape [0, longest, depth]")
    arrays = [jnp.asarray(x) for x in arrays]
    for index, x in enumerate(arrays):
        if x.ndim != 2 or x.shape[1] != arrays[0].shape[-1] or x.dtype != arrays[0].dtype:
            raise ShapeMismatch(
                f"{argument}[{index}]: {x.dtype}{list(x.shape)}, and {argument}[0] is "
                f"{arrays[0].dtype}{list(arrays[0].shape)}; wanted [tokens, depth] of one type and depth"
            )
    offsets = np.cumsum([0, *(len(x) for x in arrays)]).astype(np.int32)
    return read_side(jnp.concatenate(arrays), argument, offsets=offsets)


def _from_collection(x: Collection, argument: str) -> Side:
    extras = {name: x.extras.get(name) for name in ("mask", "offsets", "lengths")}
    if extras["mask"] is None and extras["offsets"] is None and np.ndim(x.source) == 3:
        extras["lengths"] = x.lengths
    source = list(x.source) if isinstance(x.source, (list, tuple)) else x.source
    return read_side(source, argument, **extras)


def read_side(
    x: Any, argument: str, *, mask: Any = None, lengths: Any = None, offsets: Any = None, longest: int | None = None
) -> Side:
    """Read any layout of one side; everything that is static is checked here, what is traced in the call.

    Raises
    ------
    UnsupportedDtype, ShapeMismatch, InvalidArgument
    """
    given = {"mask": mask, "lengths": lengths, "offsets": offsets}
    extras = [name for name, value in given.items() if value is not None]
    if len(extras) > 1:
        raise InvalidArgument(f"{argument}: {' and '.join(extras)} say the same thing in different ways; pass one")
    whole = isinstance(x, (list, tuple, Collection, PackedTensor, Packed))
    if whole and extras:
        raise InvalidArgument(f"{argument}_{extras[0]}: {argument} is a {type(x).__name__}, which has its own lengths")
    if isinstance(x, PackedTensor):
        x = packed(x)
    if isinstance(x, Packed):
        return Side(x.buffer, None, x.facts, x.single)
    if isinstance(x, Collection):
        return _from_collection(x, argument)
    if isinstance(x, (list, tuple)):
        return _read_list(x, argument)
    dtype = _dtype_of(x if hasattr(x, "dtype") else np.asarray(x), argument)  # asked first: JAX narrows float64
    x = jnp.asarray(x)
    if x.ndim not in (2, 3) or x.shape[-1] == 0:
        raise ShapeMismatch(f"{argument}: shape {x.shape}, wanted [tokens, depth] or [count, longest, depth]")
    depth = x.shape[-1]
    if offsets is not None:
        if x.ndim != 2:
            raise ShapeMismatch(f"{argument}_offsets: {argument} has shape {x.shape}, wanted [total, depth]")
        valid, most = _spans(offsets, argument, x.shape[0])
        return Side(x, valid, Facts("spans", dtype, depth, most if longest is None else longest, 0, 0), False)
    single = x.ndim == 2
    if single:
        x = x[None]
        mask = None if mask is None else jnp.asarray(mask)[None]
        if lengths is not None:
            lengths = jnp.reshape(jnp.asarray(lengths), (1,))
    layout, valid = "full", None
    if mask is not None:
        layout, valid = "mask", _check_mask(mask, argument, x.shape[:2])
    if lengths is not None:
        layout, valid = "lengths", _check_index(lengths, f"{argument}_lengths", x.shape[:1])
    return Side(x, valid, Facts(layout, dtype, depth, x.shape[1], 0, 0), single)
