"""Helpers of exchanges that deliver later than they choose."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from sparsejax.exchanges._units import Units
from sparsejax.parts import Choice, Sparsifier, Step

if TYPE_CHECKING:
    from sparsejax._layout import Layout
    from sparsejax._workers import Workers


def with_indices(choice: Choice, n: int) -> Any:
    """A choice of the whole vector gets indices; all others are returned unchanged."""
    if choice.indices is not None:
        return choice
    return choice._replace(indices=jnp.arange(n, dtype=jnp.int32), row_size=1)


class Slots(NamedTuple):
    """The slots of a sparsifier's choices. Static.

    Attributes:
      units: the units of the indices.
      number: k, the number of slots.
      whole: whether all workers choose the whole vector.
    """

    units: Units
    number: int
    whole: bool


def slots_of(
    sparsifier: Sparsifier, workers: Workers
) -> Callable[[Layout, int], Slots]:
    """`(layout, worker_count) -> Slots` of the sparsifier's choices.

    A trace of the sparsifier gives the shapes, which fix the size of the state.
    """

    @functools.cache
    def of(layout: Layout, worker_count: int) -> Slots:
        step = Step(jnp.zeros((), jnp.int32), workers, layout, sparsifier.support)
        found = []

        def choose():
            state = sparsifier.init(layout, worker_count)
            vector = workers.localize(jnp.zeros((layout.n,), jnp.float32))
            choice, _ = sparsifier.select(vector, state, step)
            whole = choice.indices is None
            choice = with_indices(choice, layout.n)
            units = Units.of(choice, layout.n)
            found.append(Slots(units, choice.indices.size, whole))
            return choice.indices

        workers.eval_bound(choose, worker_count)
        return found[0]

    return of
