"""One sign bit per coordinate and worker, combined where everybody has them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax._report import whole_report, zero_report
from sparsejax.exchanges.signs import _ballots, _step_size
from sparsejax.parts import Delivery, Exchange

if TYPE_CHECKING:
    from jaxtyping import Array, Float

_RULES = ("majority", "mean")
_ROUTES = ("gather", "sum")


class SignDetails(NamedTuple):
    """What `Report.details` holds. Replicated.

    Attributes:
      scale: Float[], the step size of the signs; with the rule "mean", that of the
        workers on average.
    """

    scale: Float[Array, ""]


def packed_signs(
    rule: str = "majority",
    *,
    scale: float | None = 1.0,
    route: str | None = None,
) -> Exchange:
    """A majority vote of the workers' signs, or the mean of their scaled signs.

    - "majority": `update = scale sign(sum_r sign(u_r))`, 0 where votes are equal. Where
      its vector is 0 a worker votes +1 and -1 in turn, and so do its neighbours in
      opposite order: with an even number of workers the votes for a coordinate that is
      0 on all of them cancel.
    - "mean": `update = (1/w) sum_r m_r sign(u_r)` with `m_r` the mean of `|u_r|`, and
      sign(0) = +1 and `m_r` rounded to eight significant bits. What is left of `u_r` is
      `u_r - m_r sign(u_r)`.

    The signs travel in one of two ways. "gather": everybody receives everybody's packed
    bits, `(w-1) n / 8` bytes. "sum": every sign has a field of `b = ceil(log2(w+1))`
    bits in a word, wide enough for the count of votes, and one all-reduce adds the
    words: `2 (w-1)/w` times `4 ceil(n / floor(32/b))` bytes, as much at 8 workers and
    less from 9 on. Either way facts of the report ride along, two words per worker.

    Args:
      rule: "majority" or "mean".
      scale: step size of the majority's signs; None for the root mean square of the
        workers' gradients, before a memory adds to them, as a running mean.
      route: "gather" or "sum" for the majority; None for what receives fewer bytes.

    Raises:
      ValueError: for an unknown rule or route, or for the mean by the route "sum": each
        worker has a factor of its own.

    Example:
      >>> import sparsejax
      >>> tx = sparsejax.sparsify(
      ...     sparsejax.sparsifiers.everything(),
      ...     exchange=sparsejax.exchanges.packed_signs("mean"),
      ...     memory=sparsejax.memories.error_feedback(),
      ... )
    """
    if rule not in _RULES:
        raise ValueError(f"rule: got {rule!r}, expected one of {_RULES}.")
    if route is not None and route not in _ROUTES:
        raise ValueError(f"route: got {route!r}, expected one of {_ROUTES}, or None.")
    if rule == "mean" and route == "sum":
        raise ValueError(
            "route: signs of the rule 'mean' have another factor on each worker, so "
            "that counts of votes do not tell their mean. Leave the route out."
        )
    follows = rule == "majority" and scale is None

    def init(layout, worker_count):
        del layout, worker_count
        return _step_size.start() if follows else ()

    def majority(vector, payload, state, step, workers, layout):
        turn = (step + workers.index()) % 2 == 0
        flags = (vector > 0) | ((vector == 0) & turn)
        square = payload.gradient_square if follows else jnp.zeros((), jnp.float32)
        counts, facts = _ballots.count(
            flags,
            _facts(square, payload.dropped, workers),
            workers,
            route or _ballots.cheaper_route(vector.shape[0], workers.count()),
        )
        squares, dropped = _unpack_facts(facts)
        if follows:
            state = _step_size.follow(state, jnp.mean(squares))
        size = jnp.asarray(_step_size.rms(state) if follows else scale, jnp.float32)
        votes = jnp.sign(2 * counts - workers.count())
        update = layout.round_all(size * votes.astype(jnp.float32))
        left = workers.localize(jnp.zeros_like(vector))
        return update, left, dropped, size, state

    def mean(vector, payload, state, step, workers, layout):
        del step
        n, flags = vector.shape[0], vector >= 0
        # A sum of huge numbers saturates; what it leaves out stays in the residual.
        total = jnp.minimum(jnp.sum(jnp.abs(vector)), jnp.finfo(jnp.float32).max)
        factor = _step_size.coarse(total / max(n, 1))
        facts = _facts(factor, payload.dropped, workers)
        words, facts = _ballots.gather(flags, facts, workers)
        factors, dropped = _unpack_facts(facts)
        # Twice the positive part less the sum of all: the others count negative.
        positive = _ballots.weigh(words, factors, n)
        average = (2 * positive - jnp.sum(factors)) / workers.count()
        update = layout.round_all(average)
        sent = jnp.where(flags, factor, -factor)
        left = (vector - sent) + (average - update)
        return update, left, dropped, jnp.mean(factors), state

    def apply(vector, payload, state, step, workers, layout):
        combine = majority if rule == "majority" else mean
        update, left, dropped, size, state = combine(
            vector, payload, state, step, workers, layout
        )
        report = whole_report(vector.shape[0], dropped, SignDetails(size))
        return Delivery(update, None, left, report), state

    def report(layout, worker_count):
        details = SignDetails(jnp.zeros((), jnp.float32))
        return zero_report(worker_count, details)

    return Exchange(
        init,
        apply,
        report,
        frozenset({"everything"}),
        "packed_signs",
        needs_gradient_square=follows,
    )


def _facts(magnitude, dropped, workers):
    """UInt32[2], per worker: what else everybody should know."""
    facts = (magnitude.astype(jnp.float32), dropped.astype(jnp.float32))
    facts = jnp.stack([workers.localize(fact) for fact in facts])
    return jax.lax.bitcast_convert_type(facts, jnp.uint32)


def _unpack_facts(rows):
    """(Float[w], Bool[w]) of UInt32[w, 2], replicated."""
    facts = jax.lax.bitcast_convert_type(rows, jnp.float32)
    return facts[:, 0], facts[:, 1] > 0
