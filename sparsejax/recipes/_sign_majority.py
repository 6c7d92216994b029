"""signSGD with majority vote."""

from __future__ import annotations

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._checks import check_scale
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def sign_majority(
    scale: float | None = 1.0,
    *,
    axis_name: AxisName = "data",
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Every coordinate moves by `scale` in the direction of most workers' signs.

    `update = scale sign(sum_r sign(g_r))`, and 0 where the votes are equal. Nothing is
    kept: where the signs are wrong on average, so is the update.

    A worker whose gradient is 0 votes +1 and -1 in turn, and its neighbours in opposite
    order: with an even number of workers, coordinates that are 0 on all of them stay
    where they are.

    Args:
      scale: how far a vote moves a coordinate. None: the root mean square of the
        workers' gradients over about ten steps, so that the learning rate of
        uncompressed training fits.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`. A dropped
        worker's gradient counts as 0.

    Returns:
      An optax transformation from local gradients (per worker) to updates (replicated),
      without a residual. Signs are sent as packed bits, gathered or summed in bit
      fields, whatever is less (see `sparsejax.exchanges.packed_signs`).

    Raises:
      TypeError: if `scale` is no number.
      ValueError: if `scale` is not positive, or `nonfinite` unknown.

    Example:
      The published step is small, as every coordinate moves by all of it:

      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.sign_majority(), optax.sgd(1e-4))

      Signum votes with the signs of local momentum:

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
        exchange=exchanges.packed_signs("majority", scale=check_scale(scale)),
        memory=memories.none(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
