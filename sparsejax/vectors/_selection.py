"""Selection by threshold in a region of the vector, in about one pass over the region.

There is no sort and no n-sized running sum: the flags of qualifying coordinates are
packed into n / 32 words of bits, and all later steps work on words and slots. Nothing
here communicates: results are per worker if the arguments are.

Values and thresholds are compared as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax.vectors import _bits
from sparsejax.vectors._division import divide_product, muldiv
from sparsejax.vectors._regions import (
    alike,
    reach,
    read_region,
    scan_region,
    tile_start,
    tiling,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Int32, UInt32

# On CPU, the number of computed slots is a multiple of this.
_ALIGNED = 128


def select_in(
    vector: Float[Array, " n"],
    start: Int[Array, ""] | int,
    size: Int[Array, ""] | int,
    threshold: Float[Array, ""] | float,
    quota: Int[Array, ""] | int,
    *,
    span: int,
    capacity: int,
) -> tuple[Int32[Array, " k"], Int32[Array, ""]]:
    """The coordinates of a region that reach a threshold, in ascending order.

    If `demand` coordinates reach the threshold and `demand > quota`, the coordinates of
    rank `floor(i * demand / quota)` for `i < quota` are kept. These ranks are evenly
    strided, so the position of a coordinate never decides whether the coordinate waits.

    Reads the region once; the cost grows with `size`, `capacity` and `span / 32`.

    Args:
      vector: Float[n]. NaN never qualifies.
      start: Int32[], the first coordinate of the region.
      size: Int32[], the number of coordinates of the region; `start + size <= n`.
      threshold: Float[]. Coordinates `x` with `|x| >= threshold` qualify; zeros qualify
        only at a threshold of 0.
      quota: Int32[], at most `capacity`: the most coordinates to keep.
      span: static, `size <= span <= n`.
      capacity: static, the number of slots `k`.

    Returns:
      indices: Int32[k], coordinates of `vector`; empty slots hold `n`.
      demand: Int32[], the number of coordinates that qualified.

    Example:
      >>> x = jnp.array([3.0, -0.5, -2.0, 9.0])
      >>> indices, demand = select_in(x, 1, 3, 1.0, 2, span=3, capacity=3)
      >>> print(indices, demand)
      [2 3 4] 2
    """
    # A region that is statically the whole vector needs no loop.
    region = (start, size)
    whole = all(isinstance(x, int) for x in region) and region == (0, vector.size)
    start, size, threshold, quota, nothing = alike(
        vector, start, size, threshold, quota, jnp.zeros((), jnp.int32)
    )
    threshold = threshold.astype(jnp.float32)
    if whole:
        words = _bits.pack_whole(reach(vector, threshold))
        return _kept(words, lambda position: position, quota, capacity, span)
    tile, rows = tiling(span)
    tile_words = -(-tile // _bits.WORD)

    def insert(words, row, magnitudes):
        # The buffer is flat, since XLA:CPU splits a loop over threads along the first
        # axis of its result.
        packed = _bits.pack(magnitudes >= threshold)
        return jax.lax.dynamic_update_slice(words, packed, (row * tile_words,))

    if span and not _xla.on_cpu():
        # Barrier: see `count_in`; and XLA assumes that NaN reaches a constant 0.
        start, threshold = _xla.computed_once((start, threshold))
        values, inside = read_region(vector, start, size, span)
        words = _bits.pack((jnp.abs(values) >= threshold) & inside)
    else:
        words = jnp.zeros(rows * tile_words, jnp.uint32) + nothing.astype(jnp.uint32)
        if span:
            words = scan_region(insert, words, vector, start, size, span)

    def coordinate(position):
        row = position // max(tile_words * _bits.WORD, 1)
        offset = position - row * (tile_words * _bits.WORD)
        return tile_start(vector.size, start, row, tile) + offset

    return _kept(words, coordinate, quota, capacity, vector.size)


def compact(
    vector: Float[Array, " n"], threshold: Float[Array, ""] | float, *, capacity: int
) -> tuple[Int32[Array, " k"], Int32[Array, ""]]:
    """`select_in` over the whole vector, with a quota of `capacity`.

    Args:
      vector: Float[n].
      threshold: Float[]. Coordinates `x` with `|x| >= threshold` qualify.
      capacity: static, the number of slots `k`.

    Returns:
      indices: Int32[k], ascending; empty slots hold `n`.
      demand: Int32[], the number of coordinates that qualified.

    Example:
      >>> import functools, jax, jax.numpy as jnp
      >>> select = jax.jit(functools.partial(compact, capacity=4))
      >>> indices, demand = select(jnp.array([3.0, -0.5, -2.0]), 1.0)
      >>> print(indices, demand)
      [0 2 3 3] 2
    """
    n = vector.size
    return select_in(vector, 0, n, threshold, capacity, span=n, capacity=capacity)


def _kept(words, coordinate, quota, capacity, n):
    """Slots for the set bits of `words`, and their number."""
    demand = jnp.sum(_bits.popcount(words), dtype=jnp.int32)
    return fill_slots(words, coordinate, demand, quota, capacity, n), demand


def fill_slots(
    words: UInt32[Array, " words"],
    coordinate: Callable[[Int32[Array, " k"]], Int32[Array, " k"]],
    demand: Int32[Array, ""],
    quota: Int32[Array, ""],
    capacity: int,
    n: int,
) -> Int32[Array, " k"]:
    """Slots for evenly strided ones of `demand` set bits of `words`; see `select_in`.

    `coordinate` maps the positions of bits to coordinates; empty slots hold `n`.
    """
    kept = jnp.minimum(jnp.minimum(demand, quota), capacity)
    # XLA:CPU takes more than twice as long for other numbers of slots.
    aligned = _ALIGNED if _xla.on_cpu() else 1
    slots = jnp.arange(-(-capacity // aligned) * aligned, dtype=jnp.int32)
    # `maximum` avoids division by 0 if nothing is kept; `minimum` keeps the ranks of
    # empty slots in range.
    ranks = muldiv(jnp.minimum(slots, kept), demand, jnp.maximum(kept, 1))

    def first_slot(rank):
        # floor(i * demand / kept) >= rank if and only if i >= rank * kept / demand.
        slot, rest = divide_product(rank, kept, jnp.maximum(demand, 1))
        return slot + (rest > 0).astype(jnp.int32)

    position = _bits.positions(words, ranks, first_slot)
    indices = jnp.where(slots < kept, coordinate(position), n)
    # Barrier against fusion: each use would recompute the indices from the bits.
    return _xla.computed_once(indices[:capacity])
