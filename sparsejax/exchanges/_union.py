"""Delivers every worker's values at the union of all chosen coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from sparsejax import _codec, _partition
from sparsejax._base import Delivery, Exchange, Report, Window
from sparsejax._in_place import late_zeros
from sparsejax.exchanges._dense import deliver_all, zero_report

if TYPE_CHECKING:
    from jaxtyping import Array, Int


class UnionDetails(NamedTuple):
    """What `Report.details` holds. Replicated.

    Attributes:
      histogram: Int32[B], how many delivered coordinates lie in each of B equal blocks
        of the vector.
    """

    histogram: Int[Array, " B"]


def union() -> Exchange:
    """All workers learn all indices, then sum their values there.

    Two collectives a step: an all-gather of the indices, with the small facts of the
    report in the same message, and an all-reduce of `w k` float32 values. Indices
    cost 2 bytes each where every part is shorter than 65535 coordinates, else 4.

    Every worker delivers its value at every gathered coordinate, chosen by itself or
    not. With disjoint choices the union has exactly the coordinates that were chosen.
    """

    def init(layout, worker_count):
        del layout, worker_count
        return ()

    def apply(vector, payload, state, step, workers, layout):
        del step
        n, count = vector.shape[0], workers.count()
        if payload.indices is None:
            details = UnionDetails(_block_sizes(n, count))
            return deliver_all(vector, payload.dropped, workers, layout, details), state
        window = payload.window or Window(jnp.zeros((count,), jnp.int32), n)
        codes = _codec.encode_indices(
            payload.indices, window.start[workers.index()], window.span, n
        )
        message = (codes, payload.demand, payload.threshold, payload.dropped)
        gathered = workers.gather(_codec.pack(message))
        codes, demand, threshold, dropped = _codec.unpack(gathered, message)
        indices = _codec.decode_indices(codes, window.start, window.span, n).ravel()

        own = vector.at[indices].get(mode="fill", fill_value=0)
        mean = workers.mean(own)
        rounded = layout.round(indices, mean)
        sent = jnp.sum(indices < n, dtype=jnp.int32)
        # `set` and not `add`: each coordinate was summed before, so that the order of
        # a scatter cannot make replicas drift apart.
        update = late_zeros(n, sent).at[indices].set(rounded, mode="drop")
        report = Report(
            demand=demand,
            sent=sent,
            density=sent.astype(jnp.float32) / max(n, 1),
            threshold=threshold,
            dropped=dropped,
            details=UnionDetails(_histogram(indices, n, count)),
        )
        # Zeros where nothing is rounded, and formed all the same: so the residual is
        # not overwritten in place before this worker's values were read.
        left = workers.localize(mean - rounded)
        return Delivery(update, indices, left, report), state

    def report(layout, worker_count):
        size = _partition.blocks(layout.n, worker_count)[0]
        details = UnionDetails(jnp.zeros((size,), jnp.int32))
        return zero_report(layout.n, worker_count, details)

    return Exchange(init, apply, report, frozenset({"disjoint", "everything"}), "union")


def _histogram(indices: Int[Array, " m"], n: int, worker_count: int):
    count, size = _partition.blocks(n, worker_count)
    blocks = jnp.where(indices < n, indices // size, count)
    return jnp.zeros((count,), jnp.int32).at[blocks].add(1, mode="drop")


def _block_sizes(n: int, worker_count: int):
    count, size = _partition.blocks(n, worker_count)
    first = jnp.arange(count, dtype=jnp.int32) * size
    return jnp.minimum(n - first, size)
