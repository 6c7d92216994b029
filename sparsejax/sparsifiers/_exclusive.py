"""Exclusive selection: each worker searches a part of the vector that is its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from sparsejax import partitions
from sparsejax.parts import Partition, Payload, Sparsifier, ThresholdRule, Window
from sparsejax.sparsifiers._everything import whole_vector
from sparsejax.sparsifiers._target import Schedule, Target
from sparsejax.vectors._selection import count_in, select_in

# A part that moves may come to reach over nearly all of the vector. Where that is more
# than this many coordinates, there is another program for steps in which no part has
# more than twice the average size, with tiles and words made for such parts.
_LARGE = 1 << 20


class ExclusiveState(NamedTuple):
    """State of an exclusive sparsifier. Replicated, and free of `capacity`."""

    partition: Any
    threshold: Any


def exclusive(
    density: float | Schedule,
    *,
    partition: Partition,
    threshold: ThresholdRule,
    capacity: int | None = None,
    max_density: float | None = None,
) -> Sparsifier:
    """Selects `|x| >= threshold` inside this worker's part of the vector.

    The parts cover the vector without overlap and rotate: at step t worker r owns part
    `(t + r) mod w`. So the union of the workers' choices is their sum, whatever the
    number of workers, and each scans about n/w coordinates.

    Where more qualify than may be sent, those of evenly strided rank are sent, so that
    a coordinate's position never decides whether it has to wait.

    Args:
      density: fraction of all coordinates to deliver, in (0, 1], or a schedule: a
        function from Int32[], the step, to Float[].
      partition: how the vector is split, and how the parts move.
      threshold: how a part's threshold is found.
      capacity: payload slots per worker; by default what the threshold rule asks for.
      max_density: with a schedule, the largest density it may reach: all sizes follow
        from it. Larger values of the schedule are cut.

    Example:
      >>> import sparsejax
      >>> from sparsejax import partitions
      >>> sparsifier = exclusive(
      ...     0.01,
      ...     partition=partitions.even(),
      ...     threshold=sparsejax.thresholds.quota(),
      ... )
      >>> sparsifier.support
      'disjoint'
    """
    target = Target(density, max_density)

    def init(layout, worker_count):
        n = layout.n
        goal = target.most(n)
        return ExclusiveState(
            partition.init(n, worker_count), threshold.init(goal, worker_count)
        )

    def select(vector, state, step, workers, layout):
        n, count = layout.n, workers.count()
        if target.is_everything(n):
            return whole_vector(n), state
        goal = target.most(n)
        bounds = partition.bounds(state.partition, n, count, goal)
        owned = partitions.parts_of(step, count)
        part = owned[workers.index()]
        start, size = bounds[part], bounds[part + 1] - bounds[part]
        quota = partitions.quotas(step, n, target.now(step, n), count)[part]
        span = partition.span(n, count, goal)
        slots = threshold.capacity(goal, n, count) if capacity is None else capacity
        slots = min(slots, span)

        def search(span):
            def count_at(thresholds):
                return count_in(vector, start, size, thresholds, span=span)

            found = threshold.find(state.threshold, part, quota, size, count_at)
            limit = threshold.limit(quota, slots)
            return found, *select_in(
                vector, start, size, found, limit, span=span, capacity=slots
            )

        usual = 2 * -(-n // count)
        if span > max(usual, _LARGE):
            found, indices, demand = workers.cond(
                jnp.all(jnp.diff(bounds) <= usual),
                lambda: search(usual),
                lambda: search(span),
            )
        else:
            found, indices, demand = search(span)
        values = vector.at[indices].get(mode="fill", fill_value=0)
        window = Window(bounds[owned], span)
        return Payload(indices, values, demand, found, window=window), state

    def adapt(state, report, step, layout):
        n, count = layout.n, report.demand.shape[0]
        if target.is_everything(n):
            return state
        goal = target.most(n)
        demand = partitions.by_part(report.demand, step, count)
        thresholds = partitions.by_part(report.threshold, step, count)
        return ExclusiveState(
            partition.adapt(
                state.partition,
                n,
                goal,
                demand,
                thresholds,
                report.details.histogram,
            ),
            threshold.adapt(state.threshold, demand, thresholds, target.now(step, n)),
        )

    return Sparsifier(init, select, adapt, "disjoint")
