"""A threshold that the user fixes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from sparsejax._checks import check_capacity, check_density, check_threshold
from sparsejax.parts import Choice, Sparsifier
from sparsejax.sparsifiers._target import Schedule, slot_count, target_count
from sparsejax.vectors._selection import compact


def hard_threshold(
    threshold: float | Schedule,
    *,
    max_density: float = 0.01,
    capacity: int | None = None,
) -> Sparsifier:
    """Selects `|x| >= threshold` on each worker, in one pass.

    If more coordinates qualify than fit, coordinates of evenly strided rank are sent.

    Args:
      threshold: in units of the accumulated gradient, at least 0; or a schedule, a
        function from Int32[], the step, to Float[].
      max_density: the fraction of the coordinates that fit the message, in (0, 1].
      capacity: slots per worker; by default `max(1, floor(max_density n))`.

    Raises:
      TypeError: if an argument is not a number, or is traced.
      ValueError: if an argument is out of its range.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.hard_threshold(0.1),
      ...     exchange=exchanges.pairs(),
      ...     memory=memories.error_feedback(),
      ... )
    """
    scheduled = callable(threshold)
    given: Any = threshold if scheduled else check_threshold(threshold)
    capacity = check_capacity(capacity)
    max_density = check_density(max_density, "max_density")

    def select(vector, state, step):
        most = slot_count(capacity, target_count(max_density, step.n), step.n)
        found = given
        if scheduled:  # NaN and negative numbers count as 0.
            found = jnp.maximum(jnp.nan_to_num(jnp.float32(given(step.index))), 0.0)
        indices, demand = compact(vector, found, capacity=most)
        return Choice(indices, demand, jnp.float32(found)), state

    return Sparsifier(select, "overlapping")
