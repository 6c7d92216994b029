"""SIDCo: thresholds from distributions fitted to the gradient's magnitudes."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import memories, sparsifiers
from sparsejax._checks import (
    check_capacity,
    check_choice,
    check_density,
    check_optional_count,
)
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.parts import Exchange
from sparsejax.recipes._default_exchange import exchange_or_pairs
from sparsejax.sparsifiers._fit import _tails


def sidco(
    density: float = 0.01,
    fit: str = "exponential",
    stages: int | None = None,
    capacity: int | None = None,
    *,
    granularity: str = "vector",
    axis_name: AxisName = "data",
    exchange: Exchange | None = None,
    value_dtype: Any = "float32",
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker sends what exceeds a threshold read off a fitted distribution.

    With `x = |residual_r + gradient_r|`, the first of M stages fits a distribution to
    the moments of `x` and takes its threshold for 1/4; each further one fits the tail
    of `{x > threshold}` and takes the threshold for `(4 density)^(1/(M-1))` of that. A
    single stage, or a density of 1/4 or more, takes the threshold for `density` at
    once. Nothing is sorted; each stage reads the vector once or twice.

    Without `stages`, every worker starts with one and changes its number every 5 steps:
    one less where it selected more than 1.2 times what was asked for on average, one
    more below 0.8, from 1 to `ceil(log2(1 / density))`.

    Args:
      density: fraction of the coordinates that each worker aims at, in (0, 1].
      fit: "exponential"; "generalized_pareto"; or "gamma", whose later stages are
        generalised Pareto.
      stages: fixed number M of stages; None adapts it.
      capacity: payload slots per worker; by default 1.2 max(1, floor(density n)).
      granularity: "vector" for one threshold, "leaf" for one per leaf of the tree, as
        the paper has it; the program grows with the number of leaves.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      exchange: `exchanges.pairs()` by default, or another as in `topk`.
      value_dtype: of values on the wire: float32, or bfloat16 for half the bytes.
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`.

    Returns:
      An optax transformation from local gradients (per worker) to averaged updates
      (replicated). Its state holds one float32 residual [n] per worker, and two
      numbers for each.

    Raises:
      TypeError: if a number is none, or is traced.
      ValueError: if `density` is outside (0, 1], `stages` or `capacity` below 1, `fit`,
        `granularity`, `nonfinite` or `value_dtype` unknown, or if `exchange` cannot
        deliver overlapping choices.

    Departs from the paper: one threshold for the whole vector by default. A threshold
    never exceeds the largest magnitude, so that at least one coordinate is sent where
    the fit fails, as it does for equal magnitudes. Quantiles of the gamma distribution
    are exact, where the program approximates them. What exceeds the message waits, at
    evenly strided ranks.

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
            check_density(density),
            fit=check_choice("fit", fit, tuple(_tails.FITS)),
            stages=check_optional_count("stages", stages),
            granularity=check_choice("granularity", granularity, ("vector", "leaf")),
            capacity=check_capacity(capacity),
        ),
        exchange=exchange_or_pairs(exchange, value_dtype),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
