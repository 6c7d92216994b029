"""A threshold that the user fixes."""

from __future__ import annotations

import jax.numpy as jnp

from sparsejax.parts import Payload, Sparsifier
from sparsejax.sparsifiers._target import target_count
from sparsejax.vectors._selection import compact


def hard_threshold(
    threshold: float, *, density: float = 0.01, capacity: int | None = None
) -> Sparsifier:
    """Selects `|x| >= threshold` on each worker, in one pass.

    Where more qualify than fit, those of evenly strided rank are sent.

    Args:
      threshold: in units of the accumulated gradient.
      density: size of the message, as a fraction of the coordinates, in (0, 1].
      capacity: payload slots per worker; by default what `density` stands for.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.hard_threshold(0.1),
      ...     exchange=exchanges.pairs(),
      ...     memory=memories.error_feedback(),
      ... )
    """

    def init(layout, worker_count):
        del layout, worker_count
        return ()

    def select(vector, state, step, workers, layout):
        del step, workers
        goal = target_count(density, layout.n)
        slots = goal if capacity is None else min(capacity, layout.n)
        indices, demand = compact(vector, threshold, capacity=slots)
        values = vector.at[indices].get(mode="fill", fill_value=0)
        return Payload(indices, values, demand, jnp.float32(threshold)), state

    def adapt(state, report, step, layout):
        del report, step, layout
        return state

    return Sparsifier(init, select, adapt, "overlapping")
