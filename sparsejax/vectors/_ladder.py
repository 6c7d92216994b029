"""Selection in a region at one of several thresholds, in one read of the region.

This is the form for accelerators, where a sample suggests a threshold. Only a read of
the region shows whether `quota` coordinates reach that threshold, so the same read
tries lower thresholds too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from sparsejax import _xla
from sparsejax.vectors import _bits
from sparsejax.vectors._regions import alike, read_region, tile_start
from sparsejax.vectors._selection import fill_slots

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Int32, UInt32

# Words whose bits are counted in one small sum.
_BLOCK = 16


class Filled(NamedTuple):
    """The coordinates of a region that reach a threshold. Per worker.

    Attributes:
      words: UInt32[span / 32], a bit for each coordinate from `window` on.
      demand: Int32[], the number of set bits.
      threshold: Float[].
      window: Int32[], the first coordinate that was read.
    """

    words: UInt32[Array, " words"]
    demand: Int32[Array, ""]
    threshold: Float[Array, ""]
    window: Int32[Array, ""]

    def padded(self, span: int) -> Filled:
        """Adds words up to a region of `span`: branches need equal shapes."""
        more = -(-span // _bits.WORD) - self.words.size
        return self._replace(words=jnp.pad(self.words, (0, more)))

    def indices(
        self, limit: Int[Array, ""], capacity: int, n: int
    ) -> Int32[Array, " k"]:
        """Int32[capacity]: at most `limit` of the coordinates; see `select_in`."""

        def coordinate(place):
            return self.window + place

        return fill_slots(self.words, coordinate, self.demand, limit, capacity, n)


def filled(
    vector: Float[Array, " n"],
    start: Int[Array, ""],
    size: Int[Array, ""],
    thresholds: Float[Array, " r"],
    quota: Int[Array, ""],
    *,
    span: int,
) -> Filled:
    """Finds the first of several thresholds that `quota` coordinates of a region reach.

    If `quota` coordinates reach no threshold, it finds the last one.

    Args:
      vector: Float[n]. NaN never qualifies.
      start: Int32[], the first coordinate of the region.
      size: Int32[], the number of coordinates of the region; `start + size <= n`.
      thresholds: Float[r], descending; one, two or three.
      quota: Int32[], the number of coordinates that should reach a threshold.
      span: static, `size <= span <= n`, at least 1.

    Returns:
      `Filled`; its method `indices` selects.

    Example:
      >>> x, thresholds = jnp.array([3.0, -0.5, -2.0, 9.0]), jnp.array([5.0, 1.0, 0.1])
      >>> import jax
      >>> @jax.jit
      ... def two_of_four(start, size, quota):
      ...     found = filled(x, start, size, thresholds, quota, span=4)
      ...     return found.indices(quota, 2, 4), found.demand, found.threshold
      >>> print(*two_of_four(0, 4, 2))
      [0 2] 3 1.0
    """
    start, size, thresholds, quota = alike(vector, start, size, thresholds, quota)
    # Barrier: see `count_in`; and XLA assumes that NaN reaches a constant 0.
    start, thresholds = _xla.computed_once((start, thresholds.astype(jnp.float32)))
    values, inside = read_region(vector, start, size, span)
    rows = [_bits.pack((jnp.abs(values) >= t) & inside) for t in thresholds]
    # Barrier against fusion: the counts would read the region again.
    rows = _xla.computed_once(rows)
    counts = _counts(rows)
    each = list(zip(counts, list(thresholds), rows, strict=True))
    taken = each[-1]
    for rung in each[-2::-1]:
        enough = rung[0] >= quota
        taken = tuple(jnp.where(enough, a, b) for a, b in zip(rung, taken, strict=True))
    demand, found, words = taken
    window = tile_start(vector.size, start, jnp.int32(0), span)
    return Filled(words, demand, found, window)


def _counts(rows: list[UInt32[Array, " words"]]) -> list[Int32[Array, ""]]:
    """The number of set bits in each of up to three rows."""
    blocks = [
        jnp.pad(_bits.popcount(row), (0, -row.size % _BLOCK)).reshape(-1, _BLOCK)
        for row in rows
    ]
    return list(jnp.sum(_bits.sums_at_once(blocks), axis=1, dtype=jnp.int32))
