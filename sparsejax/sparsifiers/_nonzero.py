"""The sparsifier of lossless methods: chooses every element that is not zero."""

from __future__ import annotations

import math

import jax.numpy as jnp

from sparsejax._checks import check_density
from sparsejax.parts import Choice, Sparsifier
from sparsejax.sparsifiers._everything import or_everything
from sparsejax.vectors import _bits


def nonzero(max_density: float = 0.05, *, rows: bool = True) -> Sparsifier:
    """Chooses every non-zero coordinate, or every row with one. NaN is not zero.

    With `rows`, the vector consists of rows of D coordinates, and one index stands for
    D values. D is the greatest common divisor of the sizes of the leaves' rows (see
    `Layout.row_size`). One pass over the vector finds all non-zeros.

    The choice is lossless: if more non-zeros exist than fit, `hashed_owners` and
    `recursive_doubling` average whole vectors. With other exchanges the rest waits in
    the memory.

    Args:
      max_density: the fraction of all coordinates, or rows, that fit the message, in
        (0, 1].
      rows: whether to choose rows if the leaves have rows in common.

    Raises:
      TypeError: if `max_density` is not a number, or is traced.
      ValueError: if `max_density` is outside (0, 1].

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.nonzero(0.05),
      ...     exchange=exchanges.hashed_owners(),
      ...     memory=memories.none(),
      ... )
    """
    max_density = check_density(max_density, "max_density")

    def select(vector, state, step):
        width = step.layout.row_size if rows else 1
        units = step.n // width
        flags = vector.reshape((units, width) if width > 1 else (units,)) != 0
        words = _bits.pack(jnp.any(flags, axis=1) if width > 1 else flags)
        demand = jnp.sum(_bits.popcount(words), dtype=jnp.int32)
        # The factor undoes the rounding of products such as 0.07 * 100 = 7.000...1.
        slots = max(1, math.ceil(max_density * units * (1 - 1e-12)))
        ranks = jnp.arange(min(slots, units), dtype=jnp.int32)
        indices = _bits.positions(words, ranks, lambda rank: rank)
        indices = jnp.where(ranks < demand, indices, units)
        return Choice(indices, demand, jnp.float32(0), row_size=width), state

    made = Sparsifier(select, "overlapping", lossless=True)
    return or_everything(made, lambda n: n == 0)
