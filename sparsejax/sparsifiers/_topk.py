"""Top-k of each worker's whole vector, without a sort."""

from __future__ import annotations

import jax.numpy as jnp

from sparsejax import thresholds
from sparsejax._checks import check_capacity
from sparsejax.parts import Choice, Sparsifier
from sparsejax.sparsifiers._everything import or_everything
from sparsejax.sparsifiers._target import Schedule, Target, slot_count
from sparsejax.vectors._counting import count_in
from sparsejax.vectors._selection import select_in


def topk(
    density: float | Schedule,
    *,
    capacity: int | None = None,
    max_density: float | None = None,
) -> Sparsifier:
    """Selects the `k = max(1, floor(density n))` largest magnitudes of each worker.

    A search finds the threshold that exactly k coordinates reach. The search counts at
    several thresholds per pass and starts from the threshold of the last step. Zeros
    are never selected. If magnitudes are tied at the threshold, coordinates of evenly
    strided rank are selected.

    State: Float32[w], replicated: the last threshold of each worker.

    Args:
      density: fraction of the coordinates that each worker selects, in (0, 1], or a
        schedule: a function from Int32[], the step, to Float[].
      capacity: slots per worker, at most k; by default k.
      max_density: the largest density of a schedule, which fixes all sizes; larger
        values of the schedule are clipped. Needed with a schedule only.

    Raises:
      TypeError: if an argument is not a number, or is traced.
      ValueError: if an argument is out of its range; for a schedule without
        `max_density`, or `max_density` without a schedule.

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
    target, capacity = Target.of(density, max_density), check_capacity(capacity)

    def init(layout, worker_count):
        return rule.init(target.most(layout.n), worker_count)

    def select(vector, state, step):
        n = step.n

        def count_at(thresholds):
            return count_in(vector, 0, n, thresholds, span=n)

        quota = jnp.asarray(target.now(step.index, n), jnp.int32)
        found = rule.find(state, step.rank, quota, jnp.int32(n), count_at)
        most = slot_count(capacity, target.most(n), target.most(n))
        limit = jnp.minimum(quota, most)
        indices, demand = select_in(vector, 0, n, found, limit, span=n, capacity=most)
        return Choice(indices, demand, found), state

    def adapt(state, report, step):
        # The rule takes the target of all workers, a float since it may exceed 2^31.
        each = jnp.asarray(target.now(step.index, step.n), jnp.float32)
        return rule.adapt(state, report.demand, report.threshold, step.w * each)

    made = Sparsifier(select, "overlapping", init=init, adapt=adapt)
    return or_everything(made, target.is_everything)
