"""Selection in a part that consists of pieces, each with a threshold and a quota.

This is the form for accelerators: it reads all pieces at once, with as many kernels as
for one piece. The vector is read in rows that do not cross the edge of a piece, so that
every row has one threshold, and a piece is a range of rows that is known when traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla
from sparsejax.vectors import _bits
from sparsejax.vectors._division import divide_product, muldiv
from sparsejax.vectors._scans import running_sum

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Int32

# Coordinates of a row: as many as a block has in `_bits.positions`.
_ROW = 128


class _Rows(NamedTuple):
    """The rows of the vector. `L` layers, `R` rows.

    Attributes:
      edges: static, [L + 1], the first row of each layer.
      layer: Int32[R], the layer of each row.
      first: Int32[R], the first coordinate of each row.
    """

    edges: np.ndarray
    layer: Int32[Array, " R"]
    first: Int32[Array, " R"]

    @classmethod
    def of(cls, layers: np.ndarray) -> _Rows:
        edges = np.concatenate([[0], np.cumsum(-(-np.diff(layers) // _ROW))])
        edges = edges.astype(np.int32)
        row = jnp.arange(edges[-1], dtype=jnp.int32)
        layer = _place(jnp.asarray(edges[1:]), row)
        first = _ROW * row + jnp.asarray(layers[:-1] - _ROW * edges[:-1])[layer]
        return cls(edges, *_xla.computed_once((layer, first)))


def select_pieces(
    vector: Float[Array, " n"],
    layers: np.ndarray,
    bounds: tuple[Int[Array, ""], Int[Array, ""]],
    thresholds: Float[Array, "L r"],
    quotas: Int[Array, " L"],
    *,
    capacity: int,
) -> tuple[Int32[Array, " k"], Int32[Array, " L"], Float[Array, " L"]]:
    """Chooses a quota of coordinates of each layer in one part of the vector.

    Args:
      vector: Float[n]. NaN never qualifies.
      layers: static, Int32[L + 1], ascending from 0 to `n`: layer `l` is
        `[layers[l], layers[l + 1])`, and no layer is empty.
      bounds: Int32[] each: the part is `[bounds[0], bounds[1])`.
      thresholds: Float[L, r], descending for each layer. A piece uses the first one
        that at least as many coordinates as its quota reach, or else the last one.
      quotas: Int32[L], the coordinates to choose in each piece.
      capacity: static, the number of slots `k`.

    Returns:
      indices: Int32[k], ascending; empty slots hold `n`. If more qualify in a piece
        than its quota, coordinates of evenly strided rank are kept.
      demand: Int32[L], the number of coordinates that qualified in each piece.
      threshold: Float[L], the threshold that each piece uses. All three results are
        per worker if an argument is.

    Example:
      >>> x, layers = jnp.array([3.0, -0.5, -2.0, 9.0]), np.array([0, 2, 4])
      >>> thresholds = jnp.array([[1.0, 0.1], [5.0, 0.1]])
      >>> @jax.jit
      ... def one_of_each(a, b):
      ...     quotas = jnp.array([1, 1])
      ...     return select_pieces(x, layers, (a, b), thresholds, quotas, capacity=3)
      >>> print(*one_of_each(0, 3))
      [0 2 4] [1 1] [1.  0.1]
    """
    rows, rungs = _Rows.of(layers), thresholds.shape[1]
    place = rows.first[:, None] + np.arange(_ROW, dtype=np.int32)[None]
    end = jnp.minimum(jnp.asarray(layers[1:], jnp.int32)[rows.layer], bounds[1])
    inside = (place >= bounds[0]) & (place < end[:, None])
    place = jnp.minimum(place, vector.size - 1)
    values = vector.at[place].get(mode="promise_in_bounds").astype(jnp.float32)
    # Barrier: XLA assumes that NaN reaches a constant 0.
    limits = _xla.computed_once(thresholds[rows.layer])
    words = [
        _bits.pack(((jnp.abs(values) >= limits[:, i, None]) & inside).reshape(-1))
        for i in range(rungs)
    ]
    # Barrier against fusion: the counts would read the vector again.
    words = [x.reshape(len(rows.layer), -1) for x in _xla.computed_once(words)]

    counts = jnp.stack([jnp.sum(_bits.popcount(x), axis=1) for x in words])
    through = jax.vmap(running_sum)(counts)
    through = jnp.pad(through, ((0, 0), (1, 0)))[:, rows.edges]
    counts = jnp.diff(through, axis=1).T  # [L, r]
    enough = counts >= quotas[:, None]
    taken = jnp.where(jnp.any(enough, axis=1), jnp.argmax(enough, axis=1), rungs - 1)
    demand, found = (
        jnp.take_along_axis(x, taken[:, None], axis=1)[:, 0]
        for x in (counts, thresholds)
    )
    each = taken[rows.layer][:, None]
    kept = words[-1]
    for i in range(rungs - 1):
        kept = jnp.where(each == i, words[i], kept)

    ranks, first_slot, filled = _strided(demand, quotas, capacity)
    position = _bits.positions(kept.reshape(-1), ranks, first_slot)
    row = jnp.minimum(position // _ROW, rows.edges[-1] - 1)
    indices = rows.first[row] + position % _ROW
    indices = jnp.where(jnp.arange(capacity) < filled, indices, vector.size)
    # Barrier against fusion: each use would recompute the indices from the bits.
    return _xla.computed_once(indices), demand, found


def _strided(demand, quotas, capacity):
    """Ranks [k] of the bits to keep, the inverse map, and the number of bits to keep.

    See `_bits.positions` for the first two.
    """
    filled = jnp.minimum(jnp.cumsum(jnp.minimum(demand, quotas)), capacity)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), filled[:-1]])
    kept, through = filled - starts, jnp.cumsum(demand)
    slots = jnp.arange(capacity, dtype=jnp.int32)
    piece = _place(filled, slots)
    inside = jnp.minimum(slots - starts[piece], kept[piece])
    ranks = muldiv(inside, demand[piece], jnp.maximum(kept[piece], 1))
    ranks = ranks + (through - demand)[piece]

    def first_slot(rank):
        piece = _place(through, rank)
        slot, rest = divide_product(
            rank - (through - demand)[piece],
            kept[piece],
            jnp.maximum(demand[piece], 1),
        )
        slot = starts[piece] + slot + (rest > 0).astype(jnp.int32)
        return jnp.where(rank < through[-1], slot, filled[-1])

    return jnp.where(slots < filled[-1], ranks, through[-1]), first_slot, filled[-1]


def _place(ends: Int32[Array, " L"], numbers: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """For each number, the first of the ascending `ends` above it, or else the last."""
    # The default method is a loop, which becomes dozens of kernels on a GPU.
    found = jnp.searchsorted(ends, numbers, side="right", method="compare_all")
    return jnp.minimum(found, ends.size - 1).astype(jnp.int32)
