"""One sign bit per coordinate and worker; every worker combines all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax._checks import check_choice, check_scale
from sparsejax._report import whole_report
from sparsejax.exchanges.signs import _ballots, _step_size
from sparsejax.parts import Delivery, Exchange, Step

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, UInt32

_RULES = ("majority", "mean")
_ROUTES = ("gather", "sum")


class SignDetails(NamedTuple):
    """`Report.details` of `packed_signs`. Replicated.

    Attributes:
      scale: Float[], the step size of the signs; for the rule "mean", the mean of the
        workers' step sizes.
    """

    scale: Float[Array, ""]


def packed_signs(
    rule: str = "majority",
    *,
    scale: float | None = 1.0,
    route: str | None = None,
) -> Exchange:
    """A majority vote of the workers' signs, or the mean of their scaled signs.

    - "majority": `update = scale sign(sum_r sign(u_r))`, and 0 if the votes are equal.
      If a coordinate is 0 on a worker, the worker votes +1 and -1 in alternate steps,
      and its neighbours vote the other way round. So with an even number of workers,
      the votes for a coordinate that is 0 on all of them cancel.
    - "mean": `update = (1/w) sum_r m_r sign(u_r)`, where `m_r` is the mean of `|u_r|`,
      rounded to eight significant bits, and sign(0) = +1. Each worker keeps
      `u_r - m_r sign(u_r)`.

    The signs take one of two routes. "gather": every worker receives the packed bits of
    all others, `(w-1) n / 8` bytes. "sum": every sign has a field of
    `b = ceil(log2(w+1))` bits in a word, wide enough for the count of votes, and one
    all-reduce adds the words, `2 (w-1)/w` times `4 ceil(n / floor(32/b))` bytes. "sum"
    needs fewer bytes than "gather" with 7 workers and from 9 workers on, and as many
    with 8. Both routes also carry two words of facts per worker.

    Args:
      rule: "majority" or "mean".
      scale: step size of the majority's signs; None for a running mean of the root mean
        square of the workers' gradients, before a memory adds the residual.
      route: "gather" or "sum" for the majority; None for the route with fewer bytes.

    Raises:
      TypeError: if `scale` is neither a number nor None.
      ValueError: if `scale` is not positive and finite; for an unknown rule or route;
        for the rule "mean" with the route "sum", since each worker has its own factor.

    Example:
      >>> import sparsejax
      >>> tx = sparsejax.sparsify(
      ...     sparsejax.sparsifiers.everything(),
      ...     exchange=sparsejax.exchanges.packed_signs("mean"),
      ...     memory=sparsejax.memories.error_feedback(),
      ... )
    """
    check_choice("rule", rule, _RULES)
    if route is not None:
        check_choice("route", route, _ROUTES)
    scale = check_scale(scale)
    if rule == "mean" and route == "sum":
        raise ValueError(
            "route: with the rule 'mean' each worker has its own factor, so the counts "
            "of votes do not determine the mean. Leave the route out."
        )
    follows = rule == "majority" and scale is None

    def init(layout, worker_count):
        del layout, worker_count
        return _step_size.start() if follows else ()

    def majority(vector, state, step):
        turn = (step.index + step.rank) % 2 == 0
        flags = (vector > 0) | ((vector == 0) & turn)
        square = step.mean_square() if follows else jnp.zeros((), jnp.float32)
        counts, facts = _ballots.count(
            flags,
            _facts(square, step),
            step.workers,
            route or _ballots.cheaper_route(step.n, step.w),
        )
        squares, dropped = _unpack_facts(facts)
        if follows:
            state = _step_size.follow(state, jnp.mean(squares))
        size = jnp.asarray(_step_size.rms(state) if follows else scale, jnp.float32)
        votes = jnp.sign(2 * counts - step.w)
        update = step.layout.round_all(size * votes.astype(jnp.float32))
        left = step.workers.localize(jnp.zeros_like(vector))
        return update, left, dropped, size, state

    def mean(vector, state, step):
        n, flags = step.n, vector >= 0
        # A sum that overflows is clipped; the rest stays in the residual.
        total = jnp.minimum(jnp.sum(jnp.abs(vector)), jnp.finfo(jnp.float32).max)
        factor = _step_size.coarse(total / max(n, 1))
        words, facts = _ballots.gather(flags, _facts(factor, step), step.workers)
        factors, dropped = _unpack_facts(facts)
        # Positive minus negative terms: twice the positive terms minus all terms.
        positive = _ballots.weigh(words, factors, n)
        average = (2 * positive - jnp.sum(factors)) / step.w
        update = step.layout.round_all(average)
        sent = jnp.where(flags, factor, -factor)
        left = (vector - sent) + (average - update)
        return update, left, dropped, jnp.mean(factors), state

    def apply(vector, choice, state, step):
        del choice
        combine = majority if rule == "majority" else mean
        update, left, dropped, size, state = combine(vector, state, step)
        report = whole_report(step.n, dropped, SignDetails(size))
        return Delivery(update, None, left, report), state

    def details(layout, worker_count):
        del layout, worker_count
        return SignDetails(jnp.zeros((), jnp.float32))

    accepts = frozenset({"everything"})
    return Exchange(
        apply, accepts, "packed_signs", init=init, details=details, abstains=False
    )


def _facts(magnitude: Float[Array, ""], step: Step) -> UInt32[Array, " 2"]:
    """Packs the magnitude, and whether this worker is dropped. Per worker."""
    facts = [jnp.asarray(fact, jnp.float32) for fact in (magnitude, step.dropped)]
    facts = jnp.stack(step.workers.localize(facts))
    return jax.lax.bitcast_convert_type(facts, jnp.uint32)


def _unpack_facts(
    rows: UInt32[Array, "w 2"],
) -> tuple[Float[Array, " w"], Bool[Array, " w"]]:
    """All workers' magnitudes, and whether each worker is dropped. Replicated."""
    facts = jax.lax.bitcast_convert_type(rows, jnp.float32)
    return facts[:, 0], facts[:, 1] > 0
