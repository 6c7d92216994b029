"""MiCRO: exclusive selection in rotating slices."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import exchanges, memories, partitions, sparsifiers, thresholds
from sparsejax._checks import check_capacity, check_density_schedule
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.parts import ThresholdRule


def micro(
    density: float | optax.Schedule = 0.01,
    *,
    max_density: float | None = None,
    axis_name: AxisName = "data",
    threshold: ThresholdRule | None = None,
    value_dtype: Any = "float32",
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker searches one of w equal slices, which rotate from step to step.

    With `acc_r = residual_r + gradient_r`, at step t worker r selects
    `|acc_r| >= threshold` in slice `(t + r) mod w`. All workers' values at all selected
    coordinates are summed and divided by w, and leave their residuals.

    Args:
      density: fraction of all coordinates to deliver per step, in (0, 1]: K* =
        max(1, floor(density n)) in all, whatever the number of workers. Or an optax
        schedule of it: a function from the number of updates made.
      max_density: the largest density that a schedule reaches, in (0, 1]; with a
        schedule only, and necessary there, since it fixes the size of messages.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      threshold: how thresholds are found: by default `thresholds.quota()`;
        `thresholds.staircase()` is the published rule.
      value_dtype: of values on the wire: float32, or bfloat16 for half the bytes.
      capacity: payload slots per worker; by default what the threshold rule asks for,
        ceil(K*/w).
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`.

    Returns:
      An optax transformation from local gradients (per worker) to averaged updates
      (replicated). Its state holds one float32 residual [n] per worker.

    Raises:
      TypeError: if `density` or `capacity` is not a number, or is traced; if
        `threshold` is not a rule.
      ValueError: if `density` is outside (0, 1], `capacity` below 1, `nonfinite` or
        `value_dtype` unknown, or `max_density` missing or of no use.

    Departs from the paper: by default each worker finds its own threshold in the same
    step, to fill an equal share of K*, where the published staircase moves one global
    threshold by a fixed factor per step and takes hundreds of steps to arrive.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.micro(density=0.01), optax.sgd(0.1))

    References:
      Yoon and Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and
      Accelerating Distributed DNN Training", HiPC 2023 (arXiv 2310.00967).
    """
    density, most = check_density_schedule(density, max_density)
    return sparsify(
        sparsifiers.exclusive(
            density,
            partition=partitions.even(),
            threshold=thresholds.rule_or_default(threshold),
            capacity=check_capacity(capacity),
            max_density=most,
        ),
        exchange=exchanges.union(value_dtype),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
