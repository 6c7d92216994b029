"""signSGD with majority vote."""

from __future__ import annotations

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def sign_majority(
    scale: float | None = 1.0,
    *,
    axis_name: AxisName = "data",
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Every coordinate moves by `scale` in the direction of most workers' signs.

    `update = scale sign(sum_r sign(g_r))`, and 0 if the votes are equal. There is no
    residual: if most signs are wrong, the update is wrong too.

    Args:
      scale: the distance by which a vote moves a coordinate; None for the root mean
        square of the workers' gradients over about ten steps, so that learning rates
        of `dense` fit.
      axis_name: see `sparsejax.sparsify`.
      nonfinite: see `sparsejax.sparsify`. A dropped worker's gradient counts as 0.

    Returns:
      An optax transformation, without a residual.

    Example:
      The published step is small, since every coordinate moves by the whole step:

      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.sign_majority(), optax.sgd(1e-4))

      Signum: workers vote with the signs of local momentum:

      >>> tx = optax.chain(
      ...     sparsejax.per_worker(optax.ema(0.9, debias=False)),
      ...     sparsejax.sign_majority(),
      ...     optax.sgd(1e-4),
      ... )

    References:
      Bernstein, Wang, Azizzadenesheli, Anandkumar, "signSGD: Compressed Optimisation
      for Non-Convex Problems", ICML 2018 (arXiv 1802.04434).
    """
    return sparsify(
        sparsifiers.everything(),
        exchange=exchanges.packed_signs("majority", scale=scale),
        memory=memories.none(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
