"""The code of one bit a value: the signs of a block, or only its largest values.

If magnitudes are alike, signs and one magnitude describe a block well. If few values
hold most of its energy, signs would add noise everywhere. Each block uses the code that
leaves the smaller error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla
from sparsejax.vectors._value_blocks import (
    BlockCode,
    Blocks,
    from_bfloat16,
    shares_of,
    to_bfloat16,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Shaped

# One bit for each of 16 slots is a word of two bytes. A byte holds the number of one of
# the slots in four bits, a sign in one, and a level in three: the largest magnitude of
# the block times a power of 2^-0.75, or zero.
_SLOTS, _BYTES = 16, 2
_OCTAVES = 0.75
_SIGN, _ZERO = 1 << 3, 7
# The mask of the last bits of a number, which hold its slot and its sign.
_PLACE_AND_SIGN = 2 * _SLOTS - 1
_LEVELS = np.append(2.0 ** (-_OCTAVES * np.arange(_ZERO)), 0.0).astype(np.float32)
# A scale is not negative, so its sign bit can mark the code of its block.
_FEW = 1 << 15


def one_bit(m: int) -> BlockCode:
    """1 bit for each of `m` values.

    With the signs, each value, even zero, is decoded as the mean magnitude of its block
    with its sign. With the largest values, two of every 16 slots are decoded to within
    30 %, unless they are below 2^-4.9 of the largest of their block, and all other
    slots as zero.
    """
    blocks = Blocks.of(m, 1)

    def encode(rows):
        shares, largest = shares_of(rows)
        negative = jnp.signbit(rows)
        total = jnp.sum(shares, axis=1)
        mean = total / blocks.filled
        # Decoding x as q reduces the sum of squares of a block by 2 q x - q^2.
        by_signs = mean * total
        few, by_few = _largest(_grid(shares), _grid(negative))
        chosen = by_few > by_signs
        scales = to_bfloat16(jnp.where(chosen, 1.0, mean) * largest)
        scales = jnp.where(chosen, scales | _FEW, scales)
        signs = blocks.body(jnp.zeros_like(rows, jnp.int32), negative)
        body = jnp.where(chosen[:, None], few, signs)
        return blocks.message(scales[:, None], body)

    def decode(words):
        scales, body = blocks.parts(words, 1)
        chosen, largest = scales >= _FEW, from_bfloat16(scales & (_FEW - 1))
        _, negative = blocks.slots(body)
        few = _placed(body).reshape(negative.shape)
        shares = jnp.where(chosen, few, jnp.where(negative, -1.0, 1.0))
        return shares * largest

    return BlockCode(blocks, blocks.size(1), encode, decode)


def _grid(rows: Shaped[Array, "b s"]) -> Shaped[Array, "b 16 d"]:
    """The 16 slots of each of d words."""
    return rows.reshape(rows.shape[0], _SLOTS, -1)


def _largest(
    shares: Float[Array, "b 16 d"], negative: Bool[Array, "b 16 d"]
) -> tuple[Int[Array, "b d"], Float[Array, " b"]]:
    """Words of the two largest of 16 slots, and the squares that they remove."""
    # One number orders shares, and holds place and sign in its last bits: a positive
    # float32 grows with its bits.
    slots = jnp.arange(_SLOTS, dtype=jnp.int32)[None, :, None] << 1
    numbers = jax.lax.bitcast_convert_type(shares, jnp.int32) & ~_PLACE_AND_SIGN
    numbers = numbers | slots | negative.astype(jnp.int32)
    words, taken = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)
    for byte in range(_BYTES):
        first = jnp.max(numbers, axis=1)
        share = jax.lax.bitcast_convert_type(first & ~_PLACE_AND_SIGN, jnp.float32)
        level = jnp.round(jnp.log2(share) / -_OCTAVES)
        level = jnp.minimum(level, _ZERO).astype(jnp.int32)
        place, minus = first >> 1 & _SLOTS - 1, first & 1
        words = words | (place << 4 | minus * _SIGN | level) << 8 * byte
        decoded = jnp.asarray(_LEVELS)[level]
        taken = taken + jnp.sum(decoded * (2 * share - decoded), axis=1)
        numbers = jnp.where(numbers == first[:, None], -1, numbers)
    return words, taken


def _placed(words: Int[Array, "b d"]) -> Float[Array, "b 16 d"]:
    """The inverse of `_largest`: shares, with their signs."""
    codes = [words >> 8 * byte for byte in range(_BYTES)]
    signed = [
        jnp.where(code & _SIGN > 0, -1.0, 1.0) * jnp.asarray(_LEVELS)[code & _ZERO]
        for code in codes
    ]
    slots = [code >> 4 & _SLOTS - 1 for code in codes]
    slots, signed = _xla.computed_once((slots, signed))
    # One slot of 16 at a time: XLA:CPU does not vectorise the loop over a broadcast.
    rows = [
        sum(jnp.where(at == slot, x, 0.0) for at, x in zip(slots, signed, strict=True))
        for slot in range(_SLOTS)
    ]
    return jnp.stack(rows, axis=1)
