"""DEFT: exclusive selection, more of it in layers with larger gradients."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def deft(
    density: float | optax.Schedule = 0.01,
    *,
    max_density: float | None = None,
    axis_name: AxisName = "data",
    value_bits: Any = None,
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker selects in its own layers, more in layers with large gradients.

    With `acc_r = residual_r + gradient_r`, layer l should deliver

        k_l = K* ||acc[l]|| / sum_m ||acc[m]||    (at most its size)

    coordinates. The norms are averaged over the workers, and the `k_l` are rounded so
    that they sum to K*. Each worker gets layers, or pieces of layers, in which it
    selects K*/w coordinates. All workers average their values at these coordinates and
    remove them from their residuals.

    Args:
      density: density of the update, in (0, 1]: `K* = max(1, floor(density n))`
        coordinates in all. Or a schedule, see `sparsejax.exdyna`.
      max_density: the largest density of a schedule.
      axis_name: see `sparsejax.sparsify`.
      value_bits: see `sparsejax.exchanges.union`.
      capacity: slots per worker; by default `ceil(K*/w)`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker.

    Departs from the paper: layers are dealt out in the order of the tree, by the number
    of coordinates to send and not by the cost of a top-k. Each piece has a threshold,
    found by a search. One small sum gives all norms to every worker, so no plan is
    broadcast.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.deft(density=0.01), optax.sgd(0.1))

    References:
      Yoon and Oh, "DEFT: Exploiting Gradient Norm Difference between Model Layers for
      Scalable Gradient Sparsification", ICPP 2023 (arXiv 2307.03500).
    """
    return sparsify(
        sparsifiers.layerwise(density, capacity=capacity, max_density=max_density),
        exchange=exchanges.union(value_bits),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
