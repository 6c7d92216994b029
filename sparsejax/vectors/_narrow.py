"""Codes for values in few bits: messages of 16-bit words, without a pass over n.

Rounding needs no unbiased noise: the error stays with the worker, which sends the error
later. Narrow codes work on blocks of neighbouring slots, and in a block each leaf of
the gradient has a scale of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.vectors import _leaf_scales
from sparsejax.vectors._one_bit import one_bit
from sparsejax.vectors._value_blocks import (
    BlockCode,
    Blocks,
    from_bfloat16,
    shares_of,
    to_bfloat16,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int, UInt16

    Leaves = Int[Array, " m"] | None

# The number one as a word: roots of levels are fractions of it.
_WHOLE = (1 << 16) - 1

# With 2 bits: the lowest border between small and large magnitudes, as a fraction of
# the block's largest.
_LOWEST_EDGE = 0.25


class ValueCode(NamedTuple):
    """A code for `m` float32 values.

    Attributes:
      size: static, 16-bit words of an encoded list.
      full: static, the number of values, m or a few more, that fill its blocks.
      encode: `(values Float32[m], leaves) -> UInt16[size]`. `leaves` is the
        `Layout.leaf_turns` of the values' coordinates.
      decode: `(words UInt16[size], leaves) -> Float32[m]`, finite.
    """

    size: int
    full: int
    encode: Callable[[Float32[Array, " m"], Leaves], UInt16[Array, " c"]]
    decode: Callable[[UInt16[Array, " c"], Leaves], Float32[Array, " m"]]


def value_code(bits: int, m: int, leaf_count: int = 1) -> ValueCode:
    """The code of `bits` bits for `m` values; a wider one if its message is not longer.

    Args:
      bits: 32, 16, 8, 4, 2 or 1.
      m: static, the number of values.
      leaf_count: static, the number of leaves to which the values belong.
    """
    if bits == 32:
        return _full(m)
    if bits == 16:
        return _half(m)
    if bits in (8, 4):
        code = _squares(bits, m)
    else:
        code = _two_means(m) if bits == 2 else one_bit(m)
    code = _by_leaf(code, leaf_count) if leaf_count > 1 else _plain(code)
    wider = value_code(2 * bits, m, leaf_count)
    return code if code.size < wider.size else wider


def in_slots(
    decoded: Float[Array, "*shape"], filled: Bool[Array, "*shape"], bits: int
) -> Float[Array, "*shape"]:
    """Decoded values, 0 in empty slots: 2 bits or 1 decode zeros as small numbers."""
    return decoded if bits > 2 else jnp.where(filled, decoded, 0)


def _full(m: int) -> ValueCode:
    """Float32, exact."""

    def encode(values, leaves):
        del leaves
        return jax.lax.bitcast_convert_type(values, jnp.uint16).reshape(-1)

    def decode(words, leaves):
        del leaves
        return jax.lax.bitcast_convert_type(words.reshape(-1, 2), jnp.float32)

    return ValueCode(2 * m, m, encode, decode)


def _half(m: int) -> ValueCode:
    """bfloat16."""
    return ValueCode(
        m,
        m,
        lambda values, leaves: to_bfloat16(values),
        lambda words, leaves: from_bfloat16(words),
    )


def _plain(code: BlockCode) -> ValueCode:
    """`code` for values of one leaf."""
    blocks = code.blocks
    return ValueCode(
        code.size,
        blocks.full,
        lambda values, leaves: code.encode(blocks.split(values)),
        lambda words, leaves: blocks.join(code.decode(words)),
    )


def _by_leaf(code: BlockCode, leaf_count: int) -> ValueCode:
    """`code` with a scale for each leaf of a block."""
    blocks = code.blocks
    each = _leaf_scales.words_for(leaf_count, blocks.m)
    number = each * blocks.number

    def encode(values, leaves):
        rows = blocks.split(values), blocks.split(leaves)
        rows, scales = _leaf_scales.levelled(*rows, each)
        return jnp.concatenate([scales.reshape(-1), code.encode(rows)])

    def decode(words, leaves):
        scales, words = jnp.split(words, (number,))
        scales = scales.reshape(-1, each)
        rows, leaves = code.decode(words), blocks.split(leaves)
        return blocks.join(_leaf_scales.restored(rows, scales, leaves))

    return ValueCode(number + code.size, blocks.full, encode, decode)


def _squares(bits: int, m: int) -> BlockCode:
    """8 or 4 bits: a sign, and the nearest of 127 or 7 levels, or zero.

    Levels are squares of evenly spaced numbers, so they are closer where values are
    small, and most values are. The highest level is the largest magnitude of a block,
    the lowest the smallest, but at least `1 / top^2` of the largest: a smaller value
    becomes the lowest level or zero. The error is at most 1.2 % of the largest
    magnitude with 8 bits, and 14 % with 4.
    """
    blocks, top = Blocks.of(m, bits), (1 << bits - 1) - 1
    gaps, lowest = top - 1, -(-_WHOLE // top)

    def encode(rows):
        shares, largest = shares_of(rows)
        start = jnp.floor(_WHOLE * jnp.sqrt(_smallest(shares)))
        start = jnp.clip(start, lowest, _WHOLE - 1)
        # Roots are measured in the gaps between them; the lowest root is `base`.
        scale = gaps * _WHOLE / (_WHOLE - start)[:, None]
        base = scale * start[:, None] / _WHOLE
        squares = shares * scale**2
        # The middle of the squares of x and x + 1 is (x + 1/2)^2 + 1/4.
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
        # Compilers multiply by an inverse, which would make the largest smaller.
        magnitudes = jnp.where(levels == top, largest, roots * roots * largest)
        return jnp.where(negative, -magnitudes, magnitudes)

    return BlockCode(blocks, blocks.size(2), encode, decode)


def _two_means(m: int) -> BlockCode:
    """2 bits: a sign, and whether the magnitude is one of the large ones of its block.

    Large magnitudes are decoded as the mean of the large ones, small ones (and zeros)
    as the mean of the small ones. The message contains both means, so a full block
    keeps its sum of magnitudes.
    """
    blocks = Blocks.of(m, 2)

    def encode(rows):
        shares, largest = shares_of(rows)
        # In logarithms, the border is midway between the smallest and the largest.
        edge = jnp.maximum(jnp.sqrt(_smallest(shares)), _LOWEST_EDGE)
        large = shares >= edge[:, None]
        above = jnp.sum(large, axis=1, dtype=jnp.int32).astype(jnp.float32)
        number = jnp.maximum(jnp.stack([blocks.filled - above, above]), 1)
        totals = [jnp.sum(jnp.where(x, shares, 0.0), axis=1) for x in (~large, large)]
        means = to_bfloat16((jnp.stack(totals) / number).T * largest[:, None])
        return blocks.pack(means, large.astype(jnp.int32), jnp.signbit(rows))

    def decode(words):
        means, large, negative = blocks.unpack(words, 2)
        lower, upper = from_bfloat16(means[:, :1]), from_bfloat16(means[:, 1:])
        magnitudes = jnp.where(large > 0, upper, lower)
        return jnp.where(negative, -magnitudes, magnitudes)

    return BlockCode(blocks, blocks.size(2), encode, decode)


def _smallest(shares: Float[Array, "b s"]) -> Float[Array, " b"]:
    """The smallest non-zero share of each block; 1 if all shares are zero."""
    return jnp.min(jnp.where(shares > 0, shares, 1.0), axis=1)
