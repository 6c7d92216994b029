"""DEFT: exclusive selection, more of it in layers with larger gradients."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._checks import check_capacity, check_density
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def deft(
    density: float = 0.01,
    *,
    axis_name: AxisName = "data",
    value_dtype: Any = "float32",
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker selects in layers of its own, more where gradients are large.

    With `acc_r = residual_r + gradient_r`, layer l is to deliver

        k_l = K* ||acc[l]|| / sum_m ||acc[m]||    (at most its size)

    coordinates, with the norm averaged over workers, rounded so that they sum to K*.
    Layers, or pieces of them, are
    dealt to the workers so that each selects K*/w coordinates; all workers' values
    there are summed and divided by w, and leave their residuals. So the union of the
    choices is their sum, K*, whatever the number of workers.

    Args:
      density: fraction of all coordinates to deliver per step, in (0, 1]: K* =
        max(1, floor(density n)) in all, whatever the number of workers.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      value_dtype: of values on the wire: float32, or bfloat16 for half the bytes.
      capacity: payload slots per worker; by default ceil(K*/w).
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`.

    Returns:
      An optax transformation from local gradients (per worker) to averaged updates
      (replicated). Its state holds one float32 residual [n] per worker.

    Raises:
      TypeError: if `density` or `capacity` is not a number, or is traced.
      ValueError: if `density` is outside (0, 1], `capacity` below 1, or `nonfinite` or
        `value_dtype` unknown.

    Departs from the paper: layers are dealt out by what is sent and not by the cost of
    a top-k, in the order of the tree, so that messages of one size hold it; a
    threshold is searched for each piece, and nothing is sorted. Every worker knows
    everyone's norms from one small sum, where the paper broadcasts one worker's plan.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.deft(density=0.01), optax.sgd(0.1))

    References:
      Yoon and Oh, "DEFT: Exploiting Gradient Norm Difference between Model Layers for
      Scalable Gradient Sparsification", ICPP 2023 (arXiv 2307.03500).
    """
    return sparsify(
        sparsifiers.layerwise(
            check_density(density), capacity=check_capacity(capacity)
        ),
        exchange=exchanges.union(value_dtype),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
