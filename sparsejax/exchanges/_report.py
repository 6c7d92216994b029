"""The reports that exchanges make, and the state of those that have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from sparsejax._base import Report

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int


def no_state(layout: Any, worker_count: int) -> tuple[()]:
    """`Exchange.init` of an exchange that carries nothing to the next step."""
    del layout, worker_count
    return ()


def zero_report(worker_count: int, details: Any = ()) -> Report:
    """The report of a step in which nothing happened."""
    return Report(
        demand=jnp.zeros((worker_count,), jnp.int32),
        sent=jnp.zeros((), jnp.int32),
        density=jnp.zeros((), jnp.float32),
        threshold=jnp.zeros((worker_count,), jnp.float32),
        dropped=jnp.zeros((worker_count,), jnp.bool_),
        details=details,
    )


def whole_report(n: int, dropped: Bool[Array, " w"], details: Any = ()) -> Report:
    """The report of a step in which every coordinate was delivered."""
    count = dropped.shape[0]
    return Report(
        demand=jnp.full((count,), n, jnp.int32),
        sent=jnp.asarray(n, jnp.int32),
        density=jnp.ones((), jnp.float32),
        threshold=jnp.zeros((count,), jnp.float32),
        dropped=dropped,
        details=details,
    )


def sparse_report(
    indices: Int[Array, " m"], n: int, facts: tuple[Array, Array, Array], details=()
) -> Report:
    """The report of a step that delivered the distinct `indices`; `n` is no index.

    Args:
      indices: Int32[m], replicated.
      n: number of coordinates.
      facts: `(demand [w], threshold [w], dropped [w])` of all workers, replicated.
      details: what is particular to the exchange.
    """
    demand, threshold, dropped = facts
    sent = jnp.sum(indices < n, dtype=jnp.int32)
    density = sent.astype(jnp.float32) / max(n, 1)
    return Report(demand, sent, density, threshold, dropped, details)
