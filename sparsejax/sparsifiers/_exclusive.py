"""Exclusive selection: each worker searches its own part of the vector."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from sparsejax import partitions
from sparsejax._checks import check_capacity, check_part
from sparsejax.parts import Choice, Partition, Sparsifier, ThresholdRule, Window
from sparsejax.sparsifiers._everything import or_everything
from sparsejax.sparsifiers._rungs import rungs, sample_size, samples
from sparsejax.sparsifiers._target import Schedule, Target, slot_count
from sparsejax.vectors._counting import count_in
from sparsejax.vectors._ladder import filled
from sparsejax.vectors._reach import room
from sparsejax.vectors._selection import select_in

# A part that moves may grow to nearly the whole vector. If that is more than this many
# coordinates, steps in which no part exceeds twice the average size take a branch of
# their own, with tiles and words for parts of that size.
_LARGE = 1 << 20
# Indices are coded for parts of up to this many average sizes. With eight workers the
# longest part is about twice that, and its indices need one more bit each.
_USUAL = 3.9


class ExclusiveState(NamedTuple):
    """State of `exclusive`, whose shapes do not depend on `capacity`. Replicated.

    Attributes:
      partition: state of the `Partition`.
      threshold: state of the `ThresholdRule`.
    """

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
    `(t + r) mod w`. So the workers' choices never overlap, and each worker scans about
    n/w coordinates.

    The message has room for the indices of a part of up to 3.9 times the average size.
    Indices in a longer part need more bits, so that part sends less than its quota:
    with eight workers and 1 %, a ninth less.

    If more coordinates qualify than may be sent, coordinates of evenly strided rank are
    sent, so the position of a coordinate never decides whether the coordinate waits.

    Partitions that read a histogram of the delivered coordinates, such as
    `partitions.balanced()`, need an exchange that provides one, such as `union`.

    Args:
      density: fraction of all coordinates to deliver, in (0, 1], or a schedule: a
        function from Int32[], the step, to Float[].
      partition: splits the vector into parts, and moves the parts.
        `threshold.partition` is the partition that suits the rule.
      threshold: finds the threshold of a part.
      capacity: slots per worker; by default `threshold.capacity`.
      max_density: the largest density of a schedule, which fixes all sizes; larger
        values of the schedule are clipped. Needed with a schedule only.

    Raises:
      TypeError: if `density`, `capacity` or `max_density` is not a number, or is
        traced; if `partition` is not a `Partition`, or `threshold` not a
        `ThresholdRule`.
      ValueError: if a number is out of its range; for a schedule without
        `max_density`, or `max_density` without a schedule.

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
    target, capacity = Target.of(density, max_density), check_capacity(capacity)
    check_part("partition", partition, Partition, "partitions.even()")
    check_part("threshold", threshold, ThresholdRule, "thresholds.staircase()")

    def init(layout, worker_count):
        n = layout.n
        goal = target.most(n)
        return ExclusiveState(
            partition.init(n, worker_count), threshold.init(goal, worker_count)
        )

    def select(vector, state, step):
        n, count = step.n, step.w
        goal = target.most(n)
        bounds = partition.bounds(state.partition, n, count, goal)
        owned = partitions.parts_of(step.index, count)
        part = owned[step.rank]
        start, size = bounds[part], bounds[part + 1] - bounds[part]
        wanted = target.now(step.index, n)
        quota = partitions.quotas(step.index, n, wanted, count)[part]
        span = partition.span(n, count, goal)
        slots = slot_count(capacity, threshold.capacity(goal, n, count), span)
        usual = min(span, int(_USUAL * -(-n // count)))
        long = bounds[owned + 1] - bounds[owned] > usual
        most = jnp.where(size > usual, room(slots, usual, span), slots)
        quota = jnp.minimum(quota, most)

        limit = jnp.minimum(threshold.limit(quota, slots), most)
        region = (vector, start, size)
        sampled = n > 0 and samples(threshold)
        if sampled:
            number = sample_size(span, -(-n // count), max(goal, 1) / n)
            known = rungs(
                threshold,
                state.threshold,
                part,
                quota,
                region,
                span=span,
                number=number,
            )

        def search(longest):
            if sampled:
                return filled(*region, known, quota, span=longest).padded(span)

            def count_at(thresholds):
                return count_in(*region, thresholds, span=longest)

            found = threshold.find(state.threshold, part, quota, size, count_at)
            chosen = select_in(*region, found, limit, span=longest, capacity=slots)
            return *chosen, found

        short = 2 * -(-n // count)
        if span > max(short, _LARGE):
            found = step.workers.cond(
                jnp.all(jnp.diff(bounds) <= short),
                lambda: search(short),
                lambda: search(span),
            )
        else:
            found = search(span)
        if sampled:
            indices = found.indices(limit, slots, n)
            demand, found = found.demand, found.threshold
        else:
            indices, demand, found = found
        window = Window(bounds[owned], span, usual, long)
        return Choice(indices, demand, found, window), state

    def adapt(state, report, step):
        n = step.n
        demand = partitions.by_part(report.demand, step.index, step.w)
        found = partitions.by_part(report.threshold, step.index, step.w)
        reads = "histogram" in partition.reads
        histogram = report.details.histogram if reads else None
        moved = partition.adapt(
            state.partition, n, target.most(n), demand, found, histogram
        )
        wanted = target.now(step.index, n)
        return ExclusiveState(
            moved, threshold.adapt(state.threshold, demand, found, wanted)
        )

    made = Sparsifier(select, "disjoint", init=init, adapt=adapt, reads=partition.reads)
    return or_everything(made, target.is_everything)
