"""ExDyna: exclusive selection in parts that move towards equal work."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import exchanges, memories, partitions, sparsifiers, thresholds
from sparsejax._checks import check_capacity, check_density_schedule
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.parts import ThresholdRule


def exdyna(
    density: float | optax.Schedule = 0.01,
    *,
    max_density: float | None = None,
    axis_name: AxisName = "data",
    threshold: ThresholdRule | None = None,
    value_dtype: Any = "float32",
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker searches one of w exclusive parts, whose boundaries follow the data.

    As `micro`, but the parts consist of blocks that move between neighbours, so that
    all parts come to hold as many large coordinates: then the workers' thresholds
    agree, and what is sent is close to a global top-k without any sorting.

    Args:
      density: fraction of all coordinates to deliver per step, in (0, 1]: K* =
        max(1, floor(density n)) in all, whatever the number of workers. Or an optax
        schedule of it: a function from the number of updates made.
      max_density: the largest density that a schedule reaches, in (0, 1]; with a
        schedule only, and necessary there, since it fixes the size of messages.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      threshold: how thresholds are found: by default `thresholds.quota()`, with
        boundaries that follow the blocks' counts; `thresholds.staircase()` is the
        published rule, and brings the published way to move blocks.
      value_dtype: of values on the wire: float32, or bfloat16 for half the bytes.
      capacity: payload slots per worker; by default what the threshold rule asks for,
        ceil(K*/w).
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`.

    Returns:
      An optax transformation from local gradients (per worker) to averaged updates
      (replicated). Its state holds one float32 residual [n] per worker, and a few
      numbers per block.

    Raises:
      TypeError: if `density` or `capacity` is not a number, or is traced; if
        `threshold` is not a rule.
      ValueError: if `density` is outside (0, 1], `capacity` below 1, `nonfinite` or
        `value_dtype` unknown, or `max_density` missing or of no use.

    Departs from the paper: by default each worker finds its own threshold in the same
    step, to fill an equal share of K*, and boundaries move by as many blocks as the
    counts ask for, where the published program moves one block a step and one global
    threshold by a fixed factor.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.exdyna(density=0.01), optax.sgd(0.1))

    References:
      Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable
      Distributed Deep Learning", CCGrid 2024 (arXiv 2402.13781).
    """
    rule = thresholds.rule_or_default(threshold)
    density, most = check_density_schedule(density, max_density)
    return sparsify(
        sparsifiers.exclusive(
            density,
            partition=getattr(partitions, rule.movement)(),
            threshold=rule,
            capacity=check_capacity(capacity),
            max_density=most,
        ),
        exchange=exchanges.union(value_dtype),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
