"""A scale for each leaf in a block of slots, where a vector has several leaves.

A leaf of small values would vanish in a block that holds values of a leaf a thousand
times larger, or take the mean of those. So the leaves of a block are brought to one
size, within a factor of 4, before they are encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt16

# Neighbouring leaves with scales of their own. More leaves of one block share them in
# turn.
LEAVES = 16
# A word tells four leaves' powers of 4, and pays for so many slots.
_WORD, _BITS, _OCTAVES = 4, 4, 2
_PAYING = 32
# Of a float32: its exponent is the eight bits above the mantissa, plus the bias.
_MANTISSA, _BIAS = 23, 127


def words_for(leaf_count: int, m: int) -> int:
    """Words of scales for each block of `m` values of so many leaves. Static."""
    words = -(-min(leaf_count, LEAVES) // _WORD)
    return min(words, max(1, m // _PAYING))


def levelled(
    rows: Float[Array, "b s"], leaves: Int[Array, "b s"], words: int
) -> tuple[Float[Array, "b s"], UInt16[Array, "b c"]]:
    """Rows whose leaves are alike, and the scales of each row.

    Args:
      rows: finite.
      leaves: below `LEAVES`, of each slot.
      words: c, static: see `words_for`.
    """
    magnitudes, number = jnp.abs(rows), words * _WORD
    largest = [
        jnp.max(jnp.where(leaves % number == leaf, magnitudes, 0.0), axis=1)
        for leaf in range(number)
    ]
    # Positive numbers grow with their bits. Zero has the smallest exponent.
    exponents = jax.lax.bitcast_convert_type(jnp.stack(largest), jnp.int32) >> _MANTISSA
    below = jnp.max(exponents, axis=0, keepdims=True) - exponents
    steps = jnp.minimum(below // _OCTAVES, (1 << _BITS) - 1)
    shifts = jnp.arange(0, _WORD * _BITS, _BITS, dtype=jnp.int32)[None, :, None]
    steps = steps.reshape(words, _WORD, -1) << shifts
    scales = jnp.sum(steps, axis=1, dtype=jnp.int32).T
    return rows * _powers(scales, leaves, 1), scales.astype(jnp.uint16)


def restored(
    rows: Float[Array, "b s"], scales: UInt16[Array, "b c"], leaves: Int[Array, "b s"]
) -> Float[Array, "b s"]:
    """The inverse of `levelled`."""
    return rows * _powers(scales.astype(jnp.int32), leaves, -1)


def _powers(
    scales: Int[Array, "b c"], leaves: Int[Array, "b s"], sign: int
) -> Float[Array, "b s"]:
    """4 to the power of each slot's number in the scales, or to its negative."""
    words = scales.shape[1]
    leaves = leaves.astype(jnp.int32) % (words * _WORD)
    held = scales[:, :1]
    for word in range(1, words):
        held = jnp.where(leaves // _WORD == word, scales[:, word : word + 1], held)
    steps = held >> leaves % _WORD * _BITS & (1 << _BITS) - 1
    bits = _BIAS + sign * _OCTAVES * steps << _MANTISSA
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
