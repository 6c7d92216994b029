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
    divisor: Float[Array, ""] | int,
    until: Int[Array, ""],
    step: Step,
) -> tuple[Float[Array, " n"], Int[Array, ""], Int[Array, "w k"] | None]:
    """The sum of all pairs, divided by `divisor`, and the pairs' units. Replicated.

    The indices of one worker are distinct, so every device adds in the same order. On a
    GPU, a scatter with repeated indices adds in an arbitrary order, and replicas would
    drift apart.

    Args:
      units: static, the units of the indices.
      indices: Int32[w, k], replicated: units; empty slots hold `units.number`.
      values: the values of each unit, replicated.
      divisor: the number by which the sum is divided.
      until: Int32[], not negative: the sum uses memory only after `until` is computed.
      step: the step.

    Returns:
      sum: Float[n], 0 at coordinates that no worker sent.
      number: Int32[], the number of distinct units.
      distinct: Int32[w, k], each unit in the slot of the first worker that sent it;
        None if the gradient's dtypes hold every sum: then no caller needs the units.
    """
    zeros = units.split(_xla.late_zeros(units.n, until))
    zeros = vary_like(zeros, values)
    if step.support != "disjoint" and not _xla.on_cpu():
        listed = not step.layout.exact
        return _with_marks(units, indices, values, divisor, zeros, listed)
    values = values / divisor
    total = jax.lax.fori_loop(
        0,
        len(indices),
        lambda r, total: total.at[indices[r]].add(values[r], mode="drop"),
        zeros,
    )
    if step.support != "disjoint":
        indices = distinct(indices, units.number)
    number = jnp.sum(indices < units.number, dtype=jnp.int32)
    return total.reshape(-1), number, None if step.layout.exact else indices


def _with_marks(units, indices, values, divisor, zeros, listed):
    """Adds the pairs in one loop, in which -0.0 marks a unit without a value.

    The sum starts as -0.0, and no addition leaves -0.0. So the marks need no memory,
    which is scarcer than time on accelerators. Unless `listed`, the units are only
    counted.
    """

    def add(r, carry):
        total, found = carry
        row = indices[r]
        known = total.at[row].get(mode="fill", fill_value=0)
        # Barrier against copy insertion: see `distinct`.
        known, total = _xla.read_before(known, total)
        head = known.reshape(len(row), -1)[:, 0]
        fresh = jnp.signbit(head) & (head == 0)
        if listed:
            found = found.at[r].set(jnp.where(fresh, row, units.number))
        else:
            found = found + fresh.astype(jnp.int32)
        added = known + values[r] / divisor
        # Devices that flush subnormals make -0.0 of a tiny sum, which would be a mark.
        added = jnp.where(added == 0, 0.0, added)
        return total.at[row].set(added, mode="drop"), found

    found = jnp.zeros_like(indices if listed else indices[0])
    start = (-zeros, vary_like(found, values))
    total, found = jax.lax.fori_loop(0, len(indices), add, start)
    counts = (found < units.number) if listed else found
    number = jnp.sum(counts, dtype=jnp.int32)
    return total.reshape(-1), number, found if listed else None
