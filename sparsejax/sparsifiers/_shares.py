"""How many coordinates each layer gets, and where that cuts the vector into parts.

Replicated and deterministic: each worker computes the same from what all of them know.
Shapes: `L` layers, `w` workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Every coordinate has this share of the norm beside its layer's: so no layer, not one
# of zeros, is without any.
_FLOOR = 1e-6


def allocate(
    norms: Float[Array, " L"], sizes: np.ndarray, goal: int
) -> Float[Array, " L"]:
    """`min(sizes, scale norms)`, scaled to sum to `goal`: real-valued `k_l` [L]."""
    sizes = jnp.asarray(sizes, jnp.float32)
    norms = jnp.where(jnp.sum(norms) > 0, norms / jnp.max(norms), 1.0)
    norms = norms + _FLOOR * sizes / jnp.max(sizes)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        few = jnp.sum(jnp.minimum(sizes, jnp.exp(middle) * norms)) < goal
        return jnp.where(few, middle, low), jnp.where(few, high, middle)

    # From next to nothing to all of the vector.
    top = jnp.log(jnp.max(sizes / norms))
    low, _ = jax.lax.fori_loop(0, 40, halve, (top - 60, top))
    return jnp.minimum(sizes, jnp.exp(low) * norms)


def cut(
    shares: Float[Array, " L"], edges: np.ndarray, worker_count: int
) -> Int[Array, " w+1"]:
    """Int32[w + 1]: bounds of parts with equal sums of `shares`. Replicated.

    Inside a layer shares are spread evenly.
    """
    ends = jnp.cumsum(shares)
    goals = ends[-1] * (jnp.arange(1, worker_count, dtype=jnp.float32) / worker_count)
    layer = jnp.searchsorted(ends, goals).astype(jnp.int32)
    layer = jnp.minimum(layer, shares.shape[0] - 1)
    within = 1 - (ends[layer] - goals) / shares[layer]
    edges = jnp.asarray(edges, jnp.int32)
    size = edges[layer + 1] - edges[layer]
    offset = (jnp.clip(within, 0, 1) * size.astype(jnp.float32)).astype(jnp.int32)
    inner = jax.lax.cummax(edges[layer] + jnp.minimum(offset, size))
    return jnp.concatenate([edges[:1], inner, edges[-1:]])
