"""Blocks of neighbouring slots, whose narrow values share a scale, as 16-bit words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla
from sparsejax.vectors._ratio import shares
from sparsejax.vectors._rounding import round_to

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int, UInt16

_WORD = 16
_BLOCK = 512  # slots that share a scale


class BlockCode(NamedTuple):
    """A code for float32 values in blocks, whose values share a scale.

    Attributes:
      blocks: the blocks. Static.
      size: static, 16-bit words of an encoded list.
      encode: `Float32[b, s] -> UInt16[size]`.
      decode: `UInt16[size] -> Float32[b, s]`, finite.
    """

    blocks: Blocks
    size: int
    encode: Callable[[Float32[Array, "b s"]], UInt16[Array, " c"]]
    decode: Callable[[UInt16[Array, " c"]], Float32[Array, "b s"]]


def to_bfloat16(values: Float[Array, " *shape"]) -> UInt16[Array, " *shape"]:
    dtype = np.dtype(jnp.bfloat16)
    rounded = round_to(values, dtype).astype(dtype)
    return jax.lax.bitcast_convert_type(rounded, jnp.uint16)


def from_bfloat16(words: UInt16[Array, " *shape"]) -> Float32[Array, " *shape"]:
    return jax.lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)


def shares_of(
    rows: Float[Array, "b s"],
) -> tuple[Float[Array, "b s"], Float[Array, " b"]]:
    """Magnitudes as shares of the largest of their block, and the largest."""
    largest = jnp.max(jnp.abs(rows), axis=1)
    return shares(jnp.abs(rows), largest[:, None]), largest


class Blocks(NamedTuple):
    """`m` slots in `number` blocks of `length` slots, `bits` bits for each slot."""

    m: int
    bits: int
    number: int
    length: int

    @classmethod
    def of(cls, m: int, bits: int) -> Blocks:
        number = max(1, -(-m // _BLOCK))
        per_word = _WORD // bits
        words = -(-m // (number * per_word))
        return cls(m, bits, number, words * per_word)

    @property
    def full(self) -> int:
        """The number of values that fill all blocks; m if there is only one block."""
        return self.number * self.length if self.number > 1 else self.m

    @property
    def filled(self) -> Float32[np.ndarray, " b"]:
        """The slots of each block that are not padding, or 1."""
        before = np.arange(self.number, dtype=np.int32) * self.length
        return np.clip(self.m - before, 1, self.length).astype(np.float32)

    def size(self, scales: int) -> int:
        """Words of the whole message, with `scales` words for each block."""
        return self.number * (scales + self.length * self.bits // _WORD)

    def split(self, values: Float[Array, " m"]) -> Float[Array, "b s"]:
        padded = jnp.pad(values, (0, self.number * self.length - self.m))
        return padded.reshape(self.number, self.length)

    def join(self, rows: Float[Array, "b s"]) -> Float[Array, " m"]:
        """The inverse of `split`."""
        return _xla.computed_once(rows).reshape(-1)[: self.m]

    def pack(
        self,
        scales: UInt16[Array, "b c"],
        numbers: Int[Array, "b s"],
        negative: Bool[Array, "b s"],
    ) -> UInt16[Array, " words"]:
        """Scales, numbers below 2^(bits - 1) and signs as one message."""
        return self.message(scales, self.body(numbers, negative))

    def unpack(
        self, words: UInt16[Array, " words"], scales: int
    ) -> tuple[UInt16[Array, "b c"], Int[Array, "b s"], Bool[Array, "b s"]]:
        """The inverse of `pack`."""
        found, body = self.parts(words, scales)
        return found, *self.slots(body)

    def message(
        self, scales: UInt16[Array, "b c"], body: Int[Array, "b d"]
    ) -> UInt16[Array, " words"]:
        """Scales, and words below 2^16, as one message."""
        return jnp.concatenate([scales, body.astype(jnp.uint16)], axis=1).reshape(-1)

    def parts(
        self, words: UInt16[Array, " words"], scales: int
    ) -> tuple[UInt16[Array, "b c"], Int[Array, "b d"]]:
        """The inverse of `message`."""
        whole = words.reshape(self.number, -1)
        # Barriers here and in `join`, and slices instead of one broadcast: if XLA:CPU
        # fuses this with its neighbours, the loop takes ten times as long.
        body = _xla.computed_once(whole[:, scales:].astype(jnp.int32))
        return whole[:, :scales], body

    def body(
        self, numbers: Int[Array, "b s"], negative: Bool[Array, "b s"]
    ) -> Int[Array, "b d"]:
        """Numbers below 2^(bits - 1) and signs as words; each holds every d-th slot."""
        signs = negative.astype(jnp.int32) << self.bits - 1
        codes = (numbers | signs).reshape(self.number, _WORD // self.bits, -1)
        shifts = jnp.arange(0, _WORD, self.bits, dtype=jnp.int32)[None, :, None]
        return jnp.sum(codes << shifts, axis=1, dtype=jnp.int32)

    def slots(
        self, body: Int[Array, "b d"]
    ) -> tuple[Int[Array, "b s"], Bool[Array, "b s"]]:
        """The inverse of `body`."""
        parts = [body >> shift for shift in range(0, _WORD, self.bits)]
        codes = jnp.stack(parts, axis=1).reshape(self.number, self.length)
        top = 1 << self.bits - 1
        return codes & (top - 1), (codes & top) > 0
