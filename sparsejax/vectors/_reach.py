"""A code for ascending lists that usually lie in a short span, rarely in a long one.

The code has one static size, which suits the usual span. A list that reaches farther
needs more bits for each number, so fewer of its numbers fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.vectors._codec import EliasFano, cheapest

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Shaped


class Reach(NamedTuple):
    """A code for `k` ascending numbers below `usual`, or for fewer below `span`.

    Attributes:
      code: the code of a usual list: an `EliasFano` where `more_bits` is not 0.
      usual: static: a usual list lies in `[0, usual)`, and `usual` marks its empty
        slots; `span` does so for a long list.
      span: static: a long list lies in `[0, span)`.
      low_bits: static: the bits of each number that `code` writes in binary.
      more_bits: static: the additional bits of each number in a long list.
      room: static: the most slots that a long list fills.
    """

    code: Any
    usual: int
    span: int
    low_bits: int
    more_bits: int
    room: int

    @property
    def each(self) -> int:
        """Static: how many numbers' missing digits fit into a slot."""
        return self.low_bits // self.more_bits

    @property
    def spare(self) -> int:
        """Static: the slots of a long list that hold other slots' digits."""
        return self.code.slots - self.room

    def empty(self, long: Bool[Array, ""]) -> Int[Array, ""]:
        """Int32[]: the mark of an empty slot."""
        return jnp.where(long, self.span, self.usual).astype(jnp.int32)

    def encode(
        self, numbers: Int[Array, " k"], long: Bool[Array, ""]
    ) -> Shaped[Array, " c"]:
        """Encodes a list; the slots of a long one from `room` on must be empty."""
        if not self.more_bits:
            return self.code.encode(numbers)
        # The missing binary digits go into the slots from `room` on, which are empty:
        # first one number's digits into each, then another number's.
        more = (numbers[: self.room] >> self.low_bits) & self._mask(self.more_bits)
        rows = jnp.pad(more, (0, self.each * self.spare - self.room))
        places = self.more_bits * np.arange(self.each, dtype=np.int32)[:, None]
        held = jnp.sum(
            rows.reshape(self.each, self.spare) << places, axis=0, dtype=jnp.int32
        )
        own = numbers[: self.room] & self._mask(self.low_bits)
        high = numbers >> (self.low_bits + self.more_bits)
        moved = (high << self.low_bits) | jnp.concatenate([own, held])
        return self.code.encode(jnp.where(long, moved, numbers))

    def decode(
        self, code: Shaped[Array, " c"], long: Bool[Array, ""]
    ) -> Int[Array, " k"]:
        """The inverse of `encode`."""
        if not self.more_bits:
            return self.code.decode(code)
        high, digits = self.code.high(code), self.code.digits(code)
        # From the rows of the message: one row holds the same digit of all numbers.
        held = digits[: self.each * self.more_bits, self.room :]
        rows = held.reshape(self.each, self.more_bits, self.spare)
        places = np.arange(self.more_bits, dtype=np.uint32)[None, :, None]
        more = jnp.sum(rows << places, axis=1, dtype=jnp.uint32).reshape(-1)
        more = more[: self.room].astype(jnp.int32)
        more = jnp.pad(more, (0, self.spare))
        numbers = self.code.joined((high << self.more_bits) | more, digits)
        order = jnp.arange(high.size, dtype=jnp.int32)
        numbers = jnp.where(order < self.room, numbers, self.span)
        return jnp.where(long, numbers, self.code.joined(high, digits))

    def _mask(self, bits):
        return np.int32((1 << bits) - 1)


def reach(slots: int, usual: int, span: int) -> Reach:
    """The code with the fewest bytes for `slots` numbers below `usual`.

    Where a long list would lose more than half of its slots, or no byte is saved,
    every list uses the code for `span`, and keeps all slots.
    """
    plain = cheapest(slots, span)
    best = Reach(plain, span, span, 0, 0, slots)
    if not slots or usual >= span:
        return best
    more = 1
    while span >> more > usual:
        more += 1
    for low in range(more, usual.bit_length()):
        code, each = EliasFano(slots, usual, low), low // more
        room = slots * each // (each + 1)
        if code.size < best.code.size and 2 * room >= slots:
            best = Reach(code, usual, span, low, more, room)
    return best


def room(slots: int, usual: int, span: int) -> int:
    """Static: how many of `slots` slots a list may fill if it reaches beyond `usual`.

    Args:
      slots: the number of slots.
      usual: the span that the code of the indices suits.
      span: the longest span.

    Example:
      >>> room(1000, 1000, 1000), room(1000, usual=30_000, span=60_000)
      (1000, 800)
    """
    return reach(slots, usual, span).room


def encode_indices(
    indices: Int[Array, " k"],
    start: Int[Array, ""],
    span: int,
    n: int,
    *,
    usual: int | None = None,
    long: Bool[Array, ""] | None = None,
) -> Shaped[Array, " c"]:
    """Encodes ascending indices relative to `start`, in as few bytes as they need.

    Args:
      indices: Int32[k], ascending, in `[start, start + span)`; empty slots hold `n`.
      start: Int32[], the first possible index.
      span: static, the number of possible indices.
      n: static, the number of coordinates.
      usual: static: the code has room for k indices in `[start, start + usual)`; by
        default `span`.
      long: Bool[], whether indices may be at or beyond `start + usual`; by default not.
        If so, the slots from `room(k, usual, span)` on must be empty.

    Returns:
      The code [c]; its size and dtype follow from `k` and `span`.

    Example:
      >>> code = encode_indices(jnp.array([2, 7, 9, 9], jnp.int32), 0, span=9, n=9)
      >>> print(decode_indices(code[None], jnp.zeros(1, jnp.int32), 9, 9, slots=4))
      [[2 7 9 9]]
    """
    long = jnp.asarray(False) if long is None else long
    code = reach(indices.shape[0], usual or span, span)
    relative = jnp.where(indices < n, indices - start, code.empty(long))
    return code.encode(relative, long)


def decode_indices(
    codes: Shaped[Array, "w c"],
    start: Int[Array, " w"],
    span: int,
    n: int,
    slots: int,
    *,
    usual: int | None = None,
    long: Bool[Array, " w"] | None = None,
) -> Int[Array, "w k"]:
    """Decodes every worker's indices.

    Args:
      codes: the gathered codes [w, c] of `encode_indices`.
      start: Int32[w], every worker's first possible index.
      span: static, the number of possible indices.
      n: static, the number of coordinates.
      slots: static, the number `k` of encoded indices.
      usual: static, the same as for `encode_indices`.
      long: Bool[w], the `long` of every worker.

    Returns:
      Int32[w, k]; empty slots hold `n`.

    Example:
      >>> code = encode_indices(jnp.array([2, 9], jnp.int32), 0, span=9, n=9)
      >>> print(decode_indices(code[None], jnp.zeros(1, jnp.int32), 9, 9, slots=2))
      [[2 9]]
    """
    long = jnp.zeros(start.shape, jnp.bool_) if long is None else long
    code = reach(slots, usual or span, span)
    relative = jax.vmap(code.decode)(codes, long)
    full = relative < jax.vmap(code.empty)(long)[:, None]
    return jnp.where(full, relative + start[:, None], n)
