"""The baseline exchange: the mean of whole vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from sparsejax._report import whole_report
from sparsejax.exchanges._values import FULL, Widths, average
from sparsejax.parts import Choice, Delivery, Exchange, Step, no_details

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from sparsejax._layout import Layout

    Apply = Callable[[Float[Array, " n"], Choice, Any, Step], tuple[Delivery, Any]]

# Every kind of `Sparsifier.support`.
EVERY_SUPPORT = frozenset({"disjoint", "overlapping", "agreed", "everything"})


def average_whole(
    vector: Float[Array, " n"],
    step: Step,
    details: Any = (),
    widths: Widths = FULL,
) -> Delivery:
    """Delivers the mean of all workers' vectors.

    Details of exchanges with fewer bits have a field `rounding`.
    """
    workers, count = step.workers, step.w
    if widths == FULL:
        mine = jnp.arange(count, dtype=jnp.int32) == step.rank
        # One `psum` call for both, so the flags need no message of their own.
        flags = (mine & step.dropped).astype(vector.dtype)
        total, flags = workers.sum((vector, flags))
        mean, dropped, error = total / count, flags > 0, jnp.zeros((), vector.dtype)
    else:
        mean, error, rounding = average(vector, step, widths)
        details = details._replace(rounding=rounding)
        dropped = workers.gather(jnp.asarray(step.dropped))
    rounded = step.layout.round_all(mean)
    left = workers.localize(mean - rounded) + error
    return Delivery(rounded, None, left, whole_report(step.n, dropped, details))


def or_whole(
    apply: Apply,
    whole: Callable[[Layout, int], Any] = no_details,
    widths: Widths = FULL,
) -> Apply:
    """An `Exchange.apply` that averages whole vectors if the choice is a whole vector.

    Args:
      apply: the `Exchange.apply` for choices with indices.
      whole: `(layout, worker_count) -> details`, the details of a step that averages
        whole vectors.
      widths: see `Widths`.
    """

    def either(vector, choice, state, step):
        # An empty vector leads to a choice without slots.
        if choice.indices is not None and choice.indices.size:
            return apply(vector, choice, state, step)
        details = whole(step.layout, step.w)
        return average_whole(vector, step, details, widths), state

    return either


def dense() -> Exchange:
    """An all-reduce of the whole vector, whatever the choice.

    Sums are computed in float32, and in float64 if a leaf of the gradient is float64. A
    worker receives `2 (w-1)/w` times 4 n bytes, or 8 n bytes in float64.

    Example:
      >>> import sparsejax
      >>> tx = sparsejax.sparsify(
      ...     sparsejax.sparsifiers.everything(),
      ...     exchange=sparsejax.exchanges.dense(),
      ...     memory=sparsejax.memories.error_feedback(),
      ... )
    """

    def apply(vector, choice, state, step):
        del choice
        return average_whole(vector, step), state

    return Exchange(apply, EVERY_SUPPORT, "dense", wide=True)
