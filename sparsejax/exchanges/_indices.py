"""Gathers all workers' indices and facts in one message, and unites the indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from sparsejax import _xla, partitions
from sparsejax._workers import vary_like
from sparsejax.exchanges._units import Units, indices_of
from sparsejax.parts import Choice, Step, Window
from sparsejax.vectors import _codec, _reach

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def facts_of(
    choice: Choice, step: Step
) -> tuple[Int[Array, ""], Float[Array, ""], Bool[Array, ""]]:
    """This worker's `(demand, threshold, dropped)` for the report. Per worker."""
    demand, threshold = choice.demand * choice.row_size, choice.threshold
    if step.present is not None:
        # An absent worker's vector is zero, for which a rule finds the least number.
        threshold = jnp.where(step.present | (threshold == 0), threshold, jnp.inf)
    return demand, threshold, jnp.asarray(step.dropped)


def gather_facts(choice: Choice, step: Step) -> tuple[Array, Array, Array]:
    """All workers' `(demand [w], threshold [w], dropped [w])`. Replicated."""
    facts = facts_of(choice, step)
    return _codec.unpack(step.workers.gather(_codec.pack(facts)), facts)


def gather_indices(
    choice: Choice, step: Step, *more: Array
) -> tuple[Int[Array, "w k"], tuple[Array, Array, Array], *tuple[Any, ...]]:
    """All workers' indices and facts, in one message. Replicated.

    Args:
      choice: a choice with indices, per worker.
      step: the step.
      *more: further arrays for the same message, per worker.

    Returns:
      `(indices [w, k], (demand [w], threshold [w], dropped [w]), *more [w, ...])`.
    """
    units = Units.of(choice, step.n).number
    indices, window = indices_of(choice), choice.window
    if window is None:
        window = Window(jnp.zeros((step.w,), jnp.int32), units)
    start, span, usual, long = window.start, window.span, window.usual, window.long
    mine = None if long is None else long[step.rank]
    code = _reach.encode_indices(
        indices, start[step.rank], span, units, usual=usual, long=mine
    )
    message = (code, facts_of(choice, step), *more)
    gathered = step.workers.gather(_codec.pack(message))
    codes, facts, *others = _codec.unpack(gathered, message)
    indices = _reach.decode_indices(
        codes, start, span, units, indices.shape[0], usual=usual, long=long
    )
    return indices, facts, *others


def histogram_of(
    indices: Int[Array, " m"], n: int, worker_count: int
) -> Int[Array, " B"]:
    """The number of `indices` in each of the equal blocks of `partitions.blocks`."""
    count, size = partitions.blocks(n, worker_count)
    blocks = jnp.where(indices < n, indices // size, count)
    return jnp.zeros((count,), jnp.int32).at[blocks].add(1, mode="drop")


def no_histogram(n: int, worker_count: int) -> Int[Array, " B"]:
    """The histogram of a step in which nothing was delivered."""
    return jnp.zeros((partitions.blocks(n, worker_count)[0],), jnp.int32)


def united(indices: Int[Array, "w k"], units: Units, step: Step) -> Int[Array, " m"]:
    """The coordinates of all workers' indices, without repetitions. Replicated.

    Empty slots hold `n`. Slots keep their order, and each coordinate stays in the slot
    of the first worker that chose this coordinate.
    """
    if step.support != "disjoint":
        indices = distinct(indices, units.number)
    return units.coordinates(indices.ravel())


def distinct(indices: Int[Array, "w k"], units: int) -> Int[Array, "w k"]:
    """`indices` without repetitions: only the first slot of a unit keeps the unit.

    Needs a byte per unit for marks. The indices of one worker must not repeat.
    Replicated.
    """

    def visit(r, carry):
        seen, kept = carry
        row = indices[r]
        known = seen.at[row].get(mode="fill", fill_value=True)
        # Barrier against copy insertion: without an order between this read and the
        # write below, XLA copies the marks.
        known, seen = _xla.read_before(known, seen)
        kept = kept.at[r].set(jnp.where(known, units, row))
        return seen.at[row].set(True, mode="drop"), kept

    start = (jnp.zeros((units,), jnp.bool_), jnp.zeros_like(indices))
    return jax.lax.fori_loop(0, len(indices), visit, vary_like(start, indices))[1]
