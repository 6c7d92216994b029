"""SIDCo: thresholds from distributions fitted to the gradient's magnitudes."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import memories, sparsifiers
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.parts import Exchange
from sparsejax.recipes._default_exchange import exchange_or_pairs


def sidco(
    density: float | optax.Schedule = 0.01,
    fit: str = "exponential",
    stages: int | None = None,
    capacity: int | None = None,
    *,
    granularity: str = "vector",
    max_density: float | None = None,
    axis_name: AxisName = "data",
    exchange: Exchange | None = None,
    value_bits: Any = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker sends the values above a threshold from a fitted distribution.

    With `x = |residual_r + gradient_r|`, the first of M stages fits a distribution to
    the moments of `x` and sets the threshold that 1/4 of the values exceed. Each later
    stage fits the tail `{x > threshold}` and sets the threshold that a fraction
    `(4 density)^(1/(M-1))` of the tail exceeds. With a single stage, or a density of
    1/4 or more, the first threshold is the one for `density`.

    Without `stages`, every worker starts with M = 1 and may change M every 5 steps: one
    less if the worker selected more than 1.2 times its target on average, and one more
    below 0.8 times, within [1, `ceil(log2(1 / density))`].

    Args:
      density: fraction of the coordinates that each worker aims at, in (0, 1]. Or a
        schedule, see `sparsejax.exdyna`.
      fit: "exponential", "generalized_pareto", or "gamma" with Pareto tails.
      stages: fixed number M of stages; None adapts M.
      capacity: slots per worker; by default `1.2 max(1, floor(density n))`.
      granularity: "vector" for one threshold, "leaf" for one per leaf of the tree.
      max_density: the largest density of a schedule.
      axis_name: see `sparsejax.sparsify`.
      exchange: see `sparsejax.topk`.
      value_bits: see `sparsejax.exchanges.pairs`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker.

    Departs from the paper: by default there is one threshold for the whole vector, and
    not one per leaf. A threshold never exceeds the largest magnitude, so at least one
    coordinate is sent even if the fit fails. Quantiles of the gamma distribution are
    exact. Coordinates that do not fit the message wait, at evenly strided ranks.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.sidco(density=0.01), optax.sgd(0.1))

    References:
      Abdelmoniem, Elzanaty, Alouini and Canini, "An Efficient Statistical-based
      Gradient Compression Technique for Distributed Training Systems", MLSys 2021
      (arXiv 2101.10761).
    """
    return sparsify(
        sparsifiers.fitted(
            density,
            fit=fit,
            stages=stages,
            granularity=granularity,
            capacity=capacity,
            max_density=max_density,
        ),
        exchange=exchange_or_pairs(exchange, value_bits),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
