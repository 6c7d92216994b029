"""The exchange that everything is compared with: the mean of whole vectors."""

from __future__ import annotations

import jax.numpy as jnp

from sparsejax._report import whole_report, zero_report
from sparsejax.exchanges._values import average
from sparsejax.parts import Delivery, Exchange, no_state


def deliver_all(vector, dropped, workers, layout, details=(), value_dtype=jnp.float32):
    """The mean of all vectors [n], and the report that goes with it."""
    n, count = vector.shape[0], workers.count()
    if value_dtype == jnp.float32:
        mine = jnp.arange(count, dtype=jnp.int32) == workers.index()
        # One psum call for both, so that the flags need no message of their own.
        total, flags = workers.sum((vector, (mine & dropped).astype(jnp.float32)))
        mean, dropped, error = total / count, flags > 0, jnp.zeros((), jnp.float32)
    else:
        mean, error = average(vector, workers, value_dtype)
        dropped = workers.gather(jnp.asarray(dropped))
    rounded = layout.round_all(mean)
    left = workers.localize(mean - rounded) + error
    return Delivery(rounded, None, left, whole_report(n, dropped, details))


def dense() -> Exchange:
    """An all-reduce of the whole vector; whatever was selected is ignored.

    Sums are formed in float32. Received per worker: `2 (w-1)/w` times 4 n bytes.

    Example:
      >>> import sparsejax
      >>> tx = sparsejax.sparsify(
      ...     sparsejax.sparsifiers.everything(),
      ...     exchange=sparsejax.exchanges.dense(),
      ...     memory=sparsejax.memories.error_feedback(),
      ... )
    """

    def apply(vector, payload, state, step, workers, layout):
        del step
        return deliver_all(vector, payload.dropped, workers, layout), state

    def report(layout, worker_count):
        return zero_report(worker_count)

    accepts = frozenset({"disjoint", "overlapping", "agreed", "everything"})
    return Exchange(no_state, apply, report, accepts, "dense")
