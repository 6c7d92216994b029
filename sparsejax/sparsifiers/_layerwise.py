"""Exclusive selection with a share for each layer: the selection of DEFT."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _partition, thresholds
from sparsejax._base import Payload, Sparsifier, Window
from sparsejax._selection import count_in, select_in
from sparsejax._workers import vary_like
from sparsejax.sparsifiers._everything import whole_vector
from sparsejax.sparsifiers._exclusive import target_count

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Every coordinate has this share of the norm beside its layer's: so no layer, not one
# of zeros, is without any.
_FLOOR = 1e-6
# Norms whose squares overflow are infinite; as numbers their sum should be finite.
_LARGEST = 1e30


def layerwise(density: float, *, capacity: int | None = None) -> Sparsifier:
    """Selects `k_l` coordinates of each layer, in proportion to the layer's norm.

    The workers agree on the norms by a sum of one number per layer. The vector is cut
    where the running sum of `k_l` reaches multiples of K*/w: so parts hold one or
    several layers or pieces of one, and each worker selects K*/w coordinates in a part
    of its own. Parts rotate: at step t worker r owns part `(t + r) mod w`. In each
    piece a threshold is searched by counting at several ones per pass.

    Args:
      density: fraction of all coordinates to deliver, in (0, 1].
      capacity: payload slots per worker; by default ceil(K*/w).

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.layerwise(0.01),
      ...     exchange=exchanges.union(),
      ...     memory=memories.error_feedback(),
      ... )
    """
    rule = thresholds.quota()

    def init(layout, worker_count):
        del layout, worker_count
        return ()

    def select(vector, state, step, workers, layout):
        n, count = layout.n, workers.count()
        goal = target_count(density, n)
        if goal >= n:
            return whole_vector(n), state
        order = [i for i in layout.order if layout.sizes[i]]
        sizes = np.array([layout.sizes[i] for i in order], np.int32)
        edges = np.array([layout.offsets[i] for i in order] + [n], np.int32)
        layers = [vector[a:b] for a, b in itertools.pairwise(edges)]
        norms = jnp.stack([jnp.linalg.norm(x) for x in layers])
        norms = workers.mean(jnp.minimum(norms, _LARGEST))
        shares = allocate(norms, sizes, goal)
        owned = _partition.owners(step, count)
        bounds = cut(shares, edges, count)
        part = owned[workers.index()]
        quota = _partition.quotas(step, n, goal, count)[part]
        slots = min(n, -(-goal // count) if capacity is None else capacity)
        # This worker's piece of each layer, and how many to select there.
        first = jnp.maximum(bounds[part], edges[:-1])
        length = jnp.maximum(jnp.minimum(bounds[part + 1], edges[1:]) - first, 0)
        length = length.astype(jnp.int32)
        weight = shares * (length.astype(jnp.float32) / sizes.astype(np.float32))
        ends = jnp.cumsum(weight)
        scale = quota.astype(jnp.float32) / jnp.maximum(ends[-1], 1e-30)
        ends = jnp.round(ends * scale).astype(jnp.int32)
        wanted = jnp.diff(ends, prepend=jnp.zeros((1,), jnp.int32))
        largest = int(sizes.max())

        def visit(layer, carry):
            indices, filled, demand, lowest = carry
            start, size = first[layer], length[layer]
            goal_here = jnp.minimum(wanted[layer], slots - filled)

            def count_at(thresholds):
                return count_in(vector, start, size, thresholds, span=largest)

            found = rule.find(
                rule.init(goal, 1), jnp.int32(0), goal_here, size, count_at
            )
            some, qualified = select_in(
                vector, start, size, found, goal_here, span=largest, capacity=slots
            )
            indices = jax.lax.dynamic_update_slice(indices, some, (filled,))
            filled = filled + jnp.sum(some < n, dtype=jnp.int32)
            return indices, filled, demand + qualified, jnp.minimum(lowest, found)

        # Twice as long: a piece's empty slots fit, and the next one overwrites them.
        zero = jnp.zeros((), jnp.int32)
        start = (jnp.full((2 * slots,), n, jnp.int32), zero, zero, jnp.float32(jnp.inf))
        touched = length > 0
        low = jnp.argmax(touched).astype(jnp.int32)
        high = low + jnp.sum(touched, dtype=jnp.int32)
        start = vary_like(start, vector)
        indices, _, demand, lowest = jax.lax.fori_loop(low, high, visit, start)
        indices = indices[:slots]
        values = vector.at[indices].get(mode="fill", fill_value=0)
        window = Window(bounds[owned], n)
        return Payload(indices, values, demand, lowest, window=window), state

    def adapt(state, report, step, layout):
        del report, step, layout
        return state

    return Sparsifier(init, select, adapt, "disjoint")


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
