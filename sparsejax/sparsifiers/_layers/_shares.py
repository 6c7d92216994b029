"""The number of coordinates of each layer, and the parts of the vector that follow.

Replicated and deterministic: all workers compute the same from facts that all have.
Shapes: `L` layers, `w` workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# This is added to a layer's relative norm in proportion to the layer's size, so a layer
# of zeros has a share too.
_FLOOR = 1e-6


def allocate(
    norms: Float[Array, " L"], sizes: np.ndarray, goal: Int[Array, ""] | int
) -> Float[Array, " L"]:
    """Real-valued `k_l` [L]: `min(sizes, scale norms)`, with sum `goal`."""
    sizes = jnp.asarray(sizes, jnp.float32)
    norms = jnp.where(jnp.sum(norms) > 0, norms / jnp.max(norms), 1.0)
    norms = norms + _FLOOR * sizes / jnp.max(sizes)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        few = jnp.sum(jnp.minimum(sizes, jnp.exp(middle) * norms)) < goal
        return jnp.where(few, middle, low), jnp.where(few, high, middle)

    # The range of log scales: from nearly no coordinate to the whole vector.
    top = jnp.log(jnp.max(sizes / norms))
    low, _ = jax.lax.fori_loop(0, 40, halve, (top - 60, top))
    return jnp.minimum(sizes, jnp.exp(low) * norms)


def rounded(
    shares: Float[Array, " L"], sizes: np.ndarray, goal: Int[Array, ""] | int
) -> Int[Array, " L"]:
    """Int32[L]: `shares` as integers, at most `sizes`, that sum to `goal` exactly.

    Shares are rounded down, and the layers with the largest remainders get one more.
    Float sums are slightly off, so a few coordinates may be missing or too many: layers
    with room gain or lose them.
    """
    floors = jnp.minimum(jnp.floor(shares).astype(jnp.int32), sizes)
    order = jnp.argsort(floors.astype(jnp.float32) - shares)
    counts, most = floors[order], jnp.asarray(sizes, jnp.int32)[order]

    def filled(amount, room):
        """Deals `amount` out to one layer after another, at most `room` to each."""
        return jnp.clip(amount - (jnp.cumsum(room) - room), 0, room)

    def missing(counts):
        return goal - jnp.sum(counts, dtype=jnp.int32)

    counts += filled(missing(counts), jnp.minimum(most - counts, 1))
    counts += filled(missing(counts), most - counts)
    counts -= filled(-missing(counts), counts)
    return jnp.zeros_like(counts).at[order].set(counts)


def cut(
    counts: Int[Array, " L"], edges: np.ndarray, goals: Int[Array, " w+1"]
) -> Int[Array, " w+1"]:
    """Int32[w + 1]: the bounds at which the running sum of `counts` reaches `goals`.

    `goals` ascend from 0 to the sum of `counts`. In a layer with `k` coordinates to
    select out of `size`, each of the `k` stands for `size // k` coordinates, and each
    of the first `size % k` for one more. So every piece has room for its share of the
    selected coordinates. Replicated.
    """
    edges = jnp.asarray(edges, jnp.int32)
    ends = jnp.cumsum(counts)
    layer = jnp.searchsorted(ends, goals, side="right").astype(jnp.int32)
    layer = jnp.minimum(layer, counts.shape[0] - 1)
    before = goals - (ends - counts)[layer]
    each = jnp.maximum(counts[layer], 1)
    size = edges[layer + 1] - edges[layer]
    inside = before * (size // each) + jnp.minimum(before, size % each)
    bounds = jnp.where(goals < ends[-1], edges[layer] + inside, edges[-1])
    return bounds.at[0].set(0)
