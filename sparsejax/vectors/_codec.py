"""Messages: codes for indices, and many small arrays packed into one message.

On the networks for which this library is made, a collective of any size costs
milliseconds, so one message carries all facts of a worker about a step.

Ascending indices are sent in the one of four codes that needs the fewest bytes. All
sizes are static, so the code is chosen when the program is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla
from sparsejax.vectors import _bits

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped, UInt, UInt32

# The unit of a message: indices relative to a part often fit 16 bits, and then need no
# padding.
WORD = jnp.uint16


class IndexCode(NamedTuple):
    """A code for `k` ascending numbers in `[0, span]`; `span` marks an empty slot.

    Attributes:
      size: static, bytes of an encoded list.
      encode: `Int32[k] -> code`, one array.
      decode: `code -> Int32[k]`.
    """

    size: int
    encode: Callable[[Int[Array, " k"]], Shaped[Array, " c"]]
    decode: Callable[[Shaped[Array, " c"]], Int[Array, " k"]]


def plain(slots: int, span: int) -> IndexCode:
    """Each number in the narrowest of 16 and 32 bits."""
    dtype = np.dtype(np.uint16 if span < 2**16 else np.int32)
    return IndexCode(
        slots * dtype.itemsize,
        lambda numbers: numbers.astype(dtype),
        lambda code: code.astype(jnp.int32),
    )


class EliasFano(NamedTuple):
    """An `IndexCode` of `low_bits` digits in binary, and the bits above in unary.

    The `i`-th set bit of a bitmap encodes the high part of number `i`: bit
    `high(i) + i` is set. So each number costs `low_bits + 1` bits, and the whole list
    costs `span / 2^low_bits` bits more. Ascending lists may repeat numbers.

    References:
      Elias, "Efficient storage and retrieval by content and address of static files",
      Journal of the ACM, 1974.
      Fano, "On the number of bits required to implement an associative memory", 1971.
    """

    slots: int
    span: int
    low_bits: int

    @property
    def size(self) -> int:
        return 4 * (self._low_words + _word_count(self._high_size))

    def encode(self, numbers: Int[Array, " k"]) -> UInt32[Array, " c"]:
        high = numbers >> self.low_bits
        high = _set_bits(high + _order(self.slots), self._high_size)
        if not self.low_bits:
            return high
        # One row for each bit: any width, without shifts across words.
        rows = (numbers.astype(jnp.uint32)[None] >> self._shifts) & 1
        return jnp.concatenate([_bits.pack(rows.reshape(-1) > 0), high])

    def decode(self, code: UInt32[Array, " c"]) -> Int[Array, " k"]:
        return self.joined(self.high(code), self.digits(code))

    def high(self, code: UInt32[Array, " c"]) -> Int[Array, " k"]:
        """The numbers without their binary digits."""
        words, order = code[self._low_words :], _order(self.slots)
        return _bits.positions(words, order, lambda o: o) - order

    def digits(self, code: UInt32[Array, " c"]) -> UInt32[Array, "bits k"]:
        """The binary digits, 0 or 1, the least significant ones first."""
        flags = _bits.unpack(code[: self._low_words], self.low_bits * self.slots)
        return flags.reshape(self.low_bits, self.slots).astype(jnp.uint32)

    def joined(
        self, high: Int[Array, " k"], digits: UInt32[Array, "bits k"]
    ) -> Int[Array, " k"]:
        """The numbers that consist of `high` and `digits`."""
        if not self.low_bits:
            return high
        low = jnp.sum(digits << self._shifts, axis=0, dtype=jnp.uint32)
        return (high << self.low_bits) + low.astype(jnp.int32)

    @property
    def _low_words(self) -> int:
        return _word_count(self.low_bits * self.slots)

    @property
    def _high_size(self) -> int:
        return self.slots + (self.span >> self.low_bits)

    @property
    def _shifts(self) -> np.ndarray:
        return np.arange(self.low_bits, dtype=np.uint32)[:, None]


def bitmap(slots: int, span: int) -> IndexCode:
    """One bit for each of `span` numbers; the list must not repeat numbers."""

    def decode(code):
        order = jnp.arange(slots, dtype=jnp.int32)
        return jnp.minimum(_bits.positions(code, order, lambda o: o), span)

    return IndexCode(
        4 * _word_count(span), lambda numbers: _set_bits(numbers, span), decode
    )


def cheapest(slots: int, span: int) -> IndexCode | EliasFano:
    """The code with the fewest bytes; at equal sizes, the one with the least work."""
    codes: list[IndexCode | EliasFano] = [plain(slots, span), bitmap(slots, span)]
    if slots and span:
        codes += [EliasFano(slots, span, bits) for bits in range(span.bit_length())]
    return min(codes, key=lambda code: code.size)


def _order(slots: int) -> Int[Array, " k"]:
    """Int32[k]: the number of each slot."""
    if _xla.on_cpu():
        return jnp.asarray(np.arange(slots, dtype=np.int32))
    # With a constant, XLA would compute for seconds while it compiles for a GPU.
    return jnp.arange(slots, dtype=jnp.int32)


def _word_count(bits: int) -> int:
    return -(-bits // _bits.WORD)


def _set_bits(positions: Int[Array, " k"], size: int) -> UInt32[Array, " words"]:
    """Sets the bits at distinct `positions` [k]; drops positions from `size` on."""
    bits = jnp.uint32(1) << (positions % _bits.WORD).astype(jnp.uint32)
    bits = jnp.where(positions < size, bits, jnp.uint32(0))
    words = jnp.zeros(_word_count(size), jnp.uint32)
    # The bits are distinct integers, so their sum does not depend on the order.
    return words.at[positions // _bits.WORD].add(bits, mode="drop")


def pack(tree: Any) -> UInt[Array, " words"]:
    """Packs all leaves of `tree` into one message, so that one collective is enough.

    Args:
      tree: pytree of arrays of bool, or of elements of 2 or 4 bytes; at least one.

    Returns:
      One vector of 16-bit words.

    Example:
      A gathered message has a leading axis [w], here of one worker:

      >>> message = (jnp.array([3, 5]), jnp.array([0.5, 2.0]), jnp.array(True))
      >>> indices, values, flag = unpack(pack(message)[None], message)
      >>> print(indices, values, flag)
      [[3 5]] [[0.5 2. ]] [ True]
    """
    parts = []
    for leaf in map(jnp.asarray, jax.tree.leaves(tree)):
        if leaf.dtype == jnp.bool_:
            leaf = leaf.astype(WORD)
        parts.append(jax.lax.bitcast_convert_type(leaf, WORD).reshape(-1))
    return jnp.concatenate(parts)


def unpack(words: UInt[Array, "w words"], like: Any) -> Any:
    """Unpacks every worker's message.

    Args:
      words: the gathered messages [w, words] of `pack`.
      like: the packed tree, or one of the same shapes and dtypes.

    Returns:
      The tree, whose leaves have a leading axis [w].

    Example:
      >>> message = {"demand": jnp.array(7)}
      >>> print(unpack(pack(message)[None], message)["demand"])
      [7]
    """
    leaves, treedef = jax.tree.flatten(like)
    parts, position = [], 0
    for leaf in map(jnp.asarray, leaves):
        flag = leaf.dtype == jnp.bool_
        dtype = np.dtype(WORD) if flag else leaf.dtype
        width = dtype.itemsize // np.dtype(WORD).itemsize
        size = math.prod(leaf.shape) * width
        part = jax.lax.slice_in_dim(words, position, position + size, axis=1)
        # To widen, bitcast_convert_type needs a last axis of the ratio of the widths.
        tail = (width,) if width > 1 else ()
        part = part.reshape(words.shape[0], *leaf.shape, *tail)
        part = jax.lax.bitcast_convert_type(part, dtype)
        parts.append(part.astype(jnp.bool_) if flag else part)
        position += size
    return jax.tree.unflatten(treedef, parts)
