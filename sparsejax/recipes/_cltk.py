"""CLT-k: top-k of one worker after another, for all."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._checks import check_capacity, check_density_schedule
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def cltk(
    density: float | optax.Schedule = 0.01,
    *,
    max_density: float | None = None,
    axis_name: AxisName = "data",
    value_dtype: Any = "float32",
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """One worker, in turn, chooses its top-k, and all deliver their values there.

    With `acc_r = residual_r + gradient_r` and `S` the `k = max(1, floor(density n))`
    largest of `|acc_l|` of worker `l = t mod w`,

        update = (1/w) sum_r acc_r[S],    residual_r = acc_r outside of S.

    So exactly k coordinates are delivered whatever the number of workers, at the price
    that nobody but the leader has a say; residuals of workers resemble each other, so
    that the leader's choice mostly suits the others too.

    Args:
      density: fraction of the coordinates to deliver per step, in (0, 1]. Or an
        optax schedule of it: a function from the number of updates made.
      max_density: the largest density that a schedule reaches, in (0, 1]; with a
        schedule only, and necessary there, since it fixes the size of messages.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      value_dtype: of values on the wire: float32, or bfloat16 for half the bytes.
      capacity: payload slots; by default k.
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`.

    Returns:
      An optax transformation from local gradients (per worker) to averaged updates
      (replicated). Its state holds one float32 residual [n] per worker.

    Raises:
      TypeError: if `density` or `capacity` is not a number, or is traced.
      ValueError: if `density` is outside (0, 1], `capacity` below 1, `nonfinite` or
        `value_dtype` unknown, or `max_density` missing or of no use.

    Departs from the paper: without the low-pass filter, which multiplies what enters
    the residual by a factor below 1 in training with large batches.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.cltk(density=0.01), optax.sgd(0.1))

    References:
      Chen et al., "ScaleCom: Scalable Sparsified Gradient Compression for
      Communication-Efficient Distributed Training", NeurIPS 2020 (arXiv 2104.11125).
    """
    density, most = check_density_schedule(density, max_density)
    return sparsify(
        sparsifiers.topk(density, capacity=check_capacity(capacity), max_density=most),
        exchange=exchanges.leader(value_dtype),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
