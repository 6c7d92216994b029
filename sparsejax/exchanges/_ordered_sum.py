"""The sum of all workers' pairs, added in the same order on all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._workers import vary_like
from sparsejax.exchanges._indices import distinct
from sparsejax.exchanges._units import Units
from sparsejax.parts import Step

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def sum_in_order(
    units: Units,
    indices: Int[Array, "w k"],
    values: Float[Array, "w k *D"],
    divisor: Int[Array, ""] | int,
    step: Step,
) -> tuple[Float[Array, " n"], Int[Array, "w k"]]:
    """The sum of all pairs over `divisor`, and their units. Replicated.

    The indices of one worker are distinct, so every device adds in the same order. On a
    GPU, a scatter with repeated indices adds in an arbitrary order, and replicas would
    drift apart.

    Args:
      units: static.
      indices: Int32[w, k], replicated: of units; empty slots hold their number.
      values: of each unit, replicated.
      divisor: of the sum.
      step: the step.

    Returns:
      sum: Float[n], 0 elsewhere.
      distinct: Int32[w, k], each unit in the slot of the first worker that sent it.
    """
    zeros = units.split(_xla.late_zeros(units.n, jnp.min(indices, initial=0)))
    zeros = vary_like(zeros, values)
    if step.support != "disjoint" and not _xla.on_cpu():
        return _with_marks(units, indices, values, divisor, zeros)
    values = values / divisor
    total = jax.lax.fori_loop(
        0,
        len(indices),
        lambda r, total: total.at[indices[r]].add(values[r], mode="drop"),
        zeros,
    )
    if step.support != "disjoint":
        indices = distinct(indices, units.number)
    return total.reshape(-1), indices


def _with_marks(units, indices, values, divisor, zeros):
    """Both in one walk: a unit to which nobody has added holds negative zeros.

    Sums of positive zeros and other numbers never are. So marks take no memory, which
    on accelerators is scarcer than time.
    """

    def add(r, carry):
        total, first = carry
        row = indices[r]
        known = total.at[row].get(mode="fill", fill_value=0)
        # Barrier against copy insertion: see `distinct`.
        known, total = _xla.read_before(known, total)
        head = known.reshape(len(row), -1)[:, 0]
        fresh = jnp.signbit(head) & (head == 0)
        first = first.at[r].set(jnp.where(fresh, row, units.number))
        given = values[r] / divisor
        added = known + jnp.where(given == 0, 0.0, given)
        return total.at[row].set(added, mode="drop"), first

    start = (-zeros, vary_like(jnp.zeros_like(indices), values))
    total, first = jax.lax.fori_loop(0, len(indices), add, start)
    return total.reshape(-1), first
