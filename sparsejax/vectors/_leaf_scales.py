"""A scale for each leaf in a block of slots, where a vector has several leaves.

A leaf of small values would vanish in a block that holds values of a leaf a thousand
times larger, or take the mean of those. So the leaves of a block are brought to one
size before they are encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt16

# Neighbouring leaves with scales of their own: each has four bits of a block's word,
# for a power of 4. More leaves of one block share them in turn.
LEAVES = 4
_BITS, _OCTAVES = 4, 2
# Of a float32: its exponent is the eight bits above the mantissa, plus the bias.
_MANTISSA, _BIAS = 23, 127


def levelled(
    rows: Float[Array, "b s"], leaves: Int[Array, "b s"]
) -> tuple[Float[Array, "b s"], UInt16[Array, " b"]]:
    """Rows whose leaves are alike, and the scales of each row as one word.

    Args:
      rows: finite.
      leaves: below `LEAVES`, of each slot.
    """
    magnitudes = jnp.abs(rows)
    largest = [
        jnp.max(jnp.where(leaves == leaf, magnitudes, 0.0), axis=1)
        for leaf in range(LEAVES)
    ]
    # Positive numbers grow with their bits. Zero has the smallest exponent.
    exponents = jax.lax.bitcast_convert_type(jnp.stack(largest), jnp.int32) >> _MANTISSA
    below = jnp.max(exponents, axis=0, keepdims=True) - exponents
    steps = jnp.minimum(below // _OCTAVES, (1 << _BITS) - 1)
    shifts = jnp.arange(0, LEAVES * _BITS, _BITS, dtype=jnp.int32)[:, None]
    words = jnp.sum(steps << shifts, axis=0, dtype=jnp.int32)
    return rows * _powers(words, leaves, 1), words.astype(jnp.uint16)


def restored(
    rows: Float[Array, "b s"], words: UInt16[Array, " b"], leaves: Int[Array, "b s"]
) -> Float[Array, "b s"]:
    """The inverse of `levelled`."""
    return rows * _powers(words.astype(jnp.int32), leaves, -1)


def _powers(
    words: Int[Array, " b"], leaves: Int[Array, "b s"], sign: int
) -> Float[Array, "b s"]:
    """4 to the power of each slot's number in the words, or to its negative."""
    shifts = leaves.astype(jnp.int32) * _BITS
    steps = words[:, None] >> shifts & (1 << _BITS) - 1
    bits = _BIAS + sign * _OCTAVES * steps << _MANTISSA
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
