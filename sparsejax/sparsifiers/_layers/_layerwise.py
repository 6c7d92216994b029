"""Exclusive selection with a share for each layer: the selection of DEFT."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla, partitions, thresholds
from sparsejax._checks import check_capacity
from sparsejax._workers import vary_like
from sparsejax.parts import Choice, Sparsifier, Window
from sparsejax.sparsifiers._everything import or_everything
from sparsejax.sparsifiers._layers._shares import allocate, cut, rounded
from sparsejax.sparsifiers._rungs import rungs
from sparsejax.sparsifiers._target import Schedule, Target, slot_count
from sparsejax.vectors._counting import count_in
from sparsejax.vectors._pieces import select_pieces
from sparsejax.vectors._selection import select_in

# The magnitudes in the samples of all layers together, and the fewest of one layer. If
# a hundredth of 2^20 magnitudes is chosen, the count is accurate to a hundredth.
_SAMPLE, _FEW = 1 << 20, 1 << 10

# A norm whose square overflows is infinite. Norms are clipped to this, so their sum is
# finite.
_LARGEST = 1e30


def layerwise(
    density: float | Schedule,
    *,
    capacity: int | None = None,
    max_density: float | None = None,
) -> Sparsifier:
    """Selects `k_l` coordinates of each layer, in proportion to the layer's norm.

    The workers agree on the norms by a sum of one number per layer. The `k_l` are
    integers that sum to K*, rounded by largest remainders. The vector is cut where the
    running sum of `k_l` reaches multiples of K*/w. So a part consists of layers or
    pieces of layers, and each worker selects K*/w coordinates in its own part. Parts
    rotate: at step t worker r owns part `(t + r) mod w`. The search for the threshold
    of a piece counts at several thresholds per pass.

    Args:
      density: fraction of all coordinates to deliver, in (0, 1], or a schedule.
      capacity: slots per worker; by default `ceil(K*/w)`.
      max_density: the largest density of a schedule, which fixes all sizes.

    Raises:
      TypeError: if an argument is not a number, or is traced.
      ValueError: if an argument is out of its range; for a schedule without
        `max_density`, or `max_density` without a schedule.

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
    target, capacity = Target.of(density, max_density), check_capacity(capacity)

    def select(vector, state, step):
        layout, n, count = step.layout, step.n, step.w
        goal, most = target.now(step.index, n), target.most(n)
        order = [i for i in layout.order if layout.sizes[i]]
        sizes = np.array([layout.sizes[i] for i in order], np.int32)
        edges = np.array([layout.offsets[i] for i in order] + [n], np.int32)
        layers = [vector[a:b] for a, b in itertools.pairwise(edges)]
        norms = jnp.stack([jnp.linalg.norm(x) for x in layers])
        norms = step.workers.mean(jnp.minimum(norms, _LARGEST))
        counts = rounded(allocate(norms, sizes, goal), sizes, goal)
        quotas = partitions.quotas(step.index, n, goal, count)
        goals = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(quotas)])
        bounds = cut(counts, edges, goals)
        owned = partitions.parts_of(step.index, count)
        part = owned[step.rank]
        slots = slot_count(capacity, -(-most // count), n)
        # This worker's piece of each layer, and the number of coordinates to select
        # there.
        first = jnp.maximum(bounds[part], edges[:-1])
        length = jnp.maximum(jnp.minimum(bounds[part + 1], edges[1:]) - first, 0)
        ends = jnp.cumsum(counts)
        before = jnp.maximum(goals[part], ends - counts)
        wanted = jnp.maximum(jnp.minimum(goals[part + 1], ends) - before, 0)
        window = Window(bounds[owned], n)
        if not _xla.on_cpu():

            def rungs_of(quota, start, size):
                return rungs(
                    rule,
                    rule.init(most, 1),
                    jnp.int32(0),
                    quota,
                    (vector, start, size),
                    span=n,
                    number=min(n - 1, max(_FEW, _SAMPLE // len(sizes))),
                )

            indices, demand, found = select_pieces(
                vector,
                edges,
                (bounds[part], bounds[part + 1]),
                jax.vmap(rungs_of)(wanted, first, length),
                wanted,
                capacity=slots,
            )
            found = jnp.min(found)
            return Choice(indices, jnp.sum(demand), found, window), state
        largest = int(sizes.max())

        def visit(layer, carry):
            indices, filled, demand, lowest = carry
            start, size = first[layer], length[layer]
            goal_here = jnp.minimum(wanted[layer], slots - filled)

            def count_at(thresholds):
                return count_in(vector, start, size, thresholds, span=largest)

            found = rule.find(
                rule.init(most, 1), jnp.int32(0), goal_here, size, count_at
            )
            some, qualified = select_in(
                vector, start, size, found, goal_here, span=largest, capacity=slots
            )
            indices = jax.lax.dynamic_update_slice(indices, some, (filled,))
            filled = filled + jnp.sum(some < n, dtype=jnp.int32)
            return indices, filled, demand + qualified, jnp.minimum(lowest, found)

        # Twice as long, so the empty slots of each piece fit too; the next piece
        # overwrites them.
        zero = jnp.zeros((), jnp.int32)
        start = (jnp.full((2 * slots,), n, jnp.int32), zero, zero, jnp.float32(jnp.inf))
        touched = length > 0
        low = jnp.argmax(touched).astype(jnp.int32)
        high = low + jnp.sum(touched, dtype=jnp.int32)
        start = vary_like(start, vector)
        indices, _, demand, lowest = jax.lax.fori_loop(low, high, visit, start)
        indices = indices[:slots]
        return Choice(indices, demand, lowest, window), state

    made = Sparsifier(select, "disjoint")
    return or_everything(made, target.is_everything)
