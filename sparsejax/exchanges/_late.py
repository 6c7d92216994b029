"""Shared by exchanges that deliver later than they choose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from sparsejax.exchanges._units import Units
from sparsejax.parts import Choice, Sparsifier, Step

if TYPE_CHECKING:
    from sparsejax._layout import Layout
    from sparsejax._workers import Workers


def with_indices(choice: Choice, n: int) -> Any:
    """The choice of the whole vector by its indices; others as they are."""
    if choice.indices is not None:
        return choice
    return choice._replace(indices=jnp.arange(n, dtype=jnp.int32), row_size=1)


def slots_of(
    sparsifier: Sparsifier, workers: Workers
) -> Callable[[Layout, int], tuple[Units, int]]:
    """`(layout, worker_count) -> (units, slots)` of the sparsifier's choices. Static.

    A trace of the sparsifier tells the shapes, which fix the size of the state.
    """

    @functools.cache
    def of(layout: Layout, worker_count: int) -> tuple[Units, int]:
        step = Step(jnp.zeros((), jnp.int32), workers, layout, sparsifier.support)
        found = []

        def choose():
            state = sparsifier.init(layout, worker_count)
            vector = workers.localize(jnp.zeros((layout.n,), jnp.float32))
            choice, _ = sparsifier.select(vector, state, step)
            choice = with_indices(choice, layout.n)
            found.append((Units.of(choice, layout.n), choice.indices.size))
            return choice.indices

        workers.eval_bound(choose, worker_count)
        return found[0]

    return of
