"""Reads a region of the vector, tile by tile or whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._workers import vary_like

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

Carry = TypeVar("Carry")

# Coordinates of a tile: one step of the loop over a region. On CPU a tile of this size
# stays in the level 2 cache while several thresholds are counted.
_TILE = 1 << 16

# Tiles grow with the region, so that a loop has at most this many turns. A moving
# region wastes at most its last tile.
_MOST_TILES = 64

# Regions of at most this many tiles are read at their largest size, without a loop. An
# accelerator would wait for the host in each turn of a loop, so it reads all regions in
# this way.
_UNROLLED_TILES = 4

# Coordinates per run: one 8-bit field holds the count of a run.
RUN = 128


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

    return scan_region(visit, vary_like(carry, vector), vector, 0, n, n)


def alike(vector, *values):
    """`values` as arrays that vary over every axis over which an input varies."""
    values = [jnp.asarray(v, jnp.int32 if isinstance(v, int) else None) for v in values]
    for reference in (vector, *values):
        values = vary_like(values, reference)
    return values


def reach(values: Float[Array, " m"], threshold: Float[Array, ""]) -> Bool[Array, " m"]:
    """Whether `|value| >= threshold`; NaN never does.

    XLA assumes that every magnitude reaches a constant 0, even NaN.
    """
    return (magnitudes_of(values) >= threshold) & (values == values)


def magnitudes_of(x: Float[Array, " m"]) -> Float[Array, " m"]:
    return jnp.abs(x).astype(jnp.float32)


def tiling(span: int) -> tuple[int, int]:
    """The coordinates per tile, and the most tiles of a region."""
    if span <= _UNROLLED_TILES * _TILE or not _xla.on_cpu():
        return span, 1
    tile = max(_TILE, -(-span // (_MOST_TILES * RUN)) * RUN)
    return tile, -(-span // tile)


def tile_start(n: int, start, row, tile: int):
    # The last tile may be too long for the end of the vector: it then starts earlier.
    return jnp.minimum(start + row * tile, n - tile)


def read_tile(vector, start, size, row, tile: int):
    """Values [tile] of a tile in float32, and whether each belongs to the region."""
    first = start + row * tile
    window = tile_start(vector.size, start, row, tile)
    values = jax.lax.dynamic_slice(vector, (window,), (tile,))
    offset = jnp.arange(tile, dtype=jnp.int32)
    inside = (offset >= first - window) & (offset < start + size - window)
    return values.astype(jnp.float32), inside


def read_region(vector, start, size, span: int):
    """`read_tile` of a whole region, for accelerators.

    A number that is computed before the read, for a few coordinates, would be a kernel
    of its own.
    """
    window = tile_start(vector.size, start, jnp.int32(0), span)
    values = jax.lax.dynamic_slice(vector, (window,), (span,))
    place = window + jnp.arange(span, dtype=jnp.int32)
    inside = (place >= start) & (place - size < start)
    return values.astype(jnp.float32), inside


def scan_region(step, carry, vector, start, size, span: int):
    """Folds `step(carry, row, magnitudes [tile])` over the tiles of a region.

    Magnitudes outside the tile are NaN, so they reach no threshold.
    """
    tile, rows = tiling(span)

    def visit(row, carry):
        row = jnp.asarray(row, jnp.int32)
        values, inside = read_tile(vector, start, size, row, tile)
        return step(carry, row, jnp.where(inside, magnitudes_of(values), jnp.nan))

    if rows == 1:
        return visit(0, carry)
    return jax.lax.fori_loop(0, (size + tile - 1) // tile, visit, carry)
