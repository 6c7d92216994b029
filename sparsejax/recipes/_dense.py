"""The baseline: uncompressed data-parallel training."""

from __future__ import annotations

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def dense(
    *, axis_name: AxisName = "data", nonfinite: str = "drop"
) -> optax.GradientTransformationExtraArgs:
    """The mean of all gradients: `update = (1/w) sum_r g_r`, equal to `jax.lax.pmean`.

    Sums are computed and sent in float32, and in float64 if a leaf of the gradient is
    float64. Leaves of narrower dtypes get the rounded mean.

    Args:
      axis_name: see `sparsejax.sparsify`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, without a residual.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.dense(), optax.adam(1e-3))
    """
    return sparsify(
        sparsifiers.everything(),
        exchange=exchanges.dense(),
        memory=memories.none(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
