"""EF-signSGD: scaled signs with error feedback."""

from __future__ import annotations

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def ef_sign(
    *, axis_name: AxisName = "data", nonfinite: str = "drop"
) -> optax.GradientTransformationExtraArgs:
    """Each worker sends its signs times their mean magnitude, and keeps the error.

    With `u_r = g_r + residual_r` and `m_r` the mean of `|u_r|` over its coordinates,

        update = (1/w) sum_r m_r sign(u_r),    residual_r <- u_r - m_r sign(u_r)

    where sign(0) = +1. A worker receives one bit per coordinate from each other worker.

    Args:
      axis_name: see `sparsejax.sparsify`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker.

    Departs from the paper: the paper has one worker, and one magnitude per layer. Here
    each worker has one magnitude for the whole vector, rounded to eight bits; the
    residual keeps the rounding error.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.ef_sign(), optax.sgd(0.1))

    References:
      Karimireddy, Rebjock, Stich, Jaggi, "Error Feedback Fixes SignSGD and other
      Gradient Compression Schemes", ICML 2019 (arXiv 1901.09847).
    """
    return sparsify(
        sparsifiers.everything(),
        exchange=exchanges.packed_signs("mean"),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
