"""Averages over the workers, of whole vectors and of values at some coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla
from sparsejax._workers import Workers
from sparsejax.parts import Step
from sparsejax.vectors._rounding import round_to

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def average(
    values: Float[Array, " m"], workers: Workers, dtype: np.dtype
) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    """The mean over workers, with values of `dtype` on the wire, summed in float32.

    An all-reduce sends each value twice in float32; for bfloat16 this function sends
    each value twice in bfloat16. Each worker sends a share of its values to every other
    worker and averages the received shares; an all-gather collects the means. The wire
    carries integers, since compilers widen narrow floats and move casts across
    collectives.

    Args:
      values: Float32[m], per worker.
      workers: the workers' axis.
      dtype: float32 or bfloat16.

    Returns:
      mean: Float32[m], replicated.
      error: Float32[m], per worker. The mean of the workers' errors is the exact mean
        minus `mean`: a worker keeps the rounding error of its own values, and w times
        the rounding error of the means that it computed.
    """
    if dtype == jnp.float32:
        mean = workers.mean(values)
        # `mean - mean` is 0, but makes the residual depend on the mean: the residual is
        # not overwritten before this worker's values are read.
        return mean, workers.localize(mean - mean)
    (m,), count = values.shape, workers.count()
    if not m:
        return workers.mean(values), values
    rows = jnp.pad(values, (0, -m % count)).reshape(count, -1)
    rounded = round_to(rows, dtype)
    words = jax.lax.bitcast_convert_type(rounded.astype(dtype), jnp.uint16)
    received = workers.all_to_all(words)
    received = jax.lax.bitcast_convert_type(received, dtype).astype(jnp.float32)
    exact = jnp.sum(received, axis=0) / count
    share = round_to(exact, dtype)
    words = jax.lax.bitcast_convert_type(share.astype(dtype), jnp.uint16)
    means = jax.lax.bitcast_convert_type(workers.gather(words), dtype)
    error = (rows - rounded).at[workers.index()].add(count * (exact - share))
    return means.astype(jnp.float32).reshape(-1)[:m], error.reshape(-1)[:m]


def deliver_at(
    vector: Float[Array, " n"],
    indices: Int[Array, " m"],
    step: Step,
    value_dtype: np.dtype,
) -> tuple[Float[Array, " n"], Float[Array, " m"]]:
    """Averages every worker's values at `indices`.

    Args:
      vector: Float[n], per worker.
      indices: Int32[m], replicated and distinct; empty slots hold `n`.
      step: the step.
      value_dtype: the dtype of values on the wire.

    Returns:
      update: Float[n], replicated.
      left: Float[m], per worker: the rounding errors, which stay at `indices`.
    """
    workers, layout = step.workers, step.layout
    own = vector.at[indices].get(mode="fill", fill_value=0)
    mean, error = average(own, workers, value_dtype)
    rounded = layout.round(indices, mean)
    # Indices are distinct, so the order of the scatter cannot make replicas drift
    # apart.
    zeros = _xla.late_zeros(vector.shape[0], jnp.min(indices, initial=0))
    update = _xla.insert(zeros, indices, rounded)
    return update, workers.localize(mean - rounded) + error
