"""Encodes and decodes the values of pairs, for `pairs` and its late form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from sparsejax.exchanges._units import Units
from sparsejax.exchanges._values import told_errors
from sparsejax.vectors._narrow import in_slots, value_code

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Float, Int, UInt16

    from sparsejax._layout import Layout


def encoded(
    own: Float[Array, "k *D"], coordinates: Int[Array, " kD"], layout: Layout, bits: int
) -> tuple[UInt16[Array, " c"], Float[Array, " kD"], tuple[BFloat16[Array, ""], ...]]:
    """A worker's values as a message.

    Args:
      own: the values of each unit.
      coordinates: the coordinates of the values; empty slots hold `n`.
      layout: the layout.
      bits: the bits of a value.

    Returns:
      words: the message.
      values: the values as they arrive.
      errors: the `told_errors`; empty for 32 bits.
    """
    own, leaves = own.reshape(-1), layout.leaf_turns(coordinates)
    code = value_code(bits, own.size, layout.leaf_count)
    words = code.encode(own, leaves)
    values = in_slots(code.decode(words, leaves), coordinates < layout.n, bits)
    return words, values, () if bits == 32 else told_errors(own, values, own.size)


def decoded(
    words: UInt16[Array, "w c"],
    indices: Int[Array, "w k"],
    units: Units,
    layout: Layout,
    bits: int,
) -> Float[Array, "w k *D"]:
    """All workers' values, from their messages and the indices of their units."""
    workers, slots = indices.shape
    code = value_code(bits, slots * units.size, layout.leaf_count)
    leaves = layout.leaf_turns(jax.vmap(units.coordinates)(indices))
    values = jax.vmap(code.decode)(words, leaves)
    return values.reshape(workers, slots, *units.shape)
