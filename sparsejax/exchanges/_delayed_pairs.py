"""`pairs`, one step late: last step's message travels while this step computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from sparsejax.exchanges._dense import EVERY_SUPPORT
from sparsejax.exchanges._indices import facts_of
from sparsejax.exchanges._late import slots_of, with_indices
from sparsejax.exchanges._pair_sums import add_pairs, no_pairs
from sparsejax.exchanges._pair_values import decoded, encoded
from sparsejax.exchanges._units import Units
from sparsejax.parts import Delivery, Exchange, Report, Sparsifier
from sparsejax.parts._absence import present_number
from sparsejax.placement._markers import PerWorker
from sparsejax.vectors import _codec, _reach

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    from sparsejax._workers import Workers


class InFlight(NamedTuple):
    """A worker's message between the step that made it and the step that delivers it.

    Attributes:
      message: PerWorker, UInt16[m]: the message that the next step sends.
      coordinates: PerWorker, Int32[k], of the message's values; empty slots hold `n`.
      values: PerWorker, Float32[k]; the residual does not contain them any more.
    """

    message: PerWorker
    coordinates: PerWorker
    values: PerWorker


class DelayedPairsDetails(NamedTuple):
    """`Report.details` of `pairs` one step late, of the delivered step. Replicated.

    Attributes:
      chosen: Int32[w], the number of coordinates that each worker sent.
      union: Int32[], the number of distinct coordinates among them.
      rounding: see `PairsDetails`.
      present: Bool[w], the workers that took part; the sum was divided by their
        number.
    """

    chosen: Int[Array, " w"]
    union: Int[Array, ""]
    rounding: Float[Array, ""]
    present: Bool[Array, " w"]


class _Arrived(NamedTuple):
    """The mean and the report of last step's messages. Replicated."""

    mean: Float[Array, " n"]
    report: Report


def delayed_pairs(bits: int, sparsifier: Sparsifier, workers: Workers) -> Exchange:
    """`pairs` whose message of step t is delivered in step t + 1.

    The state contains the operand of the all-gather, so that a compiler can start the
    exchange before the backward pass and end it afterwards. Values leave the residual
    when they are chosen.

    Args:
      bits: the bits of a value on the wire.
      sparsifier: makes the choices that are sent; its slots fix the size of the state.
      workers: the workers' axis.
    """

    slots_in = slots_of(sparsifier, workers)

    def flight(layout, units, indices, own, facts, here):
        """The parts of this worker's message, and the state that contains it."""
        coordinates = units.coordinates(indices)
        words, values, errors = encoded(own, coordinates, layout, bits)
        nowhere = jnp.zeros((), jnp.int32)
        places = _reach.encode_indices(indices, nowhere, units.number, units.number)
        parts = (places, facts, here, words, *errors)
        made = (_codec.pack(parts), coordinates, values)
        return parts, InFlight(*map(PerWorker, made))

    def nothing(layout, units, slots):
        indices = jnp.full((slots,), units.number, jnp.int32)
        own = jnp.zeros((slots, *units.shape), jnp.float32)
        facts = (
            jnp.zeros((), jnp.int32),
            jnp.zeros((), jnp.float32),
            jnp.zeros((), jnp.bool_),
        )
        return flight(layout, units, indices, own, facts, jnp.ones((), jnp.bool_))

    def init(layout, worker_count):
        return nothing(layout, *slots_in(layout, worker_count)[:2])[1]

    def receive(vector, state, step):
        units, slots, _ = slots_in(step.layout, step.w)
        like = nothing(step.layout, units, slots)[0]
        gathered = step.workers.gather(state.message.per_worker)
        places, facts, here, words, *errors = _codec.unpack(gathered, like)
        start = jnp.zeros((step.w,), jnp.int32)
        indices = _reach.decode_indices(
            places, start, units.number, units.number, slots
        )
        values = decoded(words, indices, units, step.layout, bits)
        divisor = present_number(here)
        mean, rest, report = add_pairs(
            indices, values, facts, units, step, divisor, errors
        )
        if not step.layout.exact:
            own = state.coordinates.per_worker
            vector = vector.at[own].add(rest, mode="drop")
        details = DelayedPairsDetails(*report.details, here)
        return vector, _Arrived(mean, report._replace(details=details))

    def apply(vector, choice, arrived, step):
        choice = with_indices(choice, step.n)
        units = Units.of(choice, step.n)
        here = jnp.asarray(True if step.present is None else step.present)
        if step.present is not None:  # An absent worker chooses nothing.
            kept = jnp.where(here, choice.indices, units.number)
            choice = choice._replace(indices=kept)
        own = units.values(vector, choice.indices)
        parts = (choice.indices, own, facts_of(choice, step), here)
        sent = flight(step.layout, units, *parts)[1]
        left = own.reshape(-1) - sent.values.per_worker
        delivered = sent.coordinates.per_worker
        return Delivery(arrived.mean, delivered, left, arrived.report), sent

    def details(layout, worker_count):
        here = jnp.ones((worker_count,), jnp.bool_)
        return DelayedPairsDetails(*no_pairs(layout, worker_count), here)

    return Exchange(
        apply,
        EVERY_SUPPORT,
        # Only this code can read the message that the state contains.
        f"pairs in {bits} bits, one step late",
        init=init,
        details=details,
        receive=receive,
        lag=1,
    )
