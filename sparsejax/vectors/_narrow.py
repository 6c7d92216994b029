"""Codes for values in few bits: messages of 16-bit words, without a pass over n.

Rounding needs no unbiased noise: the error stays with the worker, which sends the error
later. Narrow codes work on blocks of neighbouring slots, so that leaves of different
scale do not share one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla
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
    from jaxtyping import Array, Float, Int

# Levels of the code of 8 bits: 0, and powers of 2^(1/8) up to the largest of a block.
_STEPS = 8
_TOP = 127
_POWERS = 2.0 ** (np.arange(1 - _TOP, 1) / _STEPS)
_LEVELS = np.concatenate([[0.0], _POWERS]).astype(np.float32)

# Bins of the narrower codes reach down to this share of the largest magnitude.
_LOWEST = {4: 2.0**-6, 2: 2.0**-4}


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
    code = _scaled(m) if bits == 8 else one_bit(m) if bits == 1 else _binned(bits, m)
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


def _scaled(m: int) -> ValueCode:
    """8 bits: a sign, and 127 levels that are even in the logarithm, or zero.

    Levels lie 9 % apart, so the error is at most 4.5 % of a value. Values below 2^-15.8
    of the largest of their block become 0. The largest is exact.
    """
    blocks = Blocks.of(m, 8)

    def encode(values):
        rows = blocks.split(values)
        shares, largest = shares_of(rows)
        levels = _TOP + jnp.round(_STEPS * jnp.log2(shares))
        levels = jnp.clip(levels, 0, _TOP).astype(jnp.int32)
        scales = jax.lax.bitcast_convert_type(largest, jnp.uint16)
        return blocks.pack(scales.reshape(-1, 2), levels, jnp.signbit(rows))

    def decode(words):
        scales, levels, negative = blocks.unpack(words, 2)
        largest = jax.lax.bitcast_convert_type(scales, jnp.float32)
        magnitudes = jnp.asarray(_LEVELS)[levels] * largest[:, None]
        return blocks.join(jnp.where(negative, -magnitudes, magnitudes))

    return ValueCode(blocks.size(2), encode, decode)


def _binned(bits: int, m: int) -> ValueCode:
    """4 or 2 bits: a sign, and the bin of the magnitude.

    The edges of the bins of a block are even in the logarithm between its smallest and
    largest magnitude. Each is decoded as the mean of its members, which travels along,
    so a block keeps its sum of magnitudes. With 4 bits the first bin means zero. With 2
    a zero among other values is decoded as the mean of the smaller bin.
    """
    count, blocks = 1 << bits - 1, Blocks.of(m, bits)
    zero = int(bits == 4)

    def encode(values):
        rows = blocks.split(values)
        shares, largest = shares_of(rows)
        smallest = jnp.min(jnp.where(shares > 0, shares, 1.0), axis=1)
        depth = -jnp.log2(jnp.maximum(smallest, _LOWEST[bits]))
        # From 0 at the smallest to 1 at the largest; -inf for zeros.
        height = 1 + jnp.log2(shares) / jnp.maximum(depth, 2.0**-20)[:, None]
        bins = zero + jnp.floor((count - zero) * height)
        bins = jnp.clip(bins, 0, count - 1).astype(jnp.int32)
        bins, shares = _xla.computed_once((bins, shares))
        means = _means(jnp.where(shares > 0, bins, -1), shares, range(zero, count))
        means = to_bfloat16(means * largest[:, None])
        return blocks.pack(means, bins, jnp.signbit(rows))

    def decode(words):
        book, bins, negative = blocks.unpack(words, count - zero)
        means = from_bfloat16(book)
        magnitudes = jnp.zeros(bins.shape, jnp.float32)
        for place, b in enumerate(range(zero, count)):
            # Seven comparisons take a tenth of the time of one gather on CPUs.
            magnitudes = jnp.where(bins == b, means[:, place, None], magnitudes)
        return blocks.join(jnp.where(negative, -magnitudes, magnitudes))

    return ValueCode(blocks.size(count - zero), encode, decode)


def _means(
    labels: Int[Array, "b s"], values: Float[Array, "b s"], wanted: range
) -> Float[Array, "b c"]:
    """The mean of the values with each of the `wanted` labels; 0 for no value."""
    members = [labels == b for b in wanted]
    numbers = [_bits.sums_at_once(members[i : i + 3]) for i in range(0, len(wanted), 3)]
    totals = [jnp.sum(jnp.where(mine, values, 0.0), axis=1) for mine in members]
    number = jnp.maximum(jnp.concatenate(numbers), 1).astype(jnp.float32)
    return (jnp.stack(totals) / number).T
