"""Delivers an exact sparse sum, or a dense sum if a message is too small."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from sparsejax import _xla
from sparsejax.exchanges._units import Units, indices_of
from sparsejax.parts import Choice, Delivery, Report, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Bool, Float, Int, Shaped


class Facts(NamedTuple):
    """A worker's facts about a step, sent with another message. Per worker.

    Attributes:
      demand: Int32[], the number of units that qualified.
      threshold: Float[].
      dropped: Bool[].
      failed: Bool[], whether something did not fit.
    """

    demand: Int[Array, ""]
    threshold: Float[Array, ""]
    dropped: Bool[Array, ""]
    failed: Bool[Array, ""]

    @classmethod
    def of(cls, choice: Choice, failed: Bool[Array, ""], step: Step) -> Facts:
        """The facts of `choice`; a lossless choice with too few slots has failed."""
        if step.lossless:
            failed = failed | (choice.demand > indices_of(choice).size)
        return cls(choice.demand, choice.threshold, jnp.asarray(step.dropped), failed)


def counts_contributors(step: Step) -> bool:
    """Whether `deliver_sum` needs the number of workers that contributed to each unit.

    True if the cast to the gradient's dtypes rounds the mean: the contributors then
    share the error.
    """
    return not step.lossless and not step.layout.exact


def deliver_sum(
    vector: Float[Array, " n"],
    choice: Choice,
    values: Float[Array, "k *D"],
    facts: Facts,
    decode: Callable[[], tuple[Shaped[Array, "u *D"], Int[Array, " u"] | None]],
    after: Int[Array, ""],
    details: Callable[[Float[Array, ""], Float[Array, ""], Bool[Array, ""]], Any],
    step: Step,
) -> Delivery:
    """Delivers the sparse sum, or a dense sum if something did not fit.

    For a dense sum, lossless methods sum whole vectors. Other methods sum the choices,
    and deliver the same coordinates as with a sparse sum.

    Args:
      vector: Float[n], per worker.
      choice: a choice with indices, per worker.
      values: the values of the choice, per worker.
      facts: the facts of all workers, [w], replicated.
      decode: `() -> (mean Float[u, ...], contributors Int32[u])`, replicated;
        contributors are None if `counts_contributors` is False.
      after: Int32[], the number of non-zero units of the sum, replicated.
      details: `(before, after, overflow) -> details` of the report.
      step: the step.
    """
    units, workers, count = Units.of(choice, step.n), step.workers, step.w
    indices = indices_of(choice)
    counted = counts_contributors(step)
    overflow = jnp.any(facts.failed)

    def sparse():
        mean, contributors = decode()
        return mean.reshape(-1), contributors, after

    def dense():
        if step.lossless:
            given = vector
        else:
            nothing = jnp.zeros((units.number, *units.shape), jnp.float32)
            given = nothing.at[indices].set(values, mode="drop")
            given = given.reshape(-1)
        contributors = None
        if counted:
            mine = jnp.zeros((units.number,), jnp.float32)
            mine = mine.at[indices].set(1.0, mode="drop")
            given, contributors = workers.sum((given, mine))
            contributors = contributors.astype(jnp.int32)
        else:
            given = workers.sum(given)
        nonzero = jnp.any(given.reshape(units.number, units.size) != 0, axis=1)
        mean = given / count if _xla.on_cpu() else given
        return mean, contributors, jnp.sum(nonzero, dtype=jnp.int32)

    mean, contributors, after = workers.cond(overflow, dense, sparse)
    if not _xla.on_cpu():
        # In the branch, the division would need memory of its own.
        mean = jnp.where(overflow, mean / count, mean)
    rounded = step.layout.round_all(mean)
    error = mean - rounded
    if step.lossless:
        delivered, left = None, error
    else:
        delivered = units.coordinates(indices)
        left = _left(error, contributors, indices, units, count)
    whole = overflow & step.lossless
    before = jnp.sum(facts.demand, dtype=jnp.int32).astype(jnp.float32) / count
    total = max(units.number, 1)
    report = Report(
        demand=facts.demand * units.size,
        sent=jnp.where(whole, step.n, after * units.size),
        density=jnp.where(whole, 1.0, after.astype(jnp.float32) / total),
        threshold=facts.threshold,
        dropped=facts.dropped,
        details=details(before / total, after.astype(jnp.float32) / total, overflow),
    )
    return Delivery(rounded, delivered, workers.localize(left), report)


def _left(
    error: Float[Array, " n"],
    contributors: Int[Array, " u"] | None,
    indices: Int[Array, " k"],
    units: Units,
    count: int,
) -> Float[Array, " kD"]:
    """This worker's part of `error`; the mean of all `count` parts is `error`."""
    left = units.values(error, indices)
    if contributors is not None:
        # The contributors share the error, so no mass is lost.
        many = contributors.at[indices].get(mode="fill", fill_value=1)
        part = count / jnp.maximum(many, 1).astype(jnp.float32)
        left = left * part.reshape(-1, *(1 for _ in units.shape))
    return left.reshape(-1)
