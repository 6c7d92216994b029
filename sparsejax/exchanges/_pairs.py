"""Delivers every worker's pairs of index and value to all workers."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from sparsejax._checks import check_value_bits
from sparsejax.exchanges._delayed_pairs import delayed_pairs
from sparsejax.exchanges._dense import EVERY_SUPPORT, or_whole
from sparsejax.exchanges._indices import gather_indices
from sparsejax.exchanges._pair_sums import (
    PairsDetails,
    add_pairs,
    add_whole,
    costs_more_than_the_whole,
    no_pairs,
)
from sparsejax.exchanges._pair_values import decoded, encoded
from sparsejax.exchanges._units import Units
from sparsejax.parts import Delivery, Exchange
from sparsejax.vectors._narrow import value_code


def pairs(value_bits: Any = None) -> Exchange:
    """All workers receive all pairs, and add the values of each coordinate.

    Each step sends one message: an all-gather of the indices, in the shortest code, the
    values, and the small facts of the report. A worker delivers its values at its own
    coordinates only.

    The bytes that a worker receives grow with the number of workers. Where an
    all-reduce of the whole vector needs fewer bytes, such as at 25 % with eight
    workers, it carries the same values instead. The number of distinct coordinates
    grows with the number of workers too: see `sent` and `density` of the report.
    Choices that are equal on all workers need fewer bytes with `union`.

    Args:
      value_bits: the bits of a value on the wire: 32 (float32, the default), 16
        (bfloat16), 8, 4, 2 or 1. Values are summed in float32, and rounding errors
        stay in the residual; without a memory they are lost. Below 16 bits, each leaf
        in a block of 512 slots has its own scale; leaf i and leaf i + 16 share one.
        Short lists, for which scales would not pay, are sent in more bits.

    Returns:
      An exchange for all choices, of coordinates or rows.

    Raises:
      ValueError: for another `value_bits`.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.topk(0.01),
      ...     exchange=exchanges.pairs(),
      ...     memory=memories.error_feedback(),
      ... )
    """
    bits, _ = check_value_bits(value_bits, ways=1)

    def apply(vector, choice, state, step):
        units = Units.of(choice, step.n)
        own = units.values(vector, choice.indices)
        length = value_code(bits, own.size, step.layout.leaf_count).size
        delivered = units.coordinates(choice.indices)
        if costs_more_than_the_whole(choice.indices.size, length, units, step):
            mean, report = add_whole(choice, own, units, step)
            left = jnp.zeros_like(own).reshape(-1)
            return Delivery(mean, delivered, left, report), state
        words, values, errors = encoded(own, delivered, step.layout, bits)
        left = own.reshape(-1) - values
        indices, facts, words, *errors = gather_indices(choice, step, words, *errors)
        received = decoded(words, indices, units, step.layout, bits)
        mean, rest, report = add_pairs(
            indices, received, facts, units, step, step.w, errors
        )
        return Delivery(mean, delivered, left + rest, report), state

    def whole(layout, worker_count):
        everything = jnp.full((worker_count,), layout.n, jnp.int32)
        count = jnp.asarray(layout.n, jnp.int32)
        return PairsDetails(everything, count, jnp.zeros((), jnp.float32))

    return Exchange(
        or_whole(apply, whole, (bits, bits)),
        EVERY_SUPPORT,
        "pairs",
        details=no_pairs,
        later=functools.partial(delayed_pairs, bits),
    )
