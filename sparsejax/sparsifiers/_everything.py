"""Chooses the whole vector, for dense methods and for others at density 1."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from sparsejax.parts import Choice, Sparsifier


def whole(n: int) -> Choice:
    """The choice of all `n` coordinates."""
    return Choice(None, jnp.asarray(n, jnp.int32), jnp.zeros((), jnp.float32))


def everything() -> Sparsifier:
    """Chooses every coordinate.

    Example:
      >>> everything().support
      'everything'
    """

    def select(vector, state, step):
        del vector
        return whole(step.n), state

    return Sparsifier(select, "everything")


def or_everything(
    sparsifier: Sparsifier, is_everything: Callable[[int], bool]
) -> Sparsifier:
    """`sparsifier`, but chooses the whole vector if `is_everything(n)`.

    In that case the state stays unchanged, and exchanges average whole vectors: the
    step needs no search, no indices and no second message.
    """

    def select(vector, state, step):
        if is_everything(step.n):
            return whole(step.n), state
        return sparsifier.select(vector, state, step)

    def adapt(state, report, step):
        if is_everything(step.n):
            return state
        return sparsifier.adapt(state, report, step)

    return sparsifier._replace(select=select, adapt=adapt)
