"""Top-k of each worker's whole vector, found without sorting."""

from __future__ import annotations

import jax.numpy as jnp

from sparsejax import thresholds
from sparsejax.parts import Payload, Sparsifier
from sparsejax.sparsifiers._everything import whole_vector
from sparsejax.sparsifiers._target import Schedule, Target
from sparsejax.vectors._selection import count_in, select_in


def topk(
    density: float | Schedule,
    *,
    capacity: int | None = None,
    max_density: float | None = None,
) -> Sparsifier:
    """Selects the `k = max(1, floor(density n))` largest magnitudes of each worker.

    The threshold that exactly k coordinates reach is searched by counting at several
    thresholds per pass, from last step's on. Zeros are never selected; where
    magnitudes are tied at the threshold, those of evenly strided rank are.

    State: Float32[w], replicated: last threshold of each worker.

    Args:
      density: fraction of the coordinates that each worker selects, in (0, 1], or a
        schedule: a function from Int32[], the step, to Float[].
      capacity: payload slots per worker; by default k.
      max_density: with a schedule, the largest density it may reach: all sizes follow
        from it. Larger values of the schedule are cut.

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
    target = Target(density, max_density)

    def init(layout, worker_count):
        return rule.init(target.most(layout.n), worker_count)

    def select(vector, state, step, workers, layout):
        n = layout.n
        if target.is_everything(n):
            return whole_vector(n), state

        def count_at(thresholds):
            return count_in(vector, 0, n, thresholds, span=n)

        quota, size = jnp.asarray(target.now(step, n), jnp.int32), jnp.int32(n)
        found = rule.find(state, workers.index(), quota, size, count_at)
        most = target.most(n)
        slots = most if capacity is None else min(most, capacity)
        limit = jnp.minimum(quota, slots)
        indices, demand = select_in(vector, 0, n, found, limit, span=n, capacity=slots)
        values = vector.at[indices].get(mode="fill", fill_value=0)
        return Payload(indices, values, demand, found), state

    def adapt(state, report, step, layout):
        # The rule's target is that of all workers. As a float: it may pass 2^31.
        goal = report.demand.size * jnp.asarray(target.now(step, layout.n), jnp.float32)
        return rule.adapt(state, report.demand, report.threshold, goal)

    return Sparsifier(init, select, adapt, "overlapping")
