"""Delivers to every worker the pairs of index and value that each one chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax._checks import check_value_dtype
from sparsejax._report import sparse_report, zero_report
from sparsejax._workers import vary_like
from sparsejax._xla import late_zeros
from sparsejax.exchanges._dense import deliver_all
from sparsejax.exchanges._union import gather_indices
from sparsejax.exchanges._values import distinct
from sparsejax.parts import Delivery, Exchange, no_state
from sparsejax.vectors._rounding import round_to

if TYPE_CHECKING:
    from jaxtyping import Array, Int


class PairsDetails(NamedTuple):
    """What `Report.details` holds. Replicated.

    Attributes:
      chosen: Int32[w], how many coordinates each worker sent.
      union: Int32[], how many distinct coordinates that are: `Report.sent`.
    """

    chosen: Int[Array, " w"]
    union: Int[Array, ""]


def pairs(value_dtype: Any = "float32") -> Exchange:
    """All workers learn all pairs, and sum those of the same coordinate.

    One message a step: an all-gather of the indices, encoded in as few bytes as they
    need, the values, and the small facts of the report. A worker delivers its values
    at its own coordinates only.

    What a worker receives grows with the number of workers, and so does the number of
    distinct coordinates, which is what the report's `sent` and `density` say.

    Args:
      value_dtype: of values on the wire, float32 or bfloat16; they are summed in
        float32, and what rounding takes away stays in the residual.

    Raises:
      ValueError: for another `value_dtype`.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.topk(0.01),
      ...     exchange=exchanges.pairs(),
      ...     memory=memories.error_feedback(),
      ... )
    """
    value_dtype = check_value_dtype(value_dtype)

    def apply(vector, payload, state, step, workers, layout):
        del step
        n, count = vector.shape[0], workers.count()
        if payload.indices is None:
            everything = jnp.full((count,), n, jnp.int32)
            details = PairsDetails(everything, jnp.asarray(n, jnp.int32))
            return deliver_all(
                vector, payload.dropped, workers, layout, details, value_dtype
            ), state
        values = round_to(payload.values, value_dtype)
        indices, *facts, received = gather_indices(
            payload, n, workers, values.astype(value_dtype)
        )
        shares = received.astype(jnp.float32) / count
        total = _sum_in_order(n, indices, shares)
        first = distinct(indices, n).ravel()
        chosen = jnp.sum(indices < n, axis=1, dtype=jnp.int32)
        report = sparse_report(first, n, facts)
        report = report._replace(details=PairsDetails(chosen, report.sent))
        left = payload.values - values
        if not layout.exact:
            # The cast to the gradient's dtype rounds the sum. What it takes away stays
            # with the first worker that sent the coordinate.
            mean = total.at[first].get(mode="fill", fill_value=0)
            rest = mean - layout.round(first, mean)
            total = total.at[first].add(-rest, mode="drop")
            mine = jnp.arange(count, dtype=jnp.int32) == workers.index()
            rest = jnp.where(mine[:, None], rest.reshape(count, -1), 0.0)
            left = left + count * jnp.sum(rest, axis=0)
        return Delivery(total, payload.indices, left, report), state

    def report(layout, worker_count):
        details = PairsDetails(
            jnp.zeros((worker_count,), jnp.int32), jnp.zeros((), jnp.int32)
        )
        return zero_report(worker_count, details)

    accepts = frozenset({"overlapping", "everything"})
    return Exchange(no_state, apply, report, accepts, "pairs")


def _sum_in_order(n, indices, values):
    """Float[n]: the sum of all pairs [w, k], one worker's after another's.

    One worker's indices are distinct, so that every device adds in the same order; a
    scatter with repetitions would add in any order on a GPU, and replicas would drift
    apart.
    """
    zeros = late_zeros(n, jnp.min(indices, initial=0))
    return jax.lax.fori_loop(
        0,
        len(indices),
        lambda r, total: total.at[indices[r]].add(values[r], mode="drop"),
        vary_like(zeros, values),
    )
