"""One sign bit per coordinate on every hop, and whole vectors now and then."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax._report import whole_report, zero_report
from sparsejax.exchanges.signs import _merge, _ring, _step_size
from sparsejax.parts import Delivery, Exchange
from sparsejax.placement._markers import PerWorker
from sparsejax.vectors import _bits

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, UInt32


class OneBitDetails(NamedTuple):
    """What `Report.details` holds. Replicated.

    Attributes:
      scale: Float[], the step size of the signs.
      compensation: Float[], root mean square, over workers and coordinates, of what
        was kept from the steps before.
      full: Bool[], whether whole vectors were averaged in this step.
    """

    scale: Float[Array, ""]
    compensation: Float[Array, ""]
    full: Bool[Array, ""]


class OneBitState(NamedTuple):
    """State of `one_bit_ring`. Replicated, except what is marked `PerWorker`.

    Attributes:
      key: UInt32[2], from the seed.
      size: what is known about the gradients' magnitude.
      kept: PerWorker(Float[]), mean square of what was left in the last step.
    """

    key: UInt32[Array, " 2"]
    size: _step_size.StepSize
    kept: PerWorker


def one_bit_ring(
    *, period: int | None = 100, scale: float | None = None, seed: int = 0
) -> Exchange:
    """Every coordinate moves by `scale` in the direction of a random worker's sign.

    On average over the random bits that is `scale` times the mean of the workers'
    signs. All of a worker's vector counts as delivered but for the difference: `left =
    vector - update`. Where `step mod period = 0` the update is the mean of the whole
    vectors instead, and nothing is left.

    In a one-bit step a worker receives `2 (w-1) ceil(n / (32 w))` words, half of them
    in w - 1 hops around the ring and half in an all-gather, and with the latter three
    words of facts from each of the others. Over a tuple of axes the hops go along each
    axis in turn. A full step is an all-reduce of n float32 values.

    Args:
      period: of the full steps, counted from step 0; None for never.
      scale: step size of the signs; None for the root mean square of the workers'
        gradients, before the memory adds to them, as a running mean.
      seed: of the random bits.

    Example:
      >>> import sparsejax
      >>> tx = sparsejax.sparsify(
      ...     sparsejax.sparsifiers.everything(),
      ...     exchange=sparsejax.exchanges.one_bit_ring(period=50),
      ...     memory=sparsejax.memories.error_feedback(),
      ... )
    """

    def init(layout, worker_count):
        del layout, worker_count
        return OneBitState(
            _merge.new_key(seed),
            _step_size.start(),
            PerWorker(jnp.zeros((), jnp.float32)),
        )

    def measured(state, facts):
        """The running mean and the step size after the facts [w, 3] of a step."""
        size = _step_size.follow(state.size, jnp.mean(facts[:, 0]))
        found = _step_size.rms(size) if scale is None else scale
        return size, jnp.asarray(found, jnp.float32)

    def apply(vector, payload, state, step, workers, layout):
        n, count = vector.shape[0], workers.count()

        def whole(vector, facts):
            mine = jnp.arange(count, dtype=jnp.int32) == workers.index()
            rows = jnp.where(mine[:, None], facts[None], 0)
            total, facts = workers.sum((vector, rows))
            mean = total / count
            update = layout.round_all(mean)
            left = workers.localize(mean - update)
            return update, left, facts, *measured(state, facts)

        def one_bit(vector, facts):
            words, rows = _ring.random_signs(
                _bits.pack_whole(vector >= 0),
                jax.lax.bitcast_convert_type(facts, jnp.uint32),
                workers,
                _merge.fold_in(state.key, step),
            )
            facts = jax.lax.bitcast_convert_type(rows, jnp.float32)
            size, found = measured(state, facts)
            update = layout.round_all(jnp.where(_bits.unpack(words, n), found, -found))
            return update, vector - update, facts, size, found

        facts = jnp.stack(
            [
                workers.localize(fact.astype(jnp.float32))
                for fact in (
                    payload.gradient_square,
                    state.kept.per_worker,
                    payload.dropped,
                )
            ]
        )
        full = jnp.asarray(False) if period is None else step % period == 0
        if period is None:
            outcome = one_bit(vector, facts)
        elif period == 1:
            outcome = whole(vector, facts)
        else:
            outcome = workers.cond(full, whole, one_bit, vector, facts)
        update, left, facts, size, found = outcome
        kept = jnp.sum(jnp.square(left)) / max(n, 1)
        details = OneBitDetails(found, jnp.sqrt(jnp.mean(facts[:, 1])), full)
        report = whole_report(n, facts[:, 2] > 0, details)
        new = OneBitState(state.key, size, PerWorker(kept))
        return Delivery(update, None, left, report), new

    def report(layout, worker_count):
        zero = jnp.zeros((), jnp.float32)
        details = OneBitDetails(zero, zero, jnp.asarray(False))
        return zero_report(worker_count, details)

    return Exchange(
        init,
        apply,
        report,
        frozenset({"everything"}),
        "one_bit_ring",
        needs_gradient_square=True,
    )
