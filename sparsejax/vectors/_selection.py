"""Selection by threshold in a region of the vector, in about one pass over the region.

There is no sort and no n-sized running sum: the flags of qualifying coordinates are
packed into n / 32 words of bits, and all later steps work on words and slots. Nothing
here communicates: results are per worker if the arguments are.

Values and thresholds are compared as float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._workers import vary_like
from sparsejax.vectors import _bits
from sparsejax.vectors._division import divide_product, muldiv

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Int32, UInt32

Carry = TypeVar("Carry")

# Coordinates of a tile: one step of the loop over a region. On CPU a tile of this size
# stays in the level 2 cache while several thresholds are counted.
_TILE = 1 << 16

# Tiles grow with the region, so that a loop has at most this many turns. A moving
# region wastes at most its last tile.
_MOST_TILES = 64

# Regions of at most this many tiles are read at their largest size, without a loop. An
# accelerator, which would wait for the host in each turn of the loop, reads all regions
# so.
_UNROLLED_TILES = 4

# Coordinates per run: one 8-bit field holds the count of a run.
_RUN = 128

# The number of computed slots is a multiple of this.
_ALIGNED = 128


def count_in(
    vector: Float[Array, " n"],
    start: Int[Array, ""] | int,
    size: Int[Array, ""] | int,
    thresholds: Float[Array, " t"],
    *,
    span: int,
) -> Int32[Array, " t"]:
    """Counts the coordinates of a region that reach each of several thresholds.

    Reads the region once; the cost grows with `size`, not with `span`.

    Args:
      vector: Float[n]. NaN reaches no threshold.
      start: Int32[], the first coordinate of the region.
      size: Int32[], the number of coordinates of the region; `start + size <= n`.
      thresholds: Float[t].
      span: static, `size <= span <= n`.

    Returns:
      Int32[t], the number of coordinates `x` of the region with `|x| >= thresholds[t]`.

    Example:
      >>> x = jnp.array([3.0, -0.5, -2.0, 9.0])
      >>> print(count_in(x, 0, 3, jnp.array([0.0, 1.0, 2.5]), span=3))
      [3 2 1]
    """
    count = thresholds.size
    start, size, thresholds, zeros = _alike(
        vector, start, size, thresholds, jnp.zeros(count, jnp.int32)
    )
    if not span or not count:
        return zeros
    thresholds = thresholds.astype(jnp.float32)
    if not _xla.on_cpu():
        # One read for all thresholds: sums in neighbouring columns. Without barriers
        # XLA would write what the passes of a search share to memory.
        start = _xla.after(start, thresholds)
        magnitudes, inside = _tile(vector, start, size, jnp.int32(0), span)
        reached = (magnitudes[:, None] >= thresholds[None]) & inside[:, None]
        return jnp.sum(reached, axis=0, dtype=jnp.int32)

    def add(counts, row, magnitudes):
        return counts + _counts(magnitudes, [thresholds[t] for t in range(count)])

    return _scan_region(add, zeros, vector, start, size, span)


def _counts(
    magnitudes: Float[Array, " m"], thresholds: list[Float[Array, ""]]
) -> Int32[Array, " t"]:
    """The number of `magnitudes` that reach each threshold.

    XLA:CPU emits one loop over the data per sum, so four counts share one sum. Each
    count has an 8-bit field of a word, which holds the count of one run of coordinates.
    """
    rest = -magnitudes.size % _RUN
    if rest:
        magnitudes = jnp.pad(magnitudes, (0, rest), constant_values=jnp.nan)
    runs = magnitudes.reshape(-1, _RUN)
    counts = []
    for group in range(0, len(thresholds), 4):
        shifts = range(0, 8 * len(thresholds[group : group + 4]), 8)
        fields = jnp.zeros(runs.shape, jnp.uint32)
        for shift, threshold in zip(shifts, thresholds[group:], strict=False):
            fields = fields | ((runs >= threshold).astype(jnp.uint32) << shift)
        sums = jnp.sum(fields, axis=1, dtype=jnp.uint32)
        counts += [
            jnp.sum((sums >> shift) & 0xFF, dtype=jnp.uint32) for shift in shifts
        ]
    return jnp.stack(counts).astype(jnp.int32)


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
    start, size, threshold, quota, nothing = _alike(
        vector, start, size, threshold, quota, jnp.zeros((), jnp.int32)
    )
    threshold = threshold.astype(jnp.float32)
    if whole:
        words = _bits.pack_whole(_magnitudes(vector) >= threshold)
        return _fill_slots(words, lambda position: position, quota, capacity, span)
    tile, rows = _tiling(span)
    tile_words = -(-tile // _bits.WORD)
    words = jnp.zeros(rows * tile_words, jnp.uint32) + nothing.astype(jnp.uint32)

    def insert(words, row, magnitudes):
        # The buffer is flat, since XLA:CPU splits a loop over threads along the first
        # axis of its result.
        packed = _bits.pack(magnitudes >= threshold)
        return jax.lax.dynamic_update_slice(words, packed, (row * tile_words,))

    if not _xla.on_cpu() and span:
        start = _xla.after(start, threshold)
        magnitudes, inside = _tile(vector, start, size, jnp.int32(0), span)
        words = _bits.pack((magnitudes >= threshold) & inside)
    elif span:
        words = _scan_region(insert, words, vector, start, size, span)

    def coordinate(position):
        row = position // max(tile_words * _bits.WORD, 1)
        offset = position - row * (tile_words * _bits.WORD)
        return _tile_start(vector.size, start, row, tile) + offset

    return _fill_slots(words, coordinate, quota, capacity, vector.size)


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


def fold(
    step: Callable[[Carry, Float[Array, " m"]], Carry],
    carry: Carry,
    vector: Float[Array, " n"],
) -> Carry:
    """Folds `step(carry, magnitudes [m])` over pieces of the vector.

    The magnitudes of the whole vector are never stored.

    Args:
      step: gets float32 magnitudes, NaN beyond the end of the vector.
      carry: the initial carry.
      vector: Float[n].

    Returns:
      The last carry.

    Example:
      >>> def largest(carry, magnitudes):
      ...     return jnp.fmax(carry, jnp.nanmax(magnitudes))
      >>> print(fold(largest, jnp.float32(0), jnp.array([3.0, -5.0])))
      5.0
    """
    n = vector.size
    if not n:
        return carry

    def visit(carry, row, magnitudes):
        return step(carry, magnitudes)

    return _scan_region(visit, vary_like(carry, vector), vector, 0, n, n)


def _fill_slots(
    words: UInt32[Array, " words"],
    coordinate: Callable[[Int32[Array, " k"]], Int32[Array, " k"]],
    quota: Int32[Array, ""],
    capacity: int,
    n: int,
) -> tuple[Int32[Array, " k"], Int32[Array, ""]]:
    """Slots for evenly strided set bits of `words`; see `select_in`."""
    demand = jnp.sum(_bits.popcount(words), dtype=jnp.int32)
    kept = jnp.minimum(jnp.minimum(demand, quota), capacity)
    # An odd number of slots takes more than twice as long on XLA:CPU.
    slots = jnp.arange(-(-capacity // _ALIGNED) * _ALIGNED, dtype=jnp.int32)
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
    return _xla.computed_once(indices[:capacity]), demand


def _alike(vector, *values):
    """`values` as arrays that vary over every axis over which an input varies."""
    values = [jnp.asarray(v, jnp.int32 if isinstance(v, int) else None) for v in values]
    for reference in (vector, *values):
        values = vary_like(values, reference)
    return values


def _magnitudes(x: Float[Array, " m"]) -> Float[Array, " m"]:
    return jnp.abs(x).astype(jnp.float32)


def _tiling(span: int) -> tuple[int, int]:
    """The coordinates per tile, and the most tiles of a region."""
    if span <= _UNROLLED_TILES * _TILE or not _xla.on_cpu():
        return span, 1
    tile = max(_TILE, -(-span // (_MOST_TILES * _RUN)) * _RUN)
    return tile, -(-span // tile)


def _tile_start(n: int, start, row, tile: int):
    # The last tile may be too long for the end of the vector: it then starts earlier.
    return jnp.minimum(start + row * tile, n - tile)


def _tile(vector, start, size, row, tile: int):
    """Magnitudes [tile] of a tile, and whether each belongs to the region and tile."""
    first = start + row * tile
    window = _tile_start(vector.size, start, row, tile)
    values = jax.lax.dynamic_slice(vector, (window,), (tile,))
    offset = jnp.arange(tile, dtype=jnp.int32)
    inside = (offset >= first - window) & (offset < start + size - window)
    return _magnitudes(values), inside


def _scan_region(step, carry, vector, start, size, span: int):
    """Folds `step(carry, row, magnitudes [tile])` over the tiles of a region.

    Magnitudes outside the tile are NaN, so they reach no threshold.
    """
    tile, rows = _tiling(span)

    def visit(row, carry):
        row = jnp.asarray(row, jnp.int32)
        magnitudes, inside = _tile(vector, start, size, row, tile)
        return step(carry, row, jnp.where(inside, magnitudes, jnp.nan))

    if rows == 1:
        return visit(0, carry)
    return jax.lax.fori_loop(0, (size + tile - 1) // tile, visit, carry)
