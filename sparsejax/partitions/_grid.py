"""Blocks of equal size, and intervals of equal length."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Int

# Number of blocks in the authors' published program.
BLOCKS = 1024


def blocks(n: int, worker_count: int) -> tuple[int, int]:
    """The grid on which exchanges count and `balanced` cuts: static `(count, size)`.

    Blocks are `size` coordinates long; the last block may be shorter. `size` is a
    multiple of 32 if `n` then allows at least two blocks per worker. There is at least
    one block, even for `n = 0`.

    Args:
      n: the number of coordinates.
      worker_count: w.

    Example:
      >>> blocks(131072, 4), blocks(100, 8)
      ((1024, 128), (25, 4))
    """
    wanted = max(BLOCKS, 4 * worker_count)
    size = 32 * max(1, -(-n // (32 * wanted)))
    if -(-n // size) < 2 * worker_count:
        size = max(1, -(-n // (4 * worker_count)))
    return max(1, -(-n // size)), size


def even_split(total: int, worker_count: int) -> Int[Array, " w+1"]:
    """Int32[w + 1]: bounds of w intervals; the first `total mod w` are one longer."""
    share, rest = divmod(total, worker_count)
    parts = jnp.arange(worker_count + 1, dtype=jnp.int32)
    return parts * share + jnp.minimum(parts, rest)
