"""Messages between two steps, at a change of the number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparsejax._transform import SparsifyState
from sparsejax.exchanges._delayed_pairs import InFlight
from sparsejax.placement._markers import PerWorker


def returned(state: Any, fresh: Any, fetch: Callable[[Any], np.ndarray]) -> Any:
    """`state`, with all values on their way back in the residuals that they came from.

    Args:
      state: of all old workers, on the host or on devices.
      fresh: the first state of the new workers, with messages that hold nothing.
      fetch: brings the whole of an array to this host.
    """

    def is_state(node):
        return isinstance(node, SparsifyState)

    def back(old, new):
        if not (is_state(old) and isinstance(old.exchange, InFlight)):
            return old
        flight = old.exchange
        memory = _add(*jax.tree.map(fetch, (old.memory, flight)))
        first = jax.tree.map(lambda x: fetch(x)[:1], new.exchange)
        empty = jax.tree.map(_rows_like, first, flight)
        return old._replace(memory=memory, exchange=empty)

    return jax.tree.map(back, state, fresh, is_leaf=is_state)


def _add(memory: PerWorker, flight: InFlight) -> PerWorker:
    """The residuals [w, n] with the values of `flight` [w, k] added."""
    leaves, treedef = jax.tree.flatten(memory)
    if not leaves:  # Without a memory nothing is kept.
        return memory
    first = np.array(leaves[0])
    places_and_values = (flight.coordinates.per_worker, flight.values.per_worker)
    for row, places, added in zip(first, *places_and_values, strict=True):
        inside = places < row.size
        row[places[inside]] += added[inside]
    return jax.tree.unflatten(treedef, [first, *leaves[1:]])


def _rows_like(row: np.ndarray, old: Any) -> np.ndarray:
    """`row` [1, ...] as many times as `old` has rows."""
    return np.broadcast_to(row, (np.shape(old)[0], *row.shape[1:]))
