"""A scale for each leaf in a block of slots, where a vector has several leaves.

In a block that also holds values of a leaf a thousand times larger, the small values
of a leaf would vanish, or be decoded as the mean of the large ones. So the leaves of a
block are brought to one size, within a factor of 4, before they are encoded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt16

# The most scales in a block. In a block with more leaves, leaf i uses scale
# `i mod (number of scales)`.
LEAVES = 16
# One 16-bit word holds four scales, powers of 4, in 4 bits each. Blocks have at most
# m / 32 such words for a list of m values, but at least one.
_WORD, _BITS, _OCTAVES = 4, 4, 2
_PAYING = 32
# The layout of a float32: 23 bits of mantissa, then the exponent with a bias of 127.
_MANTISSA, _BIAS = 23, 127


def words_for(leaf_count: int, m: int) -> int:
    """Static: the words of scales in each block, for `m` values of these leaves."""
    words = -(-min(leaf_count, LEAVES) // _WORD)
    return min(words, max(1, m // _PAYING))


def levelled(
    rows: Float[Array, "b s"], leaves: Int[Array, "b s"], words: int
) -> tuple[Float[Array, "b s"], UInt16[Array, "b c"]]:
    """Rows whose leaves have similar sizes, and the scales of each row.

    Args:
      rows: finite values.
      leaves: the leaf of each slot, a number below `LEAVES`.
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
