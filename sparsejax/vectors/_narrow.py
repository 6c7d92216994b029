"""Codes for values in few bits: messages of 16-bit words, without a pass over n.

Rounding needs no unbiased noise: the error stays with the worker, which sends the error
later. Narrow codes work on blocks of neighbouring slots, so that leaves of different
scale do not share one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla
from sparsejax.vectors import _bits
from sparsejax.vectors._rounding import round_to

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int, UInt16

_WORD = 16
_BLOCK = 512  # slots that share a scale

# Levels of the code of 8 bits: 0, and powers of 2^(1/8) up to the largest of a block.
_STEPS = 8
_TOP = 127
_POWERS = 2.0 ** (np.arange(1 - _TOP, 1) / _STEPS)
_LEVELS = np.concatenate([[0.0], _POWERS]).astype(np.float32)

# Bins of the narrower codes reach down to this share of the largest magnitude.
_LOWEST = {4: 2.0**-6, 2: 2.0**-4, 1: 1.0}


class ValueCode(NamedTuple):
    """A code for `m` float32 values.

    Attributes:
      size: static, 16-bit words of an encoded list.
      encode: `Float32[m] -> UInt16[size]`.
      decode: `UInt16[size] -> Float32[m]`, finite.
    """

    size: int
    encode: Callable[[Float32[Array, " m"]], UInt16[Array, " c"]]
    decode: Callable[[UInt16[Array, " c"]], Float32[Array, " m"]]


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
    code = _scaled(m) if bits == 8 else _binned(bits, m)
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
    return ValueCode(m, _to_bfloat16, _from_bfloat16)


def _to_bfloat16(values: Float[Array, " *shape"]) -> UInt16[Array, " *shape"]:
    dtype = np.dtype(jnp.bfloat16)
    rounded = round_to(values, dtype).astype(dtype)
    return jax.lax.bitcast_convert_type(rounded, jnp.uint16)


def _from_bfloat16(words: UInt16[Array, " *shape"]) -> Float32[Array, " *shape"]:
    return jax.lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)


def _scaled(m: int) -> ValueCode:
    """8 bits: a sign, and 127 levels that are even in the logarithm, or zero.

    Levels lie 9 % apart, so the error is at most 4.5 % of a value. Values below 2^-15.8
    of the largest of their block become 0. The largest is exact.
    """
    blocks = _Blocks.of(m, 8)

    def encode(values):
        rows = blocks.split(values)
        shares, largest = _shares(rows)
        levels = _TOP + jnp.round(_STEPS * jnp.log2(shares))
        levels = jnp.clip(levels, 0, _TOP).astype(jnp.int32)
        scales = jax.lax.bitcast_convert_type(largest, jnp.uint16)
        return blocks.pack(scales.reshape(-1, 2), levels, jnp.signbit(rows))

    def decode(words):
        scales, levels, negative = blocks.unpack(words, 2)
        largest = jax.lax.bitcast_convert_type(scales, jnp.float32)
        return blocks.join(jnp.asarray(_LEVELS)[levels] * largest[:, None], negative)

    return ValueCode(blocks.size(2), encode, decode)


def _binned(bits: int, m: int) -> ValueCode:
    """4, 2 or 1 bits: a sign, and the bin of the magnitude.

    The edges of the bins of a block are even in the logarithm between its smallest and
    largest magnitude. Each is decoded as the mean of its members, which travels along,
    so a block keeps its sum of magnitudes. With 4 bits the first bin means zero. With
    fewer bits a zero among other values is decoded as the mean of the smallest bin.
    """
    count, blocks = 1 << bits - 1, _Blocks.of(m, bits)
    zero = int(bits == 4)

    def encode(values):
        rows = blocks.split(values)
        shares, largest = _shares(rows)
        smallest = jnp.min(jnp.where(shares > 0, shares, 1.0), axis=1)
        depth = -jnp.log2(jnp.maximum(smallest, _LOWEST[bits]))
        # From 0 at the smallest to 1 at the largest; -inf for zeros.
        height = 1 + jnp.log2(shares) / jnp.maximum(depth, 2.0**-20)[:, None]
        bins = zero + jnp.floor((count - zero) * height)
        bins = jnp.clip(bins, 0, count - 1).astype(jnp.int32)
        bins, shares = _xla.computed_once((bins, shares))
        means = _means(jnp.where(shares > 0, bins, -1), shares, range(zero, count))
        means = _to_bfloat16(means * largest[:, None])
        return blocks.pack(means, bins, jnp.signbit(rows))

    def decode(words):
        book, bins, negative = blocks.unpack(words, count - zero)
        means = _from_bfloat16(book)
        magnitudes = jnp.zeros(bins.shape, jnp.float32)
        for place, b in enumerate(range(zero, count)):
            # Seven comparisons take a tenth of the time of one gather on CPUs.
            magnitudes = jnp.where(bins == b, means[:, place, None], magnitudes)
        return blocks.join(magnitudes, negative)

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


def _shares(
    rows: Float[Array, "b s"],
) -> tuple[Float[Array, "b s"], Float[Array, " b"]]:
    """Magnitudes as shares of the largest of their block, and the largest."""
    largest = jnp.max(jnp.abs(rows), axis=1)
    # Devices may flush subnormal numbers to zero.
    normal = largest >= jnp.finfo(jnp.float32).tiny
    safe = jnp.where(normal, largest, 1.0)
    shares = jnp.where(normal[:, None], jnp.abs(rows) / safe[:, None], 0.0)
    return shares, jnp.where(normal, largest, 0.0)


class _Blocks(NamedTuple):
    """`m` slots in `number` blocks of `length` slots, `bits` bits for each slot."""

    m: int
    bits: int
    number: int
    length: int

    @classmethod
    def of(cls, m: int, bits: int) -> _Blocks:
        number = max(1, -(-m // _BLOCK))
        per_word = _WORD // bits
        words = -(-m // (number * per_word))
        return cls(m, bits, number, words * per_word)

    def size(self, scales: int) -> int:
        """Words of the whole message, with `scales` words for each block."""
        return self.number * (scales + self.length * self.bits // _WORD)

    def split(self, values: Float[Array, " m"]) -> Float[Array, "b s"]:
        padded = jnp.pad(values, (0, self.number * self.length - self.m))
        return padded.reshape(self.number, self.length)

    def join(
        self, magnitudes: Float[Array, "b s"], negative: Bool[Array, "b s"]
    ) -> Float[Array, " m"]:
        values = _xla.computed_once(jnp.where(negative, -magnitudes, magnitudes))
        return values.reshape(-1)[: self.m]

    def pack(
        self,
        scales: UInt16[Array, "b c"],
        numbers: Int[Array, "b s"],
        negative: Bool[Array, "b s"],
    ) -> UInt16[Array, " words"]:
        """Scales, numbers below 2^(bits - 1) and signs as one message."""
        signs = negative.astype(jnp.int32) << self.bits - 1
        codes = (numbers | signs).reshape(self.number, _WORD // self.bits, -1)
        shifts = jnp.arange(0, _WORD, self.bits, dtype=jnp.int32)[None, :, None]
        words = jnp.sum(codes << shifts, axis=1, dtype=jnp.int32)
        whole = jnp.concatenate([scales, words.astype(jnp.uint16)], axis=1)
        return whole.reshape(-1)

    def unpack(
        self, words: UInt16[Array, " words"], scales: int
    ) -> tuple[UInt16[Array, "b c"], Int[Array, "b s"], Bool[Array, "b s"]]:
        """The inverse of `pack`."""
        whole = words.reshape(self.number, -1)
        # Barriers here and in `join`, and slices in place of one broadcast: fused with
        # its neighbours, XLA:CPU makes this a loop of ten times the time.
        body = _xla.computed_once(whole[:, scales:].astype(jnp.int32))
        parts = [body >> shift for shift in range(0, _WORD, self.bits)]
        codes = jnp.stack(parts, axis=1).reshape(self.number, self.length)
        top = 1 << self.bits - 1
        return whole[:, :scales], codes & (top - 1), (codes & top) > 0
