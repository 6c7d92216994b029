"""CLT-k: workers take turns, and the top-k of one worker serves all."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def cltk(
    density: float | optax.Schedule = 0.01,
    *,
    max_density: float | None = None,
    axis_name: AxisName = "data",
    value_bits: Any = None,
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Workers take turns to choose their top-k, and all deliver their values there.

    With `acc_r = residual_r + gradient_r` and `S` the `k = max(1, floor(density n))`
    largest of `|acc_l|` of worker `l = t mod w`,

        update = (1/w) sum_r acc_r[S],    residual_r = acc_r outside of S.

    So exactly k coordinates are delivered for any number of workers. The workers'
    residuals resemble each other, so the leader's choice mostly suits the others too.

    Args:
      density: fraction of the coordinates to deliver, in (0, 1], or a schedule.
      max_density: the largest density of a schedule, see `sparsejax.exdyna`.
      axis_name: see `sparsejax.sparsify`.
      value_bits: see `sparsejax.exchanges.union`.
      capacity: slots of the message; by default k.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker.

    Departs from the paper: has no low-pass filter, which the paper uses for training
    with large batches.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.cltk(density=0.01), optax.sgd(0.1))

    References:
      Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for
      Communication-Efficient Distributed Training", NeurIPS 2020 (arXiv 2104.11125).
    """
    return sparsify(
        sparsifiers.topk(density, capacity=capacity, max_density=max_density),
        exchange=exchanges.leader(value_bits),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
