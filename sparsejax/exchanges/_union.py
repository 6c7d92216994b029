"""Delivers every worker's values at the union of all chosen coordinates."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from sparsejax import _xla, partitions
from sparsejax._checks import check_value_bits
from sparsejax._report import sparse_report
from sparsejax.exchanges._delayed_union import delayed_union
from sparsejax.exchanges._dense import EVERY_SUPPORT, or_whole
from sparsejax.exchanges._indices import (
    gather_facts,
    gather_indices,
    histogram_of,
    no_histogram,
    united,
)
from sparsejax.exchanges._units import Units
from sparsejax.exchanges._values import FULL, deliver_at, fill_shares
from sparsejax.parts import Delivery, Exchange

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class UnionDetails(NamedTuple):
    """`Report.details` of `union`. Replicated.

    Attributes:
      histogram: Int32[B], the number of delivered coordinates in each of B equal blocks
        of the vector.
      rounding: Float[], the rounding errors of values sent and of means sent back,
        relative to the values, as a mean over workers: 0 for 32 bits, and for short
        lists.
    """

    histogram: Int[Array, " B"]
    rounding: Float[Array, ""]


def union(value_bits: Any = None) -> Exchange:
    """All workers receive all indices, and average their values there.

    Each step sends two messages: an all-gather of the indices, in the shortest code,
    with the small facts of the report; and the mean of `w k` values. With fewer than 32
    bits, each value is sent to one worker, which averages, and the mean is sent back. A
    worker keeps the rounding errors of its own values, and w times the rounding errors
    of the means that it computes: the mean over workers loses nothing.

    Every worker delivers its value at every gathered coordinate, even at coordinates
    that only others chose. The union of overlapping choices grows with the number of
    workers. The union of disjoint choices has exactly the chosen coordinates. Indices
    that are equal on all workers are not sent.

    Args:
      value_bits: the bits of a value on the wire: 32 (float32, the default), 16
        (bfloat16), 8, 4, 2 or 1. Or a pair: the bits of a value sent to the worker that
        averages, and of a mean sent back; a single number below 8 means 8 bits back.
        Values are summed in float32, and rounding errors stay in the residuals; without
        a memory they are lost. Below 16 bits, each leaf in a block of 512 slots has its
        own scale; leaf i and leaf i + 16 share one. Short lists, for which scales or a
        message back would not pay, are sent in more bits.

    Returns:
      An exchange for all choices, of coordinates or rows.

    Raises:
      ValueError: for another `value_bits`.

    Example:
      >>> import sparsejax
      >>> tx = sparsejax.sparsify(
      ...     sparsejax.sparsifiers.everything(),
      ...     exchange=sparsejax.exchanges.union(),
      ...     memory=sparsejax.memories.error_feedback(),
      ... )
    """
    widths = check_value_bits(value_bits)
    full = widths == FULL

    def apply(vector, choice, state, step):
        units = Units.of(choice, step.n)
        if step.support == "agreed":
            facts = gather_facts(choice, step)
            # Barrier against the scheduler: XLA would write the update's zeros as soon
            # as the indices are known. After `vector`, the zeros can reuse the
            # gradient's memory.
            indices = units.coordinates(_xla.after(choice.indices, vector))
        else:
            indices, facts = gather_indices(choice, step)
            indices = united(indices, units, step)
        indices = fill_shares(indices, step, widths)
        update, left, rounding = deliver_at(vector, indices, step, widths)
        details = UnionDetails(histogram_of(indices, step.n, step.w), rounding)
        report = sparse_report(indices, step.n, facts, details)
        return Delivery(update, indices, left, report), state

    def details(layout, worker_count):
        return UnionDetails(
            no_histogram(layout.n, worker_count), jnp.zeros((), jnp.float32)
        )

    def whole(layout, worker_count):
        return UnionDetails(
            _block_sizes(layout.n, worker_count), jnp.zeros((), jnp.float32)
        )

    return Exchange(
        or_whole(apply, whole, widths),
        EVERY_SUPPORT,
        "union",
        details=details,
        tells=frozenset({"histogram"}),
        later=functools.partial(delayed_union, name="union") if full else None,
    )


def _block_sizes(n: int, worker_count: int) -> Int[Array, " B"]:
    count, size = partitions.blocks(n, worker_count)
    first = jnp.arange(count, dtype=jnp.int32) * size
    return jnp.minimum(n - first, size)
