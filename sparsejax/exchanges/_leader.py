"""Delivers every worker's values at the coordinates that one of them chose."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sparsejax._checks import check_value_dtype
from sparsejax._report import sparse_report, zero_report
from sparsejax.exchanges._dense import deliver_all
from sparsejax.exchanges._values import deliver_at
from sparsejax.parts import Delivery, Exchange, no_state
from sparsejax.vectors import _codec


def leader(value_dtype: Any = "float32") -> Exchange:
    """Worker `step mod w` tells where, and all sum their values there.

    Two messages a step, whose size does not depend on the number of workers: the
    leader's indices, encoded in as few bytes as they need, with the small facts of the
    report; and the mean of `k` values.

    Every worker selects, as a branch that only one of them takes cannot hold a
    collective; what the others chose is not sent.

    Args:
      value_dtype: of values on the wire, float32 or bfloat16; they are summed in
        float32, and what rounding takes away stays in the residuals.

    Raises:
      ValueError: for another `value_dtype`.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.topk(0.01),
      ...     exchange=exchanges.leader(),
      ...     memory=memories.error_feedback(),
      ... )
    """
    value_dtype = check_value_dtype(value_dtype)

    def apply(vector, payload, state, step, workers, layout):
        n, count = vector.shape[0], workers.count()
        if payload.indices is None:
            return deliver_all(
                vector, payload.dropped, workers, layout, (), value_dtype
            ), state
        facts = (payload.demand, payload.threshold, jnp.asarray(payload.dropped))
        nowhere, mine = jnp.zeros((), jnp.int32), workers.index()
        code = _codec.encode_indices(payload.indices, nowhere, n, n)
        code = jnp.where(mine == step % count, code, jnp.zeros_like(code))
        words = _codec.pack(facts)
        table = jnp.zeros((count, words.size), words.dtype).at[mine].set(words)
        # A sum in which every word has one term. Words of 32 bits, as not every
        # backend adds narrower ones.
        told = workers.sum(_widen(_codec.pack((code, table))))
        told = jax.lax.bitcast_convert_type(told, _codec.WORD).reshape(1, -1)
        code, table = _codec.unpack(told, (code, table))
        facts = _codec.unpack(table[0], facts)
        indices = _codec.decode_indices(
            code, nowhere[None], n, n, payload.indices.shape[0]
        )[0]
        update, left = deliver_at(vector, indices, workers, layout, value_dtype)
        report = sparse_report(indices, n, facts)
        return Delivery(update, indices, left, report), state

    def report(layout, worker_count):
        return zero_report(worker_count)

    accepts = frozenset({"overlapping", "everything"})
    return Exchange(no_state, apply, report, accepts, "leader")


def _widen(words):
    """Words of 16 bits [m] as words of 32 bits [ceil(m / 2)]."""
    pairs = jnp.pad(words, (0, -words.size % 2)).reshape(-1, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint32)
