"""One sign bit per coordinate on every hop, and whole vectors from time to time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._checks import check_period, check_scale, check_seed
from sparsejax._report import whole_report
from sparsejax.exchanges.signs import _merge, _ring, _step_size
from sparsejax.parts import Delivery, Exchange
from sparsejax.placement._markers import PerWorker
from sparsejax.vectors import _bits

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, UInt32


class OneBitDetails(NamedTuple):
    """`Report.details` of `one_bit_ring`. Replicated.

    Attributes:
      scale: Float[], the step size of the signs.
      compensation: Float[], the root mean square of the residuals before the step, over
        workers and coordinates.
      full: Bool[], whether whole vectors were averaged in this step.
    """

    scale: Float[Array, ""]
    compensation: Float[Array, ""]
    full: Bool[Array, ""]


class OneBitState(NamedTuple):
    """State of `one_bit_ring`. Replicated, except for leaves marked `PerWorker`.

    Attributes:
      key: UInt32[2], from the seed.
      size: a running mean of the gradients' magnitude, used if no scale is given.
      kept: PerWorker(Float[]), the mean square of `Delivery.left` in the last step.
    """

    key: UInt32[Array, " 2"]
    size: _step_size.StepSize
    kept: PerWorker


def one_bit_ring(
    *, period: int | None = 100, scale: float | None = None, seed: int = 0
) -> Exchange:
    """Every coordinate moves by `scale` in the direction of a random worker's sign.

    In expectation the update is `scale` times the mean of the workers' signs. Each
    worker keeps the difference from its vector: `left = vector - update`. If
    `step mod period = 0`, a full step, the update is the mean of the whole vectors, and
    nothing is left.

    In a one-bit step a worker receives `2 (w-1) ceil(n / (32 w))` words: half of them
    in w - 1 hops around the ring, and half in an all-gather, which also brings three
    words of facts from each other worker. Over a tuple of axes the hops go along one
    axis after the other. A full step is an all-reduce of n float32 values.

    Args:
      period: steps from one full step to the next, from step 0 on; None for no full
        steps.
      scale: step size of the signs; None for a running mean of the root mean square of
        the workers' gradients, before the memory adds the residual.
      seed: the seed of the random bits.

    Raises:
      TypeError: if `period`, `scale` or `seed` is neither a number nor None.
      ValueError: if `period` is below 1, `scale` not positive and finite, or `seed`
        negative.

    Example:
      >>> import sparsejax
      >>> tx = sparsejax.sparsify(
      ...     sparsejax.sparsifiers.everything(),
      ...     exchange=sparsejax.exchanges.one_bit_ring(period=50),
      ...     memory=sparsejax.memories.error_feedback(),
      ... )
    """

    period, scale, seed = check_period(period), check_scale(scale), check_seed(seed)
    follows = scale is None

    def init(layout, worker_count):
        del layout, worker_count
        return OneBitState(
            _merge.new_key(seed),
            _step_size.start(),
            PerWorker(jnp.zeros((), jnp.float32)),
        )

    def measured(state, facts):
        """The running mean and the step size, updated with the facts [w, 3]."""
        if not follows:
            return state.size, jnp.asarray(scale, jnp.float32)
        size = _step_size.follow(state.size, jnp.mean(facts[:, 0]))
        return size, _step_size.rms(size)

    def apply(vector, choice, state, step):
        del choice
        n, workers, layout = step.n, step.workers, step.layout
        # On accelerators, whose memory is scarce, `left` should overwrite the vector. A
        # result of a branch cannot do that.
        later = layout.exact and not _xla.on_cpu()

        def whole(vector, facts):
            mine = jnp.arange(step.w, dtype=jnp.int32) == step.rank
            rows = jnp.where(mine[:, None], facts[None], 0)
            total, facts = workers.sum((vector, rows))
            if later:
                return total, (), facts, *measured(state, facts)
            mean = total / step.w
            update = layout.round_all(mean)
            left = workers.localize(mean - update)
            return update, left, facts, *measured(state, facts)

        def one_bit(vector, facts):
            words, rows = _ring.random_signs(
                _bits.pack_whole(vector >= 0),
                jax.lax.bitcast_convert_type(facts, jnp.uint32),
                workers,
                _merge.fold_in(state.key, step.index),
            )
            facts = jax.lax.bitcast_convert_type(rows, jnp.float32)
            size, found = measured(state, facts)
            update = layout.round_all(jnp.where(_bits.unpack(words, n), found, -found))
            left = () if later else vector - update
            return update, left, facts, size, found

        square = step.mean_square() if follows else 0.0
        facts = [
            jnp.asarray(fact, jnp.float32)
            for fact in (square, state.kept.per_worker, step.dropped)
        ]
        facts = jnp.stack(workers.localize(facts))
        full = jnp.asarray(False) if period is None else step.index % period == 0
        if period is None:
            outcome = one_bit(vector, facts)
        elif period == 1:
            outcome = whole(vector, facts)
        else:
            outcome = workers.cond(full, whole, one_bit, vector, facts)
        update, left, facts, size, found = outcome
        if later:
            # In the branch, the division would need memory of its own.
            update = jnp.where(full, update / step.w, update)
            left = jnp.where(full, 0.0, vector - update)
        kept = jnp.sum(jnp.square(left)) / max(n, 1)
        details = OneBitDetails(found, jnp.sqrt(jnp.mean(facts[:, 1])), full)
        report = whole_report(n, facts[:, 2] > 0, details)
        new = OneBitState(state.key, size, PerWorker(kept))
        return Delivery(update, None, left, report), new

    def details(layout, worker_count):
        del layout, worker_count
        zero = jnp.zeros((), jnp.float32)
        return OneBitDetails(zero, zero, jnp.asarray(False))

    accepts = frozenset({"everything"})
    return Exchange(
        apply, accepts, "one_bit_ring", init=init, details=details, abstains=False
    )
