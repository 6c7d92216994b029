"""Delivers every worker's values at the union of all chosen coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from sparsejax import partitions
from sparsejax._checks import check_value_dtype
from sparsejax._report import sparse_report, zero_report
from sparsejax._xla import hold_back
from sparsejax.exchanges._dense import deliver_all
from sparsejax.exchanges._values import deliver_at, distinct
from sparsejax.parts import Agreed, Delivery, Exchange, Window, no_state
from sparsejax.vectors import _codec

if TYPE_CHECKING:
    from jaxtyping import Array, Int


class UnionDetails(NamedTuple):
    """What `Report.details` holds. Replicated.

    Attributes:
      histogram: Int32[B], how many delivered coordinates lie in each of B equal blocks
        of the vector.
    """

    histogram: Int[Array, " B"]


def union(value_dtype: Any = "float32") -> Exchange:
    """All workers learn all indices, then sum their values there.

    Two messages a step: an all-gather of the indices, encoded in as few bytes as they
    need, with the small facts of the report, and the mean of `w k` values. Values in
    bfloat16 take half the bytes; they are summed in float32, and what rounding takes
    away stays in the residuals.

    Every worker delivers its value at every gathered coordinate, chosen by itself or
    not. With disjoint choices the union has exactly the coordinates that were chosen;
    with overlapping ones it grows with the number of workers. Choices that all workers
    agree on (`Agreed`) are not sent.

    Args:
      value_dtype: of values on the wire, float32 or bfloat16.

    Raises:
      ValueError: for another `value_dtype`.

    Example:
      >>> import sparsejax
      >>> tx = sparsejax.sparsify(
      ...     sparsejax.sparsifiers.everything(),
      ...     exchange=sparsejax.exchanges.union(),
      ...     memory=sparsejax.memories.error_feedback(),
      ... )
    """
    value_dtype = check_value_dtype(value_dtype)

    def apply(vector, payload, state, step, workers, layout):
        del step
        n, count = vector.shape[0], workers.count()
        if payload.indices is None:
            details = UnionDetails(_block_sizes(n, count))
            return deliver_all(
                vector, payload.dropped, workers, layout, details, value_dtype
            ), state
        indices, *facts = gather_indices(payload, n, workers)
        if isinstance(payload.window, Agreed):
            # Known before the gradient is dead, whose memory the update takes over.
            indices = hold_back(payload.indices, vector)
        elif payload.window is None:
            indices = distinct(indices, n).ravel()
        else:
            indices = indices.ravel()
        update, left = deliver_at(vector, indices, workers, layout, value_dtype)
        details = UnionDetails(_histogram(indices, n, count))
        report = sparse_report(indices, n, facts, details)
        return Delivery(update, indices, left, report), state

    def report(layout, worker_count):
        size = partitions.blocks(layout.n, worker_count)[0]
        details = UnionDetails(jnp.zeros((size,), jnp.int32))
        return zero_report(worker_count, details)

    accepts = frozenset({"disjoint", "overlapping", "agreed", "everything"})
    return Exchange(no_state, apply, report, accepts, "union")


def gather_indices(payload, n, workers, *more):
    """Every worker's indices [w, k] and facts, in one message. Replicated.

    Args:
      payload: with indices. Those that are `Agreed` stay at home, and come back as
        `None`.
      n: number of coordinates.
      workers: the axis.
      *more: arrays that travel along.

    Returns:
      `(indices [w, k], demand [w], threshold [w], dropped [w], *more [w, ...])`.
    """
    facts = (payload.demand, payload.threshold, payload.dropped, *more)
    if isinstance(payload.window, Agreed):
        gathered = workers.gather(_codec.pack(facts))
        return None, *_codec.unpack(gathered, facts)
    window = payload.window
    if window is None:
        window = Window(jnp.zeros((workers.count(),), jnp.int32), n)
    start, span = window.start, window.span
    codes = _codec.encode_indices(payload.indices, start[workers.index()], span, n)
    message = (codes, *facts)
    gathered = workers.gather(_codec.pack(message))
    codes, *facts = _codec.unpack(gathered, message)
    slots = payload.indices.shape[0]
    return _codec.decode_indices(codes, start, span, n, slots), *facts


def _histogram(indices: Int[Array, " m"], n: int, worker_count: int):
    count, size = partitions.blocks(n, worker_count)
    blocks = jnp.where(indices < n, indices // size, count)
    return jnp.zeros((count,), jnp.int32).at[blocks].add(1, mode="drop")


def _block_sizes(n: int, worker_count: int):
    count, size = partitions.blocks(n, worker_count)
    first = jnp.arange(count, dtype=jnp.int32) * size
    return jnp.minimum(n - first, size)
