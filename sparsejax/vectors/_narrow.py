"""Codes for values in few bits: messages of 16-bit words, without a pass over n.

Rounding needs no unbiased noise: the error stays with the worker, which sends the error
later. Narrow codes work on blocks of neighbouring slots, so that leaves of different
scale share no more than the blocks at their borders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# The number one as a word: roots of levels are fractions of it.
_WHOLE = (1 << 16) - 1

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
    """8 or 4 bits: a sign, and the nearest of 127 or 7 levels, or zero.

    Levels are squares of evenly spaced numbers, so they lie closer where values are
    small, as most are. They reach from the smallest magnitude of a block to the
    largest, and from `1 / top^2` of the largest where the smallest lies below: a value
    there becomes the lowest level or zero. The error is at most 1.2 % of the largest
    magnitude with 8 bits, and 14 % with 4.
    """
    blocks, top = Blocks.of(m, bits), (1 << bits - 1) - 1
    gaps, lowest = top - 1, -(-_WHOLE // top)

    def encode(values):
        rows = blocks.split(values)
        shares, largest = shares_of(rows)
        start = jnp.floor(_WHOLE * jnp.sqrt(_smallest(shares)))
        start = jnp.clip(start, lowest, _WHOLE - 1)
        # In gaps between roots of levels, the lowest of which lies at `base`.
        scale = gaps * _WHOLE / (_WHOLE - start)[:, None]
        base = scale * start[:, None] / _WHOLE
        squares = shares * scale**2
        # The squares of x and x + 1 part at (x + 1/2)^2 + 1/4.
        above = jnp.floor(0.5 + jnp.sqrt(jnp.maximum(squares - 0.25, 0)) - base)
        levels = jnp.where(squares < base**2 / 2, 0, 1 + jnp.clip(above, 0, gaps))
        scales = jnp.stack([to_bfloat16(largest), start.astype(jnp.uint16)], axis=1)
        return blocks.pack(scales, levels.astype(jnp.int32), jnp.signbit(rows))

    def decode(words):
        scales, levels, negative = blocks.unpack(words, 2)
        largest, start = from_bfloat16(scales[:, :1]), scales[:, 1:].astype(jnp.int32)
        # Integers, so that compilers cannot round one message in two ways.
        roots = gaps * start + (levels - 1) * (_WHOLE - start)
        roots = jnp.where(levels > 0, roots, 0).astype(jnp.float32) / (gaps * _WHOLE)
        magnitudes = roots * roots * largest
        return blocks.join(jnp.where(negative, -magnitudes, magnitudes))

    return ValueCode(blocks.size(2), encode, decode)


def _two_means(m: int) -> ValueCode:
    """2 bits: a sign, and whether the magnitude is one of the larger of its block.

    These are decoded as their mean, and the others as theirs, zeros among them too. The
    means travel along, so a block without zeros keeps its sum of magnitudes.
    """
    blocks = Blocks.of(m, 2)

    def encode(values):
        rows = blocks.split(values)
        shares, largest = shares_of(rows)
        # In the middle between the smallest and the largest, in logarithms.
        edge = jnp.maximum(jnp.sqrt(_smallest(shares)), _LOWEST_EDGE)
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


def _smallest(shares: Float[Array, "b s"]) -> Float[Array, " b"]:
    """The smallest share of each block that is not zero; 1 where all are."""
    return jnp.min(jnp.where(shares > 0, shares, 1.0), axis=1)
