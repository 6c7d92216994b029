"""The sparsifier of lossless methods: every element that is not zero."""

from __future__ import annotations

import math

import jax.numpy as jnp

from sparsejax.parts import Payload, Sparsifier
from sparsejax.sparsifiers._everything import whole_vector
from sparsejax.vectors import _bits


def nonzero(capacity: float = 0.05, *, rows: bool = True) -> Sparsifier:
    """Chooses every non-zero coordinate, or every row with one. NaN is not zero.

    With `rows`, the vector is taken as rows of D coordinates, D the greatest common
    divisor of the sizes of the leaves' rows (see `Layout.row_size`): one index then
    stands for D values. One pass over the vector finds them.

    Where more than fit are non-zero, the payload says that it is not complete:
    `hashed_owners` and `recursive_doubling` then average whole vectors, with other
    exchanges what did not fit waits in the memory.

    Args:
      capacity: payload slots as a fraction of all coordinates or rows, in (0, 1].
      rows: whether to look for rows where the leaves have some.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.nonzero(0.05),
      ...     exchange=exchanges.hashed_owners(),
      ...     memory=memories.none(),
      ... )
    """

    def init(layout, worker_count):
        del layout, worker_count
        return ()

    def select(vector, state, step, workers, layout):
        del step, workers
        n = layout.n
        if not n:
            return whole_vector(n), state
        width = layout.row_size if rows else 1
        shape = (n // width, width) if width > 1 else (n,)
        units = vector.reshape(shape)
        flags = units != 0
        words = _bits.pack(jnp.any(flags, axis=1) if width > 1 else flags)
        demand = jnp.sum(_bits.popcount(words), dtype=jnp.int32)
        # The factor undoes the rounding of products such as 0.07 * 100 = 7.000...1.
        slots = max(1, math.ceil(capacity * shape[0] * (1 - 1e-12)))
        ranks = jnp.arange(min(slots, shape[0]), dtype=jnp.int32)
        indices = _bits.positions(words, ranks, lambda rank: rank)
        indices = jnp.where(ranks < demand, indices, shape[0])
        values = units.at[indices].get(mode="fill", fill_value=0)
        return Payload(
            indices,
            values,
            demand,
            jnp.zeros((), jnp.float32),
            complete=demand <= ranks.size,
        ), state

    def adapt(state, report, step, layout):
        del report, step, layout
        return state

    return Sparsifier(init, select, adapt, "overlapping")
