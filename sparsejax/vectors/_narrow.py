"""Codes for values in few bits: messages of 16-bit words, without a pass over n.

Rounding needs no unbiased noise: the error stays with the worker, which sends the error
later. Narrow codes work on blocks of neighbouring slots, so that leaves of different
scale do not share one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsejax.vectors import _bits
from sparsejax.vectors._one_bit import one_bit
from sparsejax.vectors._value_blocks import (
    Blocks,
    ValueCode,
    from_bfloat16,
    shares_of,
    to_bfloat16,
)

# Of the largest magnitude of a block: with 2 bits, larger magnitudes are large ones.
_LOWEST_EDGE = 0.25


def value_code(bits: int, m: int) -> ValueCode:
    """The code of `bits` bits for `m` values, or of 16 bits where that is no longer.

    Args:
      bits: 32, 16, 8, 4, 2 or 1.
      m: static, the number of values.
    """
    if bits == 32:
        return _full(m)
    half = _half(m)
    if bits == 16:
        return half
    if bits in (8, 4):
        code = _squares(bits, m)
    else:
        code = _two_means(m) if bits == 2 else one_bit(m)
    return code if code.size < half.size else half


def _full(m: int) -> ValueCode:
    """Float32, exact."""

    def encode(values):
        return jax.lax.bitcast_convert_type(values, jnp.uint16).reshape(-1)

    def decode(words):
        return jax.lax.bitcast_convert_type(words.reshape(-1, 2), jnp.float32)

    return ValueCode(2 * m, encode, decode)


def _half(m: int) -> ValueCode:
    """bfloat16."""
    return ValueCode(m, to_bfloat16, from_bfloat16)


def _squares(bits: int, m: int) -> ValueCode:
    """8 or 4 bits: a sign, and a level, which is the root of the magnitude.

    Level i of 127 or 7 is decoded as its square, as a share of the largest magnitude of
    the block, and each value takes the nearest. So levels lie closer where values are
    small, as most are. The error is at most 1.2 % of the largest with 8 bits, and 14 %
    with 4; near a hundredth of the largest 8 % of a value with 8 bits, and all of it
    with 4.
    """
    blocks, top = Blocks.of(m, bits), (1 << bits - 1) - 1

    def encode(values):
        rows = blocks.split(values)
        shares, largest = shares_of(rows)
        # The squares of i and i + 1 part at i^2 + i + 1/2.
        levels = jnp.floor(0.5 + jnp.sqrt(jnp.maximum(top**2 * shares - 0.25, 0)))
        scales = to_bfloat16(largest)[:, None]
        return blocks.pack(scales, levels.astype(jnp.int32), jnp.signbit(rows))

    def decode(words):
        scales, levels, negative = blocks.unpack(words, 1)
        shares = (levels * levels).astype(jnp.float32) / top**2
        return blocks.join(jnp.where(negative, -shares, shares) * from_bfloat16(scales))

    return ValueCode(blocks.size(1), encode, decode)


def _two_means(m: int) -> ValueCode:
    """2 bits: a sign, and whether the magnitude is one of the larger of its block.

    These are decoded as their mean, and the others as theirs, zeros among them too. The
    means travel along, so a block keeps its sum of magnitudes.
    """
    blocks = Blocks.of(m, 2)

    def encode(values):
        rows = blocks.split(values)
        shares, largest = shares_of(rows)
        smallest = jnp.min(jnp.where(shares > 0, shares, 1.0), axis=1)
        # In the middle between the smallest and the largest, in logarithms.
        edge = jnp.maximum(jnp.sqrt(smallest), _LOWEST_EDGE)
        large = shares >= edge[:, None]
        members = [(shares > 0) & ~large, large]
        number = jnp.maximum(_bits.sums_at_once(members), 1).astype(jnp.float32)
        totals = [jnp.sum(jnp.where(mine, shares, 0.0), axis=1) for mine in members]
        means = to_bfloat16((jnp.stack(totals) / number).T * largest[:, None])
        return blocks.pack(means, large.astype(jnp.int32), jnp.signbit(rows))

    def decode(words):
        means, large, negative = blocks.unpack(words, 2)
        lower, upper = from_bfloat16(means.T)[:, :, None]
        magnitudes = jnp.where(large > 0, upper, lower)
        return blocks.join(jnp.where(negative, -magnitudes, magnitudes))

    return ValueCode(blocks.size(2), encode, decode)
