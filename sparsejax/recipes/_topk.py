"""Top-k sparsification with error feedback."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import memories, sparsifiers
from sparsejax._checks import check_capacity, check_density_schedule
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
    value_dtype: Any = "float32",
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker sends the largest magnitudes of its whole vector.

    With `acc_r = residual_r + gradient_r` and `S_r` the `k = max(1, floor(density n))`
    largest of `|acc_r|`,

        update = (1/w) sum_r acc_r[S_r],    residual_r = acc_r outside of S_r,

    with `pairs`; with `union` every worker also delivers what it has at the others'
    coordinates, so that more arrives and more is sent.

    Args:
      density: fraction of the coordinates that each worker sends per step, in (0, 1];
        the update has up to w times as many, `report.density` says how many. Or an
        optax schedule of it: a function from the number of updates made.
      max_density: the largest density that a schedule reaches, in (0, 1]; with a
        schedule only, and necessary there, since it fixes the size of messages.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      exchange: `exchanges.pairs()` by default; any that delivers overlapping choices,
        such as `exchanges.union()` or `exchanges.hashed_owners()`.
      value_dtype: of values on the wire: float32, or bfloat16 for half the bytes.
      capacity: payload slots per worker; by default k.
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`.

    Returns:
      An optax transformation from local gradients (per worker) to averaged updates
      (replicated). Its state holds one float32 residual [n] per worker.

    Raises:
      TypeError: if `density` or `capacity` is not a number, or is traced.
      ValueError: if `density` is outside (0, 1], `capacity` below 1, `nonfinite` or
        `value_dtype` unknown, `max_density` missing or of no use, or if `exchange`
        cannot deliver overlapping choices.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.topk(density=0.01), optax.sgd(0.1))

    References:
      Aji and Heafield, "Sparse Communication for Distributed Gradient Descent",
      EMNLP 2017.
      Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """
    density, most = check_density_schedule(density, max_density)
    return sparsify(
        sparsifiers.topk(density, capacity=check_capacity(capacity), max_density=most),
        exchange=exchange_or_pairs(exchange, value_dtype),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
