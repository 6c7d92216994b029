"""The sparsifier of dense methods: the whole vector."""

from __future__ import annotations

import jax.numpy as jnp

from sparsejax.parts import Payload, Sparsifier


def whole_vector(n: int) -> Payload:
    """A payload that stands for all `n` coordinates."""
    demand = jnp.asarray(n, jnp.int32)
    return Payload(None, None, demand, jnp.zeros((), jnp.float32))


def everything() -> Sparsifier:
    """Chooses every coordinate.

    Example:
      >>> everything().support
      'everything'
    """

    def init(layout, worker_count):
        del layout, worker_count
        return ()

    def select(vector, state, step, workers, layout):
        del step, workers, layout
        return whole_vector(vector.shape[0]), state

    def adapt(state, report, step, layout):
        del report, step, layout
        return state

    return Sparsifier(init, select, adapt, "everything")
