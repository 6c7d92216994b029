"""`union` and `leader`, two steps late, in one message that the state contains."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._report import sparse_report, zero_report
from sparsejax.exchanges._dense import EVERY_SUPPORT
from sparsejax.exchanges._indices import facts_of, histogram_of, no_histogram, united
from sparsejax.exchanges._late import slots_of, with_indices
from sparsejax.exchanges._units import Units
from sparsejax.exchanges._values import placed
from sparsejax.parts import Delivery, Exchange, Report, Sparsifier
from sparsejax.parts._absence import present_number, without_gaps
from sparsejax.placement._markers import PerWorker
from sparsejax.vectors import _codec, _reach

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    from sparsejax._workers import Workers


class Announced(NamedTuple):
    """State between the step that chose coordinates and the step that delivers them.

    Replicated, except for leaves marked `PerWorker`.

    Attributes:
      message: PerWorker, Float32[M]: the message that the next step sums. It consists
        of this worker's values at `coordinates`, which the residual does not contain
        any more, and of the indices and the facts of the last step.
      coordinates: Int32[m], the coordinates of the values; empty slots hold `n`.
      demand: Int32[w], threshold: Float32[w], dropped: Bool[w]: the facts of the step
        that chose the coordinates.
    """

    message: PerWorker
    coordinates: Int[Array, " m"]
    demand: Int[Array, " w"]
    threshold: Float[Array, " w"]
    dropped: Bool[Array, " w"]


class LateDetails(NamedTuple):
    """`Report.details` of `union` and `leader` two steps late. Replicated.

    Attributes:
      histogram: see `UnionDetails`.
      present: Bool[w], the workers whose values were averaged.
    """

    histogram: Int[Array, " B"]
    present: Bool[Array, " w"]


class _Arrived(NamedTuple):
    """The mean and report of last step's values, and the next step's coordinates."""

    mean: Float[Array, " n"]
    report: Report
    own: Float[Array, " m"]
    left: Float[Array, " m"]
    following: Any  # the next `Announced`, without its message


def delayed_union(
    sparsifier: Sparsifier, workers: Workers, *, name: str, leading: bool = False
) -> Exchange:
    """`union` or `leader`, whose choice of step t is delivered in step t + 2.

    The message of step t + 1 carries the indices that were chosen in step t, and the
    values at the indices of step t - 1, which all workers know by then. One all-reduce
    sends both: values are summed, and every worker adds zeros where others write their
    indices, 16 bits to a number. The state contains the operand, so that a compiler can
    start the exchange before the backward pass and end it afterwards. Values leave the
    residual when the indices of all workers are known.

    Args:
      sparsifier: makes the choices that are sent; its slots fix the size of the state.
      workers: the workers' axis.
      name: the name of the exchange.
      leading: whether only worker `step mod w` chooses.
    """
    slots_in = slots_of(sparsifier, workers)
    # Where all workers choose the same, one of them announces the choice for all.
    leading = leading or sparsifier.support == "agreed"

    def sizes(layout, count):
        """Static: `(slots, places, lengths, like)`.

        `lengths` are the lengths of the message's values, codes and facts; `like` has
        the types of one worker's code and facts.
        """
        slots, places = slots_in(layout, count), 1 if leading else count
        units = slots.units
        indices = jnp.full((slots.number,), units.number, jnp.int32)
        code = _reach.encode_indices(indices, 0, units.number, units.number)
        none = jnp.zeros((), jnp.bool_)
        facts = (jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), none, none)
        lengths = (
            places * slots.number * units.size,
            places * _codec.pack(code).size,
            count * _codec.pack(facts).size,
        )
        return slots, places, lengths, (code, facts)

    def words_of(tree):
        return _codec.pack(tree).astype(jnp.float32)

    def init(layout, count):
        lengths = sizes(layout, count)[2]
        # A message of zeros marks no worker as present, so nothing was chosen.
        return Announced(
            PerWorker(jnp.zeros((sum(lengths),), jnp.float32)),
            jnp.full(lengths[:1], layout.n, jnp.int32),
            jnp.zeros((count,), jnp.int32),
            jnp.zeros((count,), jnp.float32),
            jnp.zeros((count,), jnp.bool_),
        )

    def receive(vector, state, step):
        layout, n, count = step.layout, step.n, step.w
        slots, places, (m, codes, _), like = sizes(layout, count)
        units = slots.units
        total = step.workers.sum(state.message.per_worker)
        sums, words, facts = jnp.split(total, (m, m + codes))
        words, facts = words.astype(_codec.WORD), facts.astype(_codec.WORD)
        code = _codec.unpack(words.reshape(places, -1), like[0])
        told = _codec.unpack(facts.reshape(count, -1), like[1])
        demand, threshold, dropped, here = told

        number = present_number(here)
        mean, rest = placed(sums / number, state.coordinates, step)
        facts = (state.demand, state.threshold, state.dropped)
        details = LateDetails(histogram_of(state.coordinates, n, count), here)
        report = sparse_report(state.coordinates, n, facts, details)
        if not layout.exact:
            rest = step.workers.localize(rest * (number / count))
            vector = vector.at[state.coordinates].add(rest, mode="drop")

        start = jnp.zeros((places,), jnp.int32)
        indices = _reach.decode_indices(
            code, start, units.number, units.number, slots.number
        )
        heard = here[(step.index - 1) % count] if leading else jnp.any(here)
        indices = jnp.where(heard, indices, units.number)
        # Parts are disjoint, unless all workers choose the whole vector.
        support = "agreed" if slots.whole else step.support
        chosen = united(indices, units, dataclasses.replace(step, support=support))
        taken = _xla.values_at(vector, chosen)
        own = taken if step.present is None else jnp.where(step.present, taken, 0)
        # Removed, so that the sparsifier does not choose these values again.
        vector = vector.at[chosen].set(taken - own, mode="drop")
        told = zero_report(count)._replace(demand=demand, threshold=threshold)
        told = without_gaps(told, here)
        following = (chosen, told.demand, told.threshold, dropped)
        return vector, _Arrived(mean, report, own, taken - own, following)

    def apply(vector, choice, arrived, step):
        del vector
        choice, count, mine = with_indices(choice, step.n), step.w, step.rank
        units = Units.of(choice, step.n)
        here = jnp.asarray(True if step.present is None else step.present)
        speaks = here & (mine == step.index % count) if leading else here
        indices = jnp.where(speaks, choice.indices, units.number)
        words = words_of(_reach.encode_indices(indices, 0, units.number, units.number))
        if leading:
            codes = jnp.where(speaks, words, 0)
        else:
            codes = _row(words, mine, count)
        facts = _row(words_of((*facts_of(choice, step), here)), mine, count)
        message = jnp.concatenate([arrived.own, codes, facts])
        sent = Announced(PerWorker(message), *arrived.following)
        delivery = Delivery(
            arrived.mean, sent.coordinates, arrived.left, arrived.report
        )
        return delivery, sent

    def details(layout, count):
        return LateDetails(no_histogram(layout.n, count), jnp.ones((count,), jnp.bool_))

    return Exchange(
        apply,
        EVERY_SUPPORT,
        f"{name}, two steps late",
        init=init,
        details=details,
        tells=frozenset({"histogram"}),
        receive=receive,
        lag=2,
    )


def _row(
    words: Float[Array, " c"], mine: Int[Array, ""], count: int
) -> Float[Array, " wc"]:
    """One row per worker, flat: `words` in this worker's row, zeros in all others."""
    rows = jnp.arange(count, dtype=jnp.int32)[:, None]
    return jnp.where(rows == mine, words[None], 0).reshape(-1)
