"""Sums of pairs of index and value, the same on all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._report import sparse_report
from sparsejax._workers import vary_like
from sparsejax.exchanges._indices import united
from sparsejax.exchanges._units import Units
from sparsejax.parts import Report, Step

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from sparsejax._layout import Layout


class PairsDetails(NamedTuple):
    """`Report.details` of `pairs`. Replicated.

    Attributes:
      chosen: Int32[w], the number of coordinates that each worker sent.
      union: Int32[], the number of distinct coordinates among them, as `Report.sent`.
    """

    chosen: Int[Array, " w"]
    union: Int[Array, ""]


def no_pairs(layout: Layout, worker_count: int) -> PairsDetails:
    """The details of a step in which nothing was sent."""
    del layout
    none = jnp.zeros((worker_count,), jnp.int32)
    return PairsDetails(none, jnp.zeros((), jnp.int32))


def add_pairs(
    indices: Int[Array, "w k"],
    values: Float[Array, "w k *D"],
    facts: tuple[Array, Array, Array],
    units: Units,
    step: Step,
    divisor: Int[Array, ""] | int,
) -> tuple[Float[Array, " n"], Float[Array, " kD"], Report]:
    """The mean of all workers' pairs: their sum over `divisor`.

    Args:
      indices: Int32[w, k], replicated: of units; empty slots hold their number.
      values: of each unit, replicated.
      facts: `(demand [w], threshold [w], dropped [w])`, replicated.
      units: static.
      step: the step.
      divisor: the number of workers that count.

    Returns:
      mean: Float[n], replicated, rounded to the dtypes of the gradient.
      rest: Float[kD], per worker: the rounding errors that this worker keeps, at its
        own indices: of coordinates that it was the first to send.
      report: Report, replicated.
    """
    layout, count = step.layout, step.w
    total = _sum_in_order(units, indices, values / divisor)
    first = united(indices, units, step)
    chosen = jnp.sum(indices < units.number, axis=1, dtype=jnp.int32) * units.size
    report = sparse_report(first, step.n, facts)
    report = report._replace(details=PairsDetails(chosen, report.sent))
    own = jnp.zeros((values[0].size,), values.dtype)
    if not layout.exact:
        mean = total.at[first].get(mode="fill", fill_value=0)
        rest = mean - layout.round(first, mean)
        total = total.at[first].add(-rest, mode="drop")
        mine = jnp.arange(count, dtype=jnp.int32) == step.rank
        rest = jnp.where(mine[:, None], rest.reshape(count, -1), 0.0)
        own = own + divisor * jnp.sum(rest, axis=0)
    return total, own, report


def _sum_in_order(
    units: Units, indices: Int[Array, "w k"], values: Float[Array, "w k *D"]
) -> Float[Array, " n"]:
    """The sum of all pairs, added worker by worker. Replicated.

    The indices of one worker are distinct, so every device adds in the same order. On a
    GPU, a scatter with repeated indices adds in an arbitrary order, and replicas would
    drift apart.
    """
    zeros = units.split(_xla.late_zeros(units.n, jnp.min(indices, initial=0)))
    total = jax.lax.fori_loop(
        0,
        len(indices),
        lambda r, total: total.at[indices[r]].add(values[r], mode="drop"),
        vary_like(zeros, values),
    )
    return total.reshape(-1)
