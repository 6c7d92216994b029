"""Exclusive selection with a share for each layer: the selection of DEFT."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import partitions, thresholds
from sparsejax._workers import vary_like
from sparsejax.parts import Payload, Sparsifier, Window
from sparsejax.sparsifiers._everything import whole_vector
from sparsejax.sparsifiers._layers._shares import allocate, cut, rounded
from sparsejax.sparsifiers._target import target_count
from sparsejax.vectors._selection import count_in, select_in

# Norms whose squares overflow are infinite; as numbers their sum should be finite.
_LARGEST = 1e30


def layerwise(density: float, *, capacity: int | None = None) -> Sparsifier:
    """Selects `k_l` coordinates of each layer, in proportion to the layer's norm.

    The workers agree on the norms by a sum of one number per layer. `k_l` are whole and
    sum to K*, by largest remainders. The vector is cut where the running sum of `k_l`
    reaches multiples of K*/w: so parts hold one or
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
        counts = rounded(allocate(norms, sizes, goal), sizes, goal)
        quotas = partitions.quotas(step, n, goal, count)
        goals = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(quotas)])
        bounds = cut(counts, edges, goals)
        owned = partitions.parts_of(step, count)
        part = owned[workers.index()]
        slots = min(n, -(-goal // count) if capacity is None else capacity)
        # This worker's piece of each layer, and how many to select there.
        first = jnp.maximum(bounds[part], edges[:-1])
        length = jnp.maximum(jnp.minimum(bounds[part + 1], edges[1:]) - first, 0)
        ends = jnp.cumsum(counts)
        before = jnp.maximum(goals[part], ends - counts)
        wanted = jnp.maximum(jnp.minimum(goals[part + 1], ends) - before, 0)
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
