"""Counts of the coordinates that reach each of several thresholds, in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from sparsejax import _xla
from sparsejax.vectors._regions import RUN, alike, read_region, scan_region

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Int32


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
    whole = isinstance(start, int) and isinstance(size, int) and size == vector.size
    start, size, thresholds, zeros = alike(
        vector, start, size, thresholds, jnp.zeros(count, jnp.int32)
    )
    if not span or not count:
        return zeros
    thresholds = thresholds.astype(jnp.float32)
    if not _xla.on_cpu():
        # Without a barrier XLA would write the part of the vector that the passes of a
        # search share to memory.
        start, thresholds = _xla.computed_once((start, thresholds))
        if whole:
            values, inside = vector.astype(jnp.float32), None
        else:
            values, inside = read_region(vector, start, size, span)
        return _counts_at_once(jnp.abs(values), inside, thresholds)

    def add(counts, row, magnitudes):
        return counts + _counts(magnitudes, [thresholds[t] for t in range(count)])

    return scan_region(add, zeros, vector, start, size, span)


def _counts(
    magnitudes: Float[Array, " m"], thresholds: list[Float[Array, ""]]
) -> Int32[Array, " t"]:
    """The number of `magnitudes` that reach each threshold.

    XLA:CPU emits one loop over the data per sum, so four counts share one sum. Each
    count has an 8-bit field of a word, which holds the count of one run of coordinates.
    """
    rest = -magnitudes.size % RUN
    if rest:
        magnitudes = jnp.pad(magnitudes, (0, rest), constant_values=jnp.nan)
    runs = magnitudes.reshape(-1, RUN)
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


def _counts_at_once(
    magnitudes: Float[Array, " m"],
    inside: Bool[Array, " m"] | None,
    thresholds: Float[Array, " t"],
) -> Int32[Array, " t"]:
    """`_counts` of the magnitudes `inside`: one read for any number of thresholds.

    If `inside` is None, all magnitudes are counted.

    XLA:GPU computes all sums over the same runs in one kernel. It would write masked
    magnitudes to memory first, so the flags are masked.
    """
    rest = -magnitudes.size % RUN
    runs = jnp.pad(magnitudes, (0, rest), constant_values=jnp.nan).reshape(-1, RUN)
    if inside is not None:
        inside = jnp.pad(inside, (0, rest)).reshape(-1, RUN)
    words = []
    for group in range(0, thresholds.size, 4):
        fields = jnp.zeros(runs.shape, jnp.uint32)
        for j in range(min(4, thresholds.size - group)):
            reached = runs >= thresholds[group + j]
            reached = reached if inside is None else reached & inside
            fields = fields | (reached.astype(jnp.uint32) << (8 * j))
        words.append(jnp.sum(fields, axis=1, dtype=jnp.uint32))
    shifts = jnp.arange(0, 32, 8, dtype=jnp.uint32)[None, :, None]
    counts = jnp.sum(
        (jnp.stack(words)[:, None] >> shifts) & 0xFF, axis=2, dtype=jnp.uint32
    )
    return counts.reshape(-1)[: thresholds.size].astype(jnp.int32)
