"""Delivers every worker's pairs of index and value to all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._checks import check_value_bits
from sparsejax._report import sparse_report
from sparsejax._workers import vary_like
from sparsejax.exchanges._dense import EVERY_SUPPORT, or_whole
from sparsejax.exchanges._indices import gather_indices, united
from sparsejax.exchanges._units import Units
from sparsejax.parts import Delivery, Exchange
from sparsejax.vectors._narrow import value_code

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class PairsDetails(NamedTuple):
    """`Report.details` of `pairs`. Replicated.

    Attributes:
      chosen: Int32[w], the number of coordinates that each worker sent.
      union: Int32[], the number of distinct coordinates among them, as `Report.sent`.
    """

    chosen: Int[Array, " w"]
    union: Int[Array, ""]


def pairs(value_bits: Any = None) -> Exchange:
    """All workers receive all pairs, and add the values of each coordinate.

    Each step takes one message: an all-gather of the indices, in the shortest code, the
    values, and the small facts of the report. A worker delivers its values at its own
    coordinates only.

    The bytes that a worker receives grow with the number of workers, and so does the
    number of distinct coordinates: see `sent` and `density` of the report. Choices that
    are equal on all workers take fewer bytes with `union`.

    Args:
      value_bits: the bits of a value on the wire: 32 (float32, the default), 16
        (bfloat16), 8, 4, 2 or 1. Values are summed in float32, and rounding errors
        stay in the residual. Short lists, for which the scales of narrow values do not
        pay, take 16 bits.

    Returns:
      An exchange for all choices, of coordinates or rows.

    Raises:
      ValueError: for another `value_bits`.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.topk(0.01),
      ...     exchange=exchanges.pairs(),
      ...     memory=memories.error_feedback(),
      ... )
    """
    bits, _ = check_value_bits(value_bits, ways=1)

    def apply(vector, choice, state, step):
        units, layout, count = Units.of(choice, step.n), step.layout, step.w
        own = units.values(vector, choice.indices)
        code = value_code(bits, own.size)
        words = code.encode(own.reshape(-1))
        values = code.decode(words).reshape(own.shape)
        indices, facts, received = gather_indices(choice, step, words)
        received = jax.vmap(code.decode)(received)
        shares = received.reshape(count, *own.shape) / count
        total = _sum_in_order(units, indices, shares)
        first = united(indices, units, step)
        chosen = jnp.sum(indices < units.number, axis=1, dtype=jnp.int32) * units.size
        report = sparse_report(first, step.n, facts)
        report = report._replace(details=PairsDetails(chosen, report.sent))
        left = (own - values).reshape(-1)
        if not layout.exact:
            # The cast to the gradient's dtype rounds the sum. The first worker that
            # sent the coordinate keeps the error.
            mean = total.at[first].get(mode="fill", fill_value=0)
            rest = mean - layout.round(first, mean)
            total = total.at[first].add(-rest, mode="drop")
            mine = jnp.arange(count, dtype=jnp.int32) == step.rank
            rest = jnp.where(mine[:, None], rest.reshape(count, -1), 0.0)
            left = left + count * jnp.sum(rest, axis=0)
        delivered = units.coordinates(choice.indices)
        return Delivery(total, delivered, left, report), state

    def details(layout, worker_count):
        del layout
        none = jnp.zeros((worker_count,), jnp.int32)
        return PairsDetails(none, jnp.zeros((), jnp.int32))

    def whole(layout, worker_count):
        everything = jnp.full((worker_count,), layout.n, jnp.int32)
        return PairsDetails(everything, jnp.asarray(layout.n, jnp.int32))

    return Exchange(
        or_whole(apply, whole, (bits, bits)), EVERY_SUPPORT, "pairs", details=details
    )


def _sum_in_order(
    units: Units, indices: Int[Array, "w k"], values: Float[Array, "w k *D"]
) -> Float[Array, " n"]:
    """The sum of all pairs, added worker by worker. Replicated.

    The indices of one worker are distinct, so every device adds in the same order. On a
    GPU, a scatter with repeated indices adds in an arbitrary order, and replicas would
    drift apart.
    """
    zeros = units.split(_xla.late_zeros(units.n, jnp.min(indices, initial=0)))
    total = jax.lax.fori_loop(
        0,
        len(indices),
        lambda r, total: total.at[indices[r]].add(values[r], mode="drop"),
        vary_like(zeros, values),
    )
    return total.reshape(-1)
