"""Thresholds from fitted tails, in several stages: the selection of SIDCo."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._checks import (
    check_capacity,
    check_choice,
    check_optional_count,
)
from sparsejax.parts import Choice, Sparsifier
from sparsejax.sparsifiers._everything import or_everything
from sparsejax.sparsifiers._fit._stages import tail_threshold
from sparsejax.sparsifiers._fit._tails import FITS
from sparsejax.sparsifiers._rungs import sample_of
from sparsejax.sparsifiers._target import Schedule, Target, slot_count
from sparsejax.vectors._selection import compact

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# From the published program: the number of stages may change every 5 steps, if the
# achieved density is more than 20 % off the wanted density.
_PERIOD = 5
_TOO_MANY, _TOO_FEW = 1.2, 0.8


class FittedState(NamedTuple):
    """State of `fitted`. Replicated.

    Attributes:
      stages: Int32[w], the number of stages of each worker.
      ratio: Float32[w], achieved over wanted density, summed since the last change.
    """

    stages: Int[Array, " w"]
    ratio: Float[Array, " w"]


def most_stages(density: Float[Array, ""] | float) -> Any:
    """The number of stages if each stage keeps half of the magnitudes."""
    if isinstance(density, float):
        return max(1, math.ceil(math.log(density) / math.log(0.5)))
    return jnp.maximum(1, jnp.ceil(-jnp.log2(density))).astype(jnp.int32)


def fitted(
    density: float | Schedule,
    *,
    fit: str = "exponential",
    stages: int | None = None,
    granularity: str = "vector",
    capacity: int | None = None,
    max_density: float | None = None,
) -> Sparsifier:
    """Selects `|x|` above a threshold that a fitted distribution gives for `density`.

    On accelerators distributions are fitted to a sample of a long vector.

    Args:
      density: fraction of the coordinates that each worker aims at, in (0, 1], or a
        schedule.
      fit: "exponential", "generalized_pareto" or "gamma".
      stages: the number of fits; each later fit uses the magnitudes above the threshold
        of the previous one. None adapts the number.
      granularity: "vector" for one threshold, "leaf" for one per leaf of the tree.
      capacity: slots per worker; by default `1.2 max(1, floor(density n))`, the largest
        count that does not change the number of stages.
      max_density: the largest density of a schedule, which fixes all sizes.

    Raises:
      TypeError: if an argument that should be a number is not a number, or is traced.
      ValueError: if a number is out of its range, or `fit` or `granularity` unknown;
        for a schedule without `max_density`, or `max_density` without a schedule.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.fitted(0.01, fit="gamma"),
      ...     exchange=exchanges.pairs(),
      ...     memory=memories.error_feedback(),
      ... )
    """

    target, capacity = Target.of(density, max_density), check_capacity(capacity)
    stages = check_optional_count("stages", stages)
    check_choice("fit", fit, tuple(FITS))
    check_choice("granularity", granularity, ("vector", "leaf"))

    def init(layout, worker_count):
        del layout
        return FittedState(
            jnp.ones((worker_count,), jnp.int32),
            jnp.zeros((worker_count,), jnp.float32),
        )

    def now(step):
        """The density of this step: a number, or Float32[] for a schedule."""
        if not callable(target.density):
            return target.density
        wanted = jnp.nan_to_num(jnp.float32(target.density(step.index)))
        return jnp.clip(wanted, 1 / max(step.n, 1), target.max_density)

    def select(vector, state, step):
        layout, density = step.layout, now(step)
        slots = slot_count(capacity, math.ceil(_TOO_MANY * target.most(step.n)), step.n)
        number = state.stages[step.rank] if stages is None else jnp.int32(stages)
        least = 1 / max(step.n, 1) if callable(target.density) else target.density
        most = most_stages(least) if stages is None else stages

        def threshold_of(x):
            if not _xla.on_cpu():
                x = sample_of(x, target.max_density)
            return tail_threshold(x, density, fit, number, most)

        if granularity == "vector":
            found = threshold_of(vector)
            indices, demand = compact(vector, found, capacity=slots)
        else:
            bounds = [(layout.offsets[i], layout.sizes[i]) for i in layout.order]
            leaves = [vector[start : start + size] for start, size in bounds if size]
            limits = [threshold_of(x) for x in leaves]
            reached = [jnp.abs(x) >= t for x, t in zip(leaves, limits, strict=True)]
            flags = jnp.concatenate(reached).astype(jnp.float32)
            indices, demand = compact(flags, 1.0, capacity=slots)
            found = jnp.min(jnp.stack(limits))
        return Choice(indices, demand, found), state

    def adapt(state, report, step):
        if stages is not None:
            return state
        goal = target.now(step.index, step.n)
        ratio = state.ratio + report.demand.astype(jnp.float32) / goal
        fewer = (ratio > _TOO_MANY * _PERIOD).astype(jnp.int32)
        more = (ratio < _TOO_FEW * _PERIOD).astype(jnp.int32)
        moved = jnp.clip(state.stages + more - fewer, 1, most_stages(now(step)))
        due = step.index % _PERIOD == _PERIOD - 1
        return FittedState(
            jnp.where(due, moved, state.stages), jnp.where(due, 0.0, ratio)
        )

    made = Sparsifier(select, "overlapping", init=init, adapt=adapt)
    return or_everything(made, target.is_everything)
