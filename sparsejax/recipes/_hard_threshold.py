"""Hard threshold: every coordinate above a fixed magnitude."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import memories, sparsifiers
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.parts import Exchange
from sparsejax.recipes._default_exchange import exchange_or_pairs


def hard_threshold(
    threshold: float | optax.Schedule,
    *,
    max_density: float = 0.01,
    axis_name: AxisName = "data",
    exchange: Exchange | None = None,
    value_bits: Any = None,
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker sends all values above a threshold that never changes.

    With `acc_r = residual_r + gradient_r`, worker r sends `acc_r` where
    `|acc_r| >= threshold`, and keeps the rest. The density depends on the gradients:
    see `report.demand`. Coordinates that do not fit the message wait.

    Args:
      threshold: in units of the accumulated gradient, at least 0. Or a schedule: a
        function from Int32[], the step, to Float[].
      max_density: the fraction of the coordinates that fit the message, in (0, 1].
      axis_name: see `sparsejax.sparsify`.
      exchange: see `sparsejax.topk`.
      value_bits: see `sparsejax.exchanges.pairs`.
      capacity: slots per worker; by default `max(1, floor(max_density n))`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker.

    Departs from the paper: Strom quantises every value to plus or minus the threshold.
    Here values are sent unquantised, as in Dutta et al.

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
            threshold, max_density=max_density, capacity=capacity
        ),
        exchange=exchange_or_pairs(exchange, value_bits),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
