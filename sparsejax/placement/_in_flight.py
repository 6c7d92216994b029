"""Messages in flight when the number of workers changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparsejax._transform import SparsifyState
from sparsejax.exchanges._delayed_pairs import InFlight
from sparsejax.exchanges._delayed_union import Announced
from sparsejax.placement._markers import PerWorker


def returned(state: Any, fresh: Any, fetch: Callable[[Any], np.ndarray]) -> Any:
    """Returns `state` with the values in flight added back to their residuals.

    Args:
      state: the state of all old workers, on the host or on devices.
      fresh: the first state of the new workers, with empty messages.
      fetch: brings a whole array to this host.
    """

    def is_state(node):
        return isinstance(node, SparsifyState)

    def back(old, new):
        if not (is_state(old) and isinstance(old.exchange, (InFlight, Announced))):
            return old
        flight = jax.tree.map(fetch, old.exchange)
        memory = _add(jax.tree.map(fetch, old.memory), *_waiting(flight))
        workers = len(flight.message.per_worker)
        empty = jax.tree.map(
            lambda new: _rows(new, workers, fetch),
            new.exchange,
            is_leaf=lambda node: isinstance(node, PerWorker),
        )
        return old._replace(memory=memory, exchange=empty)

    return jax.tree.map(back, state, fresh, is_leaf=is_state)


def _waiting(flight: InFlight | Announced) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates and values [w, k] of all workers' messages."""
    if isinstance(flight, InFlight):
        return flight.coordinates.per_worker, flight.values.per_worker
    message, places = flight.message.per_worker, flight.coordinates
    shape = (len(message), places.size)
    return np.broadcast_to(places[None], shape), message[:, : places.size]


def _add(memory: PerWorker, places: np.ndarray, values: np.ndarray) -> PerWorker:
    """The residuals [w, n] with `values` [w, k] added at `places` [w, k]."""
    leaves, treedef = jax.tree.flatten(memory)
    if not leaves:  # Without a memory nothing is kept.
        return memory
    first = np.array(leaves[0])
    for row, at, added in zip(first, places, values, strict=True):
        inside = at < row.size
        row[at[inside]] += added[inside]
    return jax.tree.unflatten(treedef, [first, *leaves[1:]])


def _rows(new: Any, workers: int, fetch: Callable[[Any], np.ndarray]) -> Any:
    """Repeats the first row of a per-worker leaf; other leaves are only fetched."""
    if not isinstance(new, PerWorker):
        return fetch(new)

    def repeat(leaf):
        row = fetch(leaf)[:1]
        return np.broadcast_to(row, (workers, *row.shape[1:]))

    return jax.tree.map(repeat, new)
