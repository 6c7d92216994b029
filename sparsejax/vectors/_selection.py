"""Selection by threshold over a region of the vector, in about one pass over it.

No sorting and no n-sized running sum: the flags of qualifying coordinates are packed
into bits, n / 32 words, and everything after that works on words and slots. Nothing
here communicates; results are per worker where arguments are.

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

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Int32, UInt32

Carry = TypeVar("Carry")

# Coordinates per step of the loop over a region. On CPU a tile of this size stays in
# the level 2 cache while several thresholds are applied to it.
_TILE = 1 << 16

# A loop step costs an accelerator some kernel launches, so that tiles grow with the
# region; a moving region wastes at most its last tile.
_MOST_TILES = 64

# Regions of up to this many tiles are read at their largest size, without a loop.
_UNROLLED_TILES = 4

# How many coordinates are counted in one 8-bit field.
_RUN = 128

# Slots are computed in multiples of this.
_ALIGNED = 128


def muldiv(
    a: Int[Array, " *shape"],
    b: Int[Array, " *shape"] | int,
    c: Int[Array, " *shape"] | int,
) -> Int32[Array, " *shape"]:
    """`floor(a * b / c)`, exact although `a * b` may not fit into 32 bits.

    Args:
      a: Int32[...], at least 0.
      b: Int32[...], at least 0.
      c: Int32[...], at least 1.

    Returns:
      Int32[...]. The quotient has to fit; otherwise it wraps.
    """
    return _divide_product(a, b, c)[0]


def _divide_product(a, b, c) -> tuple[Int32[Array, " *shape"], Int32[Array, " *shape"]]:
    """Quotient and remainder of `a * b` by `c`.

    Long division of `a * b` by `c` in two digits of 16 bits of `a`. Each digit of the
    quotient is estimated in float32; it lies below 2^17, where the estimate is off by
    less than 1/8. Lowered by that much it is the digit or one less, and the remainder,
    below `2 c`, is exact in wrapping 32-bit arithmetic.
    """
    a, b, c = (jnp.asarray(x, jnp.int32).astype(jnp.uint32) for x in (a, b, c))
    whole = b // c
    b = b - whole * c
    divisor = c.astype(jnp.float32)
    quotient = a * whole
    remainder = jnp.zeros_like(a)
    for shift in (16, 0):
        digit = (a >> shift) & 0xFFFF
        product = remainder.astype(jnp.float32) * 65536.0 + (
            digit.astype(jnp.float32) * b.astype(jnp.float32)
        )
        estimate = jnp.maximum(product / divisor - 0.125, 0.0).astype(jnp.uint32)
        remainder = (remainder << 16) + digit * b - estimate * c
        short = remainder >= c
        remainder = jnp.where(short, remainder - c, remainder)
        quotient = quotient + ((estimate + short.astype(jnp.uint32)) << shift)
    return quotient.astype(jnp.int32), remainder.astype(jnp.int32)


def count_in(
    vector: Float[Array, " n"],
    start: Int[Array, ""] | int,
    size: Int[Array, ""] | int,
    thresholds: Float[Array, " t"],
    *,
    span: int,
) -> Int32[Array, " t"]:
    """How many coordinates of a region reach each of several thresholds.

    Reads the region once; its cost follows `size`, not `span`.

    Args:
      vector: Float[n]. NaN reaches no threshold.
      start: Int32[], the first coordinate of the region.
      size: Int32[], how many coordinates it has; `start + size <= n`.
      thresholds: Float[t].
      span: static, `size <= span <= n`.

    Returns:
      Int32[t], how many coordinates `x` of the region have `|x| >= thresholds[t]`.
    """
    count = thresholds.size
    start, size, thresholds, zeros = _alike(
        vector, start, size, thresholds, jnp.zeros(count, jnp.int32)
    )
    if not span or not count:
        return zeros
    thresholds = thresholds.astype(jnp.float32)

    def add(counts, row, magnitudes):
        return counts + _counts(magnitudes, [thresholds[t] for t in range(count)])

    return _scan_region(add, zeros, vector, start, size, span)


def _counts(
    magnitudes: Float[Array, " m"], thresholds: list[Float[Array, ""]]
) -> Int32[Array, " t"]:
    """How many of `magnitudes` reach each threshold.

    XLA emits one loop over the data per sum, so four counts at a time share a sum:
    each has an 8-bit field of a word, which holds the count of a run of coordinates.
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

    When `demand`, their number, exceeds `quota`, those of rank
    `floor(i * demand / quota)` for `i < quota` are kept: evenly strided, so that a
    coordinate's position in the vector never decides whether it has to wait.

    Reads the region once; its cost follows `size` and `capacity`, and `span / 32`.

    Args:
      vector: Float[n]. NaN never qualifies.
      start: Int32[], the first coordinate of the region.
      size: Int32[], how many coordinates it has; `start + size <= n`.
      threshold: Float[]. Coordinates `x` with `|x| >= threshold` qualify, zeros too
        when it is 0.
      quota: Int32[], at most `capacity`: how many coordinates to keep at most.
      span: static, `size <= span <= n`.
      capacity: static, the number of slots `k`.

    Returns:
      indices: Int32[k], coordinates of `vector`; empty slots hold `n`.
      demand: Int32[], how many coordinates qualified.
    """
    # No loop is needed over a region that is known to be all of the vector.
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
        # A flat buffer: XLA:CPU splits a loop over threads along its first axis.
        packed = _bits.pack(magnitudes >= threshold)
        return jax.lax.dynamic_update_slice(words, packed, (row * tile_words,))

    if span:
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
      demand: Int32[], how many coordinates qualified.

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

    So a function of each magnitude never takes memory for all of them.

    Args:
      step: takes NaN beyond the end of the vector, as float32.
      carry: where to start.
      vector: Float[n].
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
    # XLA:CPU takes more than twice as long for slots of an odd number.
    slots = jnp.arange(-(-capacity // _ALIGNED) * _ALIGNED, dtype=jnp.int32)
    # Divisors of at least 1 where nothing is kept, and slots with a rank that fits.
    ranks = muldiv(jnp.minimum(slots, kept), demand, jnp.maximum(kept, 1))

    def first_slot(rank):
        # floor(i * demand / kept) >= rank if and only if i >= rank * kept / demand.
        slot, rest = _divide_product(rank, kept, jnp.maximum(demand, 1))
        return slot + (rest > 0).astype(jnp.int32)

    position = _bits.positions(words, ranks, first_slot)
    indices = jnp.where(slots < kept, coordinate(position), n)
    # Barrier: XLA would recompute the indices, from the bits on, for each use.
    return _xla.computed_once(indices[:capacity]), demand


def _alike(vector, *values):
    """`values` as arrays that vary over the axes over which any of the inputs does."""
    values = [jnp.asarray(v, jnp.int32 if isinstance(v, int) else None) for v in values]
    for reference in (vector, *values):
        values = vary_like(values, reference)
    return values


def _magnitudes(x: Float[Array, " m"]) -> Float[Array, " m"]:
    return jnp.abs(x).astype(jnp.float32)


def _tiling(span: int) -> tuple[int, int]:
    """How many coordinates a tile of a region has, and the most tiles of a region."""
    if span <= _UNROLLED_TILES * _TILE:
        return span, 1
    tile = max(_TILE, -(-span // (_MOST_TILES * _RUN)) * _RUN)
    return tile, -(-span // tile)


def _tile_start(n: int, start, row, tile: int):
    # The last tile may not fit between its first coordinate and the end.
    return jnp.minimum(start + row * tile, n - tile)


def _scan_region(step, carry, vector, start, size, span: int):
    """Folds `step(carry, row, magnitudes [tile])` over the tiles of a region.

    Magnitudes of coordinates that do not belong to the tile are NaN, so that they
    reach no threshold.
    """
    tile, rows = _tiling(span)

    def visit(row, carry):
        row = jnp.asarray(row, jnp.int32)
        first = start + row * tile
        window = _tile_start(vector.size, start, row, tile)
        values = jax.lax.dynamic_slice(vector, (window,), (tile,))
        offset = jnp.arange(tile, dtype=jnp.int32)
        inside = (offset >= first - window) & (offset < start + size - window)
        return step(carry, row, jnp.where(inside, _magnitudes(values), jnp.nan))

    if rows == 1:
        return visit(0, carry)
    return jax.lax.fori_loop(0, (size + tile - 1) // tile, visit, carry)
