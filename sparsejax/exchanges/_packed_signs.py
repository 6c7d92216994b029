"""One sign bit per coordinate and worker, combined where everybody has them all."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import _bits
from sparsejax._base import Delivery, Exchange, Report
from sparsejax.exchanges import _step_size
from sparsejax.exchanges._dense import zero_report

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, UInt32

_RULES = ("majority", "mean")
_ROUTES = (None, "gather", "sum")


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
      sign(0) = +1. What is left of `u_r` is `u_r - m_r sign(u_r)`.

    The signs travel in one of two ways. "gather": everybody receives everybody's packed
    bits, `(w-1) n / 8` bytes. "sum": every sign has a field of `b = ceil(log2(w+1))`
    bits in a word, wide enough for the count of votes, and one all-reduce adds the
    words: `2 (w-1)/w` times `4 ceil(n / floor(32/b))` bytes, equal at 8 workers and less
    from 9 on. Either way facts of the report ride along, two words per worker.

    Args:
      rule: "majority" or "mean".
      scale: step size of the majority's signs; None for the root mean square of the
        workers' gradients, before a memory adds to them, as a running mean.
      route: "gather" or "sum" for the majority; None for what receives fewer bytes.

    Raises:
      ValueError: for an unknown rule or route, or for the mean by the route "sum": each
        worker has a factor of its own.
    """
    if rule not in _RULES:
        raise ValueError(f"rule: got {rule!r}, expected one of {_RULES}.")
    if route not in _ROUTES:
        raise ValueError(f"route: got {route!r}, expected one of {_ROUTES}.")
    if rule == "mean" and route == "sum":
        raise ValueError(
            "route: signs of the rule 'mean' have another factor on each worker, so "
            "that counts of votes do not tell their mean. Leave the route out."
        )
    majority = rule == "majority"
    follows = majority and scale is None

    def init(layout, worker_count):
        del layout, worker_count
        return _step_size.start() if follows else ()

    def apply(vector, payload, state, step, workers, layout):
        n, count = vector.shape[0], workers.count()
        magnitude = jnp.zeros((), jnp.float32)
        flags = vector >= 0
        if follows:
            magnitude = payload.gradient_square
        if majority:
            turn = (step + workers.index()) % 2 == 0
            flags = (vector > 0) | ((vector == 0) & turn)
        else:
            magnitude = jnp.sum(jnp.abs(vector)) / max(n, 1)
        facts = jnp.stack(
            [
                workers.localize(fact.astype(jnp.float32))
                for fact in (magnitude, payload.dropped)
            ]
        )
        facts = jax.lax.bitcast_convert_type(facts, jnp.uint32)

        by_sum = majority and (route or cheaper_route(n, count)) == "sum"
        if by_sum:
            fields = pack_fields(flags, count)
            # Facts are added to zeros, which leaves their bits as they are.
            mine = jnp.arange(count, dtype=jnp.int32) == workers.index()
            rows = jnp.where(mine[:, None], facts[None], 0).reshape(-1)
            total = workers.sum(jnp.concatenate([fields, rows]))
            counts = unpack_fields(total[: fields.size], n, count)
            rows = total[fields.size :].reshape(count, -1)
        else:
            words = _bits.pack(flags)
            gathered = workers.gather(jnp.concatenate([words, facts]))
            words, rows = gathered[:, : words.size], gathered[:, words.size :]
        facts = jax.lax.bitcast_convert_type(rows, jnp.float32)

        new, left = state, workers.localize(jnp.zeros_like(vector))
        if majority:
            if not by_sum:
                counts = _over_workers(words, jnp.ones((count,), jnp.int32), n)
            if follows:
                new = _step_size.follow(state, jnp.mean(facts[:, 0]))
            found = jnp.asarray(_step_size.rms(new) if follows else scale, jnp.float32)
            votes = jnp.sign(2 * counts - count).astype(jnp.float32)
            update = layout.round_all(found * votes)
        else:
            factors = facts[:, 0]
            found = jnp.mean(factors)
            # Twice the positive part, less the sum: the others count negative.
            positive = _over_workers(words, factors, n)
            mean = (2 * positive - jnp.sum(factors)) / count
            update = layout.round_all(mean)
            own = jnp.where(flags, magnitude, -magnitude)
            left = (vector - own) + (mean - update)
        report = Report(
            demand=jnp.full((count,), n, jnp.int32),
            sent=jnp.asarray(n, jnp.int32),
            density=jnp.ones((), jnp.float32),
            threshold=jnp.zeros((count,), jnp.float32),
            dropped=facts[:, 1] > 0,
            details=SignDetails(found),
        )
        return Delivery(update, None, left, report), new

    def report(layout, worker_count):
        details = SignDetails(jnp.zeros((), jnp.float32))
        return zero_report(layout.n, worker_count, details)

    return Exchange(
        init,
        apply,
        report,
        frozenset({"everything"}),
        f"packed_signs({rule!r})",
        needs_gradient_square=follows,
    )


def _over_workers(words, factors, n):
    """Per coordinate [n] the sum of `factors` [w] over workers whose bit is set."""
    # One reduction over the gathered rows, in their order on every worker.
    shifts = jnp.arange(_bits.WORD, dtype=jnp.uint32)
    bits = (words[:, :, None] >> shifts[None, None]) & 1
    terms = bits.astype(factors.dtype) * factors[:, None, None]
    return jnp.sum(terms, axis=0, dtype=factors.dtype).reshape(-1)[:n]


def _field_width(worker_count: int) -> int:
    """Bits that hold any number from 0 to `worker_count`."""
    return worker_count.bit_length()


def cheaper_route(n: int, worker_count: int) -> str:
    """ "sum" or "gather": by which a worker receives fewer bytes; static."""
    words = -(-n // (_bits.WORD // _field_width(worker_count)))
    by_sum = 2 / worker_count * words
    by_gather = -(-n // _bits.WORD)
    # Where they are equal, the sum needs no pass over the bits of each worker.
    return "sum" if by_sum <= by_gather else "gather"


def pack_fields(flags: Bool[Array, " n"], worker_count: int) -> UInt32[Array, " words"]:
    """Flags [n] in fields wide enough for the sum of `worker_count` such words.

    Word `i` of W holds coordinates `i`, `W + i`, `2 W + i`, ..., the first one in the
    lowest bits: whole rows are shifted and added.
    """
    width = _field_width(worker_count)
    per_word = _bits.WORD // width
    rows = jnp.pad(flags, (0, -flags.size % per_word)).reshape(per_word, -1)
    shifts = width * jnp.arange(per_word, dtype=jnp.uint32)
    return jnp.sum(rows.astype(jnp.uint32) << shifts[:, None], axis=0, dtype=jnp.uint32)


def unpack_fields(
    words: UInt32[Array, " words"], n: int, worker_count: int
) -> Int32[Array, " n"]:
    """The counts [n] in the sum of packed words."""
    width = _field_width(worker_count)
    shifts = width * jnp.arange(_bits.WORD // width, dtype=jnp.uint32)
    fields = (words[None] >> shifts[:, None]) & (2**width - 1)
    return fields.reshape(-1)[:n].astype(jnp.int32)
