"""Top-k of each worker's whole vector, found without sorting."""

from __future__ import annotations

import jax.numpy as jnp

from sparsejax import thresholds
from sparsejax._base import Payload, Sparsifier
from sparsejax._selection import count_in, select_in
from sparsejax.sparsifiers._everything import whole_vector
from sparsejax.sparsifiers._exclusive import target_count


def topk(density: float, *, capacity: int | None = None) -> Sparsifier:
    """Selects the `k = max(1, floor(density n))` largest magnitudes of each worker.

    The threshold that exactly k coordinates reach is searched by counting at several
    thresholds per pass, from last step's on. Zeros are never selected; where
    magnitudes are tied at the threshold, those of evenly strided rank are.

    State: Float32[w], replicated: last threshold of each worker.

    Args:
      density: fraction of the coordinates that each worker selects, in (0, 1].
      capacity: payload slots per worker; by default k.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.topk(0.01),
      ...     exchange=exchanges.pairs(),
      ...     memory=memories.error_feedback(),
      ... )
    """
    rule = thresholds.quota(slack=0.0)

    def init(layout, worker_count):
        return rule.init(target_count(density, layout.n), worker_count)

    def select(vector, state, step, workers, layout):
        del step
        n = layout.n
        goal = target_count(density, n)
        if goal >= n:
            return whole_vector(n), state

        def count_at(thresholds):
            return count_in(vector, 0, n, thresholds, span=n)

        quota, size = jnp.int32(goal), jnp.int32(n)
        found = rule.find(state, workers.index(), quota, size, count_at)
        slots = goal if capacity is None else min(goal, capacity)
        indices, demand = select_in(vector, 0, n, found, slots, span=n, capacity=slots)
        values = vector.at[indices].get(mode="fill", fill_value=0)
        return Payload(indices, values, demand, found), state

    def adapt(state, report, step, layout):
        del step
        goal = target_count(density, layout.n)
        return rule.adapt(state, report.demand, report.threshold, goal)

    return Sparsifier(init, select, adapt, "overlapping")
