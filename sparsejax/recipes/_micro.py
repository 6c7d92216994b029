"""MiCRO: exclusive selection in rotating slices."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import exchanges, memories, partitions, sparsifiers, thresholds
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.parts import ThresholdRule


def micro(
    density: float | optax.Schedule = 0.01,
    *,
    max_density: float | None = None,
    axis_name: AxisName = "data",
    threshold: ThresholdRule | None = None,
    value_bits: Any = None,
    beta: float | None = None,
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker searches one of w equal slices, which rotate from step to step.

    With `acc_r = residual_r + gradient_r`, at step t worker r selects
    `|acc_r| >= threshold` in slice `(t + r) mod w`. All workers average their values at
    all selected coordinates, and remove them from their residuals.

    Args:
      density: density of the update, in (0, 1], or a schedule, see `sparsejax.exdyna`.
      max_density: the largest density of a schedule, see `sparsejax.exdyna`.
      axis_name: see `sparsejax.sparsify`.
      threshold: by default `thresholds.quota()`; the published rule is
        `thresholds.staircase()`.
      value_bits: see `sparsejax.exchanges.union`.
      beta: the decay of the residual in a step, in (0, 1]: see `memories.decayed`. For
        `sparsejax.rounds` of many local steps, 0.8. `None` keeps all of it.
      capacity: slots per worker; by default those of the rule, `ceil(K*/w)`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker.

    Departs from the paper: by default each worker finds, in the same step, its own
    threshold that fills an equal share of K*. The published staircase needs hundreds
    of steps to get near the density.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.micro(density=0.01), optax.sgd(0.1))

    References:
      Yoon and Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and
      Accelerating Distributed DNN Training", HiPC 2023 (arXiv 2310.00967).
    """
    return sparsify(
        sparsifiers.exclusive(
            density,
            partition=partitions.even(),
            threshold=thresholds.rule_or_default(threshold),
            capacity=capacity,
            max_density=max_density,
        ),
        exchange=exchanges.union(value_bits),
        memory=memories.decayed(1 if beta is None else beta),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
