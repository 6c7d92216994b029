"""The exchange that everything is compared with: the mean of whole vectors."""

from __future__ import annotations

import jax.numpy as jnp

from sparsejax._base import Delivery, Exchange, Report


def zero_report(n, worker_count, details=()):
    """The report of a step in which nothing happened."""
    del n
    return Report(
        demand=jnp.zeros((worker_count,), jnp.int32),
        sent=jnp.zeros((), jnp.int32),
        density=jnp.zeros((), jnp.float32),
        threshold=jnp.zeros((worker_count,), jnp.float32),
        dropped=jnp.zeros((worker_count,), jnp.bool_),
        details=details,
    )


def whole_report(n, dropped, details=()):
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


def deliver_all(vector, dropped, workers, layout, details=()):
    """The mean of all vectors [n], and the report that goes with it."""
    n, count = vector.shape[0], workers.count()
    mine = jnp.arange(count, dtype=jnp.int32) == workers.index()
    # One psum call for both, so that the flags need no message of their own.
    total, flags = workers.sum((vector, (mine & dropped).astype(jnp.float32)))
    mean = total / count
    rounded = layout.round_all(mean)
    report = whole_report(n, flags > 0, details)
    return Delivery(rounded, None, workers.localize(mean - rounded), report)


def dense() -> Exchange:
    """An all-reduce of the whole vector; whatever was selected is ignored.

    Sums are formed in float32. Received per worker: `2 (w-1)/w` times 4 n bytes.
    """

    def init(layout, worker_count):
        del layout, worker_count
        return ()

    def apply(vector, payload, state, step, workers, layout):
        del step
        return deliver_all(vector, payload.dropped, workers, layout), state

    def report(layout, worker_count):
        return zero_report(layout.n, worker_count)

    accepts = frozenset({"disjoint", "overlapping", "everything"})
    return Exchange(init, apply, report, accepts, "dense")
