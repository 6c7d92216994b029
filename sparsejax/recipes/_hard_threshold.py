"""Hard threshold: what is large enough, however much that is."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import memories, sparsifiers
from sparsejax._checks import check_capacity, check_density, check_threshold
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.parts import Exchange
from sparsejax.recipes._default_exchange import exchange_or_pairs


def hard_threshold(
    threshold: float,
    *,
    density: float = 0.01,
    axis_name: AxisName = "data",
    exchange: Exchange | None = None,
    value_dtype: Any = "float32",
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker sends what exceeds a threshold that never changes.

    With `acc_r = residual_r + gradient_r`, worker r sends `acc_r` where
    `|acc_r| >= threshold`, and keeps the rest. No density is aimed at: how much
    qualifies follows the gradients, and `report.demand` says it. Messages have a fixed
    size, so that this recipe asks for the largest; what does not fit waits.

    Args:
      threshold: in units of the accumulated gradient, at least 0.
      density: size of the message, as a fraction of the coordinates, in (0, 1].
      axis_name: the mesh axis of the workers, or a tuple of axes.
      exchange: `exchanges.pairs()` by default, or another as in `topk`.
      value_dtype: of values on the wire: float32, or bfloat16 for half the bytes.
      capacity: payload slots per worker; by default max(1, floor(density n)).
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`.

    Returns:
      An optax transformation from local gradients (per worker) to averaged updates
      (replicated). Its state holds one float32 residual [n] per worker.

    Raises:
      TypeError: if a number is none, or is traced.
      ValueError: if `threshold` is negative or not finite, `density` outside (0, 1],
        `capacity` below 1, `nonfinite` or `value_dtype` unknown, or if `exchange`
        cannot deliver overlapping choices.

    Departs from the paper: Strom's quantises every value to plus or minus the
    threshold; here values are sent as they are, as Dutta et al. do.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.hard_threshold(1e-3), optax.sgd(0.1))

    References:
      Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing",
      Interspeech 2015.
      Dutta et al., "On the Discrepancy between the Theoretical Analysis and Practical
      Implementations of Compressed Communication for Distributed Deep Learning",
      AAAI 2020.
    """
    return sparsify(
        sparsifiers.hard_threshold(
            check_threshold(threshold),
            density=check_density(density),
            capacity=check_capacity(capacity),
        ),
        exchange=exchange_or_pairs(exchange, value_dtype),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
