"""Sums of pairs of index and value, the same on all workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._report import counted_report
from sparsejax._workers import vary_like
from sparsejax.exchanges._indices import facts_of
from sparsejax.exchanges._ordered_sum import sum_in_order
from sparsejax.exchanges._units import Units, indices_of
from sparsejax.exchanges._values import mean_error
from sparsejax.parts import Choice, Report, Step
from sparsejax.vectors import _codec

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Float, Int

    from sparsejax._layout import Layout


class PairsDetails(NamedTuple):
    """`Report.details` of `pairs`. Replicated.

    Attributes:
      chosen: Int32[w], the number of coordinates that each worker sent.
      union: Int32[], the number of distinct coordinates among them: `Report.sent`.
      rounding: Float[], the mean over workers of the rounding errors of values,
        relative to the values: 0 for 32 bits, and for short lists.
    """

    chosen: Int[Array, " w"]
    union: Int[Array, ""]
    rounding: Float[Array, ""]


def no_pairs(layout: Layout, worker_count: int) -> PairsDetails:
    """The details of a step in which nothing was sent."""
    del layout
    none = jnp.zeros((worker_count,), jnp.int32)
    return PairsDetails(none, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))


def add_pairs(
    indices: Int[Array, "w k"],
    values: Float[Array, "w k *D"],
    facts: tuple[Array, Array, Array],
    units: Units,
    step: Step,
    divisor: Float[Array, ""] | int,
    errors: Sequence[BFloat16[Array, " w"]],
) -> tuple[Float[Array, " n"], Float[Array, " kD"], Report]:
    """The mean of all workers' pairs: their sum divided by `divisor`.

    Args:
      indices: Int32[w, k], replicated: units; empty slots hold `units.number`.
      values: the values of each unit, replicated.
      facts: `(demand [w], threshold [w], dropped [w])`, replicated.
      units: static, the units of the indices.
      step: the step.
      divisor: the number of workers that took part.
      errors: all workers' `told_errors`.

    Returns:
      mean: Float[n], replicated, rounded to the dtypes of the gradient.
      rest: Float[kD], per worker: the rounding errors that this worker keeps, at its
        own indices; 0 unless it was the first worker to send the coordinate.
      report: Report, replicated.
    """
    layout, count = step.layout, step.w
    chosen = jnp.sum(indices < units.number, axis=1, dtype=jnp.int32) * units.size
    # The sum uses memory only after the whole message has been read.
    read = (jnp.min(indices, initial=0), values, facts, errors)
    until, values, facts, errors = _xla.computed_together(read)
    total, number, first = sum_in_order(units, indices, values, divisor, until, step)
    sent = number * units.size
    details = PairsDetails(chosen, sent, mean_error(errors))
    report = counted_report(sent, step.n, facts, details)
    own = jnp.zeros((values[0].size,), values.dtype)
    if first is not None:
        first = units.coordinates(first.ravel())
        mean = _xla.values_at(total, first)
        rest = mean - layout.round(first, mean)
        total = total.at[first].add(-rest, mode="drop")
        mine = jnp.arange(count, dtype=jnp.int32) == step.rank
        rest = jnp.where(mine[:, None], rest.reshape(count, -1), 0.0)
        own = own + divisor * jnp.sum(rest, axis=0)
    return total, own, report


def costs_more_than_the_whole(
    slots: int, value_words: int, units: Units, step: Step
) -> bool:
    """Whether pairs of all workers need more bytes than a sum of whole vectors. Static.

    Args:
      slots: k, the slots of each worker.
      value_words: the number of 16-bit words of a worker's values.
      units: static, the units of the choice.
      step: the step.
    """
    if not step.layout.exact:  # The sum does not show who keeps an error.
        return False
    message = _codec.cheapest(slots, units.number).size + 2 * value_words
    return step.w * message > 2 * 4 * units.n


def add_whole(
    choice: Choice,
    values: Float[Array, "k *D"],
    units: Units,
    step: Step,
) -> tuple[Float[Array, " n"], Report]:
    """The exact mean of all workers' pairs by an all-reduce of vectors. Replicated.

    A coordinate whose values cancel does not count as sent.
    """
    indices = indices_of(choice)
    own = _xla.late_zeros(units.n, jnp.min(indices, initial=0))
    own = units.split(vary_like(own, values)).at[indices].set(values, mode="drop")
    total = step.workers.sum(own.reshape(-1))
    chosen = jnp.sum(indices < units.number, dtype=jnp.int32) * units.size
    message = (facts_of(choice, step), chosen)
    gathered = step.workers.gather(_codec.pack(message))
    facts, chosen = _codec.unpack(gathered, message)
    sent = jnp.sum(total != 0, dtype=jnp.int32)
    details = PairsDetails(chosen, sent, jnp.zeros((), jnp.float32))
    density = sent.astype(jnp.float32) / max(step.n, 1)
    demand, threshold, dropped = facts
    return total / step.w, Report(demand, sent, density, threshold, dropped, details)
