"""Packed bits: uint32 words; bit `j` of word `i` stands for coordinate `32 i + j`.

Nothing here communicates: results are per worker if the arguments are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla
from sparsejax.vectors._scans import running_max, running_sum

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, Int32, UInt32

WORD = 32
_SUM = 10  # bits of a small sum

# Shorter lists of flags are packed word by word.
_MANY = 1 << 12

# The bit of a lane's word that each row of a block sets: see `pack_by_column`. A
# constant, since fusion would recompute the bits for each flag.
_ROWS = np.arange(WORD, dtype=np.uint32)
_ROW_BITS = np.uint32(1) << ((_ROWS & 3) << 3 | _ROWS >> 2)

# The search for a bit first finds a block of words, then the word. Larger blocks make
# the scan over blocks cheaper and the search within a block more expensive. Four words
# were the fastest with one bit in a hundred set.
_WORDS_PER_BLOCK = 4


def pack(flags: Bool[Array, " m"]) -> UInt32[Array, " words"]:
    """Packs flags [m] into UInt32[ceil(m / 32)]; bits after the last flag are 0."""
    rows = jnp.pad(flags, (0, -flags.size % WORD)).reshape(-1, WORD)
    bits = rows.astype(jnp.uint32) << jnp.arange(WORD, dtype=jnp.uint32)[None]
    return jnp.sum(bits, axis=1, dtype=jnp.uint32)


def pack_whole(flags: Bool[Array, " m"]) -> UInt32[Array, " words"]:
    """`pack` for flags from the comparison of a whole vector, outside of loops."""
    fast = _xla.on_cpu() and flags.size >= _MANY
    return pack_by_column(flags) if fast else pack(flags)


def pack_by_column(flags: Bool[Array, " m"]) -> UInt32[Array, " words"]:
    """`pack` in two thirds of the time on CPU, where sums within a vector are slow.

    `pack` is faster in a loop over tiles, and for flags that are expensive to compute.

    The flags form blocks of 32 rows of 8. A sum over the rows gives one word per lane:
    lane `b` gets every eighth flag from `b` on. The order of the bits in the lanes is
    such that one step remains: the bytes of the 8 words form blocks of 8 by 8 bits, and
    each block is transposed.

    References:
      Warren, "Hacker's Delight", section 7-3, for the transposition.
    """
    # Flags beyond the last whole block are packed separately: with padding to a whole
    # block, all flags take ten times as long.
    whole = flags.size - flags.size % (8 * WORD)
    blocks, rest = flags[:whole].reshape(-1, WORD, 8), pack(flags[whole:])
    lanes = jnp.where(blocks, _ROW_BITS[None, :, None], jnp.uint32(0))
    # Barrier against fusion: the sums over rows would be recomputed for each word of
    # the transposition.
    words = _xla.computed_once(jnp.sum(lanes, axis=1, dtype=jnp.uint32))
    columns = [words[:, b] for b in range(8)]
    for by, kept in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        for low in (b for b in range(8) if not b & by):
            a, b = columns[low], columns[low | by]
            swapped = (a >> by ^ b) & jnp.uint32(kept)
            columns[low], columns[low | by] = a ^ swapped << by, b ^ swapped
    return jnp.concatenate([jnp.stack(columns, axis=1).reshape(-1), rest])


def unpack(words: UInt32[Array, " words"], m: int) -> Bool[Array, " m"]:
    """The first `m` flags of `words` [W], Bool[m]."""
    # Barrier against fusion: the words would be recomputed for each bit.
    words = _xla.computed_once(words)
    bits = words[:, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None]
    return (bits & 1).astype(jnp.bool).reshape(-1)[:m]


def popcount(words: UInt32[Array, " *shape"]) -> Int32[Array, " *shape"]:
    """The number of set bits in each word."""
    return jax.lax.population_count(words).astype(jnp.int32)


def select_bit(
    word: UInt32[Array, " *shape"], rank: Int[Array, " *shape"]
) -> Int32[Array, " *shape"]:
    """The position of the `rank`-th set bit of `word`, counted from 0.

    Args:
      word: UInt32[...].
      rank: Int32[...], below `popcount(word)`; for other ranks the result is an
        arbitrary number in `[0, 32)`.

    Returns:
      Int32[...] in `[0, 32)`.
    """
    position = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        below = popcount(word & ((1 << half) - 1))
        above = rank >= below
        rank = jnp.where(above, rank - below, rank)
        word = jnp.where(above, word >> half, word)
        position = jnp.where(above, position + half, position)
    return position


def positions(
    words: UInt32[Array, " words"],
    ranks: Int32[Array, " k"],
    first_slot: Callable[[Int32[Array, " b"]], Int32[Array, " b"]] | None = None,
) -> Int32[Array, " k"]:
    """The positions of the `ranks[i]`-th set bits of `words`: select on a bit vector.

    The work is proportional to the number of words plus the number of slots.

    Args:
      words: UInt32[W].
      ranks: Int32[k], counted from 0, ascending; equal ranks are allowed.
      first_slot: maps numbers `o` Int32[b] in `[0, set bits]` to the smallest `i` with
        `ranks[i] >= o`, and to any number of at least `k` if there is no such `i`. For
        `ranks = arange(k)` this is the identity, `lambda o: o`. With `None`, each slot
        searches for its block in about log2(W) steps, which is slower.

    Returns:
      Int32[k], ascending; `32 W` if `ranks[i]` is at least the number of set bits.
    """
    if not ranks.size or not words.size:
        return jnp.zeros_like(ranks)
    # `min`: the last word may reach beyond the largest coordinate that int32 holds.
    empty = min(words.size * WORD, jnp.iinfo(jnp.int32).max)
    rest = -words.size % _WORDS_PER_BLOCK
    blocks = jnp.pad(words, (0, rest)).reshape(-1, _WORDS_PER_BLOCK)
    through = running_sum(jnp.sum(popcount(blocks), axis=1, dtype=jnp.int32))
    before = jnp.concatenate([jnp.zeros_like(through[:1]), through[:-1]])
    if first_slot is None:
        block = jnp.searchsorted(through, ranks, side="right").astype(jnp.int32)
        block = jnp.minimum(block, before.size - 1)
    else:
        block = _blocks_of_slots(first_slot(before), ranks.size)
    # Barrier against fusion: each step below would search for the block again.
    block = _xla.computed_once(block)
    rank = ranks - before[block]
    inside = blocks[block]
    word = inside[:, 0]
    index = jnp.zeros_like(rank)
    for j in range(1, _WORDS_PER_BLOCK):
        count = popcount(word)
        further = rank >= count  # False from the word on that holds the bit
        rank = jnp.where(further, rank - count, rank)
        word = jnp.where(further, inside[:, j], word)
        index = jnp.where(further, j, index)
    # Barrier against fusion: each use of the results would search for the word again.
    rank, word, index = _xla.computed_once((rank, word, index))
    position = (block * _WORDS_PER_BLOCK + index) * WORD + select_bit(word, rank)
    return jnp.where(ranks < through[-1], position, empty)


def _blocks_of_slots(first: Int32[Array, " b"], slots: int) -> Int32[Array, " k"]:
    """For each slot, the last block whose first slot is at or before that slot.

    Args:
      first: Int32[b], ascending, `first[0] <= 0`: the first slot of each block.
      slots: the number of slots.

    Returns:
      Int32[slots].
    """
    # Empty blocks share their first slot with the next block that has set bits. The
    # maximum keeps the latter.
    ids = jnp.arange(first.size, dtype=jnp.int32)
    starts = (
        jnp.zeros(slots, jnp.int32)
        .at[first]
        .max(ids, mode="drop", indices_are_sorted=True)
    )
    return running_max(starts)


def sums_at_once(parts: list[Int[Array, "rows m"]]) -> Int32[Array, "p rows"]:
    """The sums of each row of up to three arrays, in one pass over them.

    Args:
      parts: numbers that are not negative, with sums below 1024.

    Example:
      >>> print(sums_at_once([jnp.array([[1, 2]]), jnp.array([[3, 1000]])]))
      [[   3]
       [1003]]
    """
    fields = [x.astype(jnp.int32) << _SUM * i for i, x in enumerate(parts)]
    total = jnp.sum(sum(fields[1:], start=fields[0]), axis=1, dtype=jnp.int32)
    shifts = _SUM * jnp.arange(len(parts), dtype=jnp.int32)[:, None]
    return (total[None] >> shifts) & ((1 << _SUM) - 1)
