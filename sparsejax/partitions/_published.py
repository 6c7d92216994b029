"""Parts that exchange blocks with their neighbours: ExDyna as published."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.partitions._grid import BLOCKS, even_split
from sparsejax.parts import Partition

if TYPE_CHECKING:
    from jaxtyping import Array, Int

# Published rule: a part is hot above 1.05 times the mean count, and cold below 0.95238
# times the mean count. The published program writes 0.95238 for 1 / 1.05.
_HOT, _COLD = 1.05, 0.95238


class PublishedState(NamedTuple):
    """State of `published`. Replicated.

    Attributes:
      blocks: Int32[w], blocks per part.
    """

    blocks: Int[Array, " w"]


def _grid(n: int, worker_count: int) -> tuple[int, int, int]:
    """Static `(count, size, least blocks in a part)` of the published program."""
    size = max(32, n // BLOCKS // 32 * 32)
    count = min(BLOCKS, n // size)
    return count, size, -(-count // (4 * worker_count))


def published() -> Partition:
    """Parts that exchange single blocks with their neighbours, as published.

    Blocks have `floor(n / 1024)` coordinates, rounded down to a multiple of 32, and at
    least 32; the last part also takes the remainder. After each step, the pairs of
    neighbouring parts take turns from first to last. In each pair, one block moves from
    a hot part (more than 1.05 times the mean count) to a cold part (less than 0.95238
    times), unless the hot part would keep fewer than a quarter of the mean number of
    blocks.

    Example:
      >>> partition = published()
      >>> state = partition.init(4096, 4)
      >>> print(partition.bounds(state, 4096, 4, 40))
      [   0 1024 2048 3072 4096]
      >>> demand, threshold = jnp.array([20, 5, 10, 10]), jnp.full(4, 0.1)
      >>> state = partition.adapt(state, 4096, 40, demand, threshold, None)
      >>> print(partition.bounds(state, 4096, 4, 40))
      [   0  992 2048 3072 4096]

    References:
      Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable
      Distributed Deep Learning", CCGrid 2024.
    """

    def init(n, worker_count):
        count, _, _ = _grid(n, worker_count)
        return PublishedState(jnp.diff(even_split(count, worker_count)))

    def bounds(state, n, worker_count, target):
        _, size, _ = _grid(n, worker_count)
        ends = jnp.cumsum(state.blocks, dtype=jnp.int32) * size
        edge = jnp.zeros(1, jnp.int32)
        return jnp.concatenate([edge, ends[:-1], edge + n])

    def span(n, worker_count, target):
        count, size, least = _grid(n, worker_count)
        # A part gives a block away only if `least` blocks remain.
        return n - (worker_count - 1) * min(least, count // worker_count) * size

    def adapt(state, n, target, demand, threshold, histogram):
        worker_count = demand.shape[0]
        _, size, least = _grid(n, worker_count)
        total = jnp.sum(demand, dtype=jnp.int32)
        mean = total // worker_count
        unit = jnp.maximum(mean, 1).astype(jnp.float32)
        per_block = _scaled(total, size, max(n, 1))

        def move(i, carry):
            owned, counts = carry
            pair = jnp.stack([i, i + 1])
            load = counts[pair].astype(jnp.float32) / unit
            hot, cold = load > _HOT, load < _COLD
            right, left = hot[0] & cold[1], cold[0] & hot[1]
            giver = jnp.where(right, i, i + 1)
            allowed = (right | left) & (mean > 0) & (owned[giver] - 1 >= least)
            sign = jnp.where(right, 1, -1) * allowed.astype(jnp.int32)
            gain = jnp.stack([-sign, sign])
            return owned.at[pair].add(gain), counts.at[pair].add(gain * per_block)

        moved, _ = jax.lax.fori_loop(
            0, worker_count - 1, move, (state.blocks, demand.astype(jnp.int32))
        )
        return PublishedState(moved)

    return Partition(init, bounds, span, adapt)


def _scaled(total: Int[Array, ""], size: int, n: int) -> Int[Array, ""]:
    """`floor(size * total / n)`, exact if `size * n` is below 2^31."""
    if size * n < 2**31:
        return total * size // n
    return jnp.floor(total.astype(jnp.float32) * (size / n)).astype(jnp.int32)
