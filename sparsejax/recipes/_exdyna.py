"""ExDyna: exclusive selection in parts that move towards equal work."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import exchanges, memories, sparsifiers, thresholds
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.parts import ThresholdRule


def exdyna(
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
    """Each worker searches one of w exclusive parts, whose boundaries follow the data.

    Works like `micro`, but the parts consist of blocks, which move between neighbours
    until all parts hold equally many large coordinates. Then the workers' thresholds
    agree, and the update is close to a global top-k, without any sorting.

    Args:
      density: density of the update, in (0, 1]: `K* = max(1, floor(density n))`
        coordinates in all. Or an optax schedule, a function from the number of updates
        to the density.
      max_density: the largest density of a schedule, in (0, 1], which fixes the size of
        messages. Pass `max_density` with a schedule, and never with a number.
      axis_name: see `sparsejax.sparsify`.
      threshold: by default `thresholds.quota()`; the published rule is
        `thresholds.staircase()`.
      value_bits: see `sparsejax.exchanges.union`.
      beta: the decay of the residual in a step, in (0, 1]: see `memories.decayed`. For
        `sparsejax.rounds` of many local steps, 0.8. `None` keeps all of it.
      capacity: slots per worker; by default those of the rule, `ceil(K*/w)`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker, and a few
      replicated numbers per block.

    Departs from the paper: by default each worker finds, in the same step, its own
    threshold that fills an equal share of K*, and boundaries move by as many blocks as
    needed.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.exdyna(density=0.01), optax.sgd(0.1))

    References:
      Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable
      Distributed Deep Learning", CCGrid 2024 (arXiv 2402.13781).
    """
    rule = thresholds.rule_or_default(threshold)
    return sparsify(
        sparsifiers.exclusive(
            density,
            partition=rule.partition,
            threshold=rule,
            capacity=capacity,
            max_density=max_density,
        ),
        exchange=exchanges.union(value_bits),
        memory=memories.decayed(1 if beta is None else beta),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
