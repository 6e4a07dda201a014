"""MaxSim as a primitive of JAX: jit, grad, vmap and sharding, without callbacks and without copies.

Examples
--------
>>> import jax, jax.numpy as jnp
>>> from numkong_py import jax as nkx
>>> documents = jnp.stack([jnp.eye(4), jnp.ones((4, 4))])
>>> jax.jit(nkx.maxsim)(jnp.asarray([[1.0, 2.0, 3.0, 4.0]]), documents).tolist()
[4.0, 10.0]
"""

from .chamfer import chamfer
from .ops import maxsim, maxsim_candidates, maxsim_pairs, topk
from .sides import Packed, packed

__all__ = ["Packed", "chamfer", "maxsim", "maxsim_candidates", "maxsim_pairs", "packed", "topk"]
