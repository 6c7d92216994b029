"""A step without some of the workers, who enter every collective with zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from sparsejax.parts._records import Report

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


def keep_waiting(settled: Any, old: Any, present: Bool[Array, ""]) -> Any:
    """The residual after a step; an absent worker keeps its old one. Per worker.

    Args:
      settled: the residual from `Memory.settle`. An absent worker's vector was zero, so
        its first leaf has only rounding errors, of means that this worker computed for
        all workers.
      old: the residual before the step.
      present: whether this worker takes part.
    """
    leaves, treedef = jax.tree.flatten(settled)
    before = jax.tree.leaves(old)
    if not leaves:
        return settled
    first = leaves[0] + jnp.where(present, 0, before[0])
    rest = [
        jnp.where(present, a, b) for a, b in zip(leaves[1:], before[1:], strict=True)
    ]
    return jax.tree.unflatten(treedef, [first, *rest])


def present_number(here: Bool[Array, " w"]) -> Float[Array, ""]:
    """The number of present workers, to divide by: 1 if none is. Replicated."""
    return jnp.maximum(jnp.sum(here, dtype=jnp.float32), 1)


def among_present(
    mean: Float[Array, " n"], here: Bool[Array, " w"]
) -> Float[Array, " n"]:
    """The mean over the present workers, from the mean over all. Replicated."""
    return mean * (here.size / present_number(here)).astype(mean.dtype)


def without_gaps(report: Report, here: Bool[Array, " w"]) -> Report:
    """The report for `Sparsifier.adapt`, if some workers are absent. Replicated.

    An absent worker reports neither demand nor threshold. The sparsifier gets the means
    of the present workers instead, so that rules do not mistake the absence for a
    threshold that is too high.
    """

    def filled(values):
        known = jnp.sum(jnp.where(here, values, 0), dtype=jnp.float32)
        known = known / present_number(here)
        return jnp.where(here, values, known.astype(values.dtype))

    return report._replace(
        demand=filled(report.demand), threshold=filled(report.threshold)
    )
