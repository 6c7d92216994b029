"""Brings all workers' signs to all workers: as bits, or as sums in bit fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax._workers import Workers, vary_like
from sparsejax.vectors import _bits

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32, Num, UInt32

# The most rows to add in one pass over the sums.
_GROUP = 8


def gather(
    flags: Bool[Array, " n"], facts: UInt32[Array, " facts"], workers: Workers
) -> tuple[UInt32[Array, "w words"], UInt32[Array, "w facts"]]:
    """Gathers all workers' packed flags and facts in one message. Replicated."""
    words = _bits.pack_whole(flags)
    gathered = workers.gather(jnp.concatenate([words, facts]))
    return gathered[:, : words.size], gathered[:, words.size :]


def weigh(
    words: UInt32[Array, "w words"], factors: Num[Array, " w"], n: int
) -> Num[Array, " n"]:
    """For each coordinate, the sum of the `factors` of the workers whose bit is set.

    Rows are added one after the other, in the same order on every worker. XLA:CPU turns
    a reduction over all rows into a matrix product, which takes hundreds of times as
    long.
    """
    groups = -(-len(words) // _GROUP)
    size = -(-len(words) // groups)
    rest = groups * size - len(words)
    words, factors = jnp.pad(words, ((0, rest), (0, 0))), jnp.pad(factors, (0, rest))

    def add(group, sums):
        for i in range(size):
            row, factor = (x[group * size + i] for x in (words, factors))
            sums = sums + jnp.where(_bits.unpack(row, n), factor, 0)
        return sums

    start = vary_like(vary_like(jnp.zeros((n,), factors.dtype), words), factors)
    return jax.lax.fori_loop(0, groups, add, start)


def count(
    flags: Bool[Array, " n"],
    facts: UInt32[Array, " facts"],
    workers: Workers,
    route: str,
) -> tuple[Int32[Array, " n"], UInt32[Array, "w facts"]]:
    """For each flag the number of workers that set it, and all facts. Replicated.

    Args:
      flags: Bool[n], per worker.
      facts: UInt32[facts], per worker, sent in the same message.
      workers: all workers.
      route: "gather" sends the flags as bits, "sum" adds them in bit fields.
    """
    n, voters = flags.size, workers.count()
    if route == "gather":
        words, rows = gather(flags, facts, workers)
        return weigh(words, jnp.ones((voters,), jnp.int32), n), rows
    fields = pack_fields(flags, voters)
    # Each fact is added to zeros only, so its bits stay unchanged.
    mine = jnp.arange(voters, dtype=jnp.int32) == workers.index()
    rows = jnp.where(mine[:, None], facts[None], 0)
    total = workers.sum(jnp.concatenate([fields, rows.reshape(-1)]))
    counts = unpack_fields(total[: fields.size], n, voters)
    return counts, total[fields.size :].reshape(rows.shape)


def cheaper_route(n: int, worker_count: int) -> str:
    """The route by which a worker receives fewer bytes: "sum" or "gather". Static."""
    by_sum = 2 / worker_count * -(-n // _fields_per_word(worker_count))
    by_gather = -(-n // _bits.WORD)
    # At equal bytes, the sum saves a pass over the bits of each worker.
    return "sum" if by_sum <= by_gather else "gather"


def _field_width(worker_count: int) -> int:
    """Bits for any number from 0 to `worker_count`: ceil(log2(w + 1))."""
    return worker_count.bit_length()


def _fields_per_word(worker_count: int) -> int:
    return _bits.WORD // _field_width(worker_count)


def pack_fields(flags: Bool[Array, " n"], worker_count: int) -> UInt32[Array, " words"]:
    """Packs flags [n] into fields wide enough for the sum of `worker_count` such words.

    Word `i` of W holds coordinates `i`, `W + i`, `2 W + i`, ..., the first one in the
    lowest bits. So packing shifts and adds whole rows.
    """
    per_word = _fields_per_word(worker_count)
    rows = jnp.pad(flags, (0, -flags.size % per_word)).reshape(per_word, -1)
    shifts = _field_width(worker_count) * jnp.arange(per_word, dtype=jnp.uint32)
    return jnp.sum(rows.astype(jnp.uint32) << shifts[:, None], axis=0, dtype=jnp.uint32)


def unpack_fields(
    words: UInt32[Array, " words"], n: int, worker_count: int
) -> Int32[Array, " n"]:
    """The counts [n] in a sum of packed words."""
    width = _field_width(worker_count)
    shifts = width * jnp.arange(_fields_per_word(worker_count), dtype=jnp.uint32)
    fields = (words[None] >> shifts[:, None]) & (2**width - 1)
    return fields.reshape(-1)[:n].astype(jnp.int32)
