"""Top-k sparsification with error feedback."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import memories, sparsifiers
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.parts import Exchange
from sparsejax.recipes._default_exchange import exchange_or_pairs


def topk(
    density: float | optax.Schedule = 0.01,
    *,
    max_density: float | None = None,
    axis_name: AxisName = "data",
    exchange: Exchange | None = None,
    value_bits: Any = None,
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker sends the largest magnitudes of its whole vector.

    With `acc_r = residual_r + gradient_r` and `S_r` the `k = max(1, floor(density n))`
    largest of `|acc_r|`,

        update = (1/w) sum_r acc_r[S_r],    residual_r = acc_r outside of S_r,

    with `pairs`. With `union` every worker also delivers its values at the others'
    coordinates, so workers send and receive more.

    Args:
      density: fraction of the coordinates that each worker sends, in (0, 1], or a
        schedule; the update has up to w times as many coordinates.
      max_density: the largest density of a schedule, see `sparsejax.exdyna`.
      axis_name: see `sparsejax.sparsify`.
      exchange: an exchange for overlapping choices; by default `exchanges.pairs()`.
      value_bits: see `sparsejax.exchanges.pairs`; other exchanges have their own.
      capacity: slots per worker; by default k.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.topk(density=0.01), optax.sgd(0.1))

    References:
      Aji and Heafield, "Sparse Communication for Distributed Gradient Descent",
      EMNLP 2017.
      Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """
    return sparsify(
        sparsifiers.topk(density, capacity=capacity, max_density=max_density),
        exchange=exchange_or_pairs(exchange, value_bits),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
