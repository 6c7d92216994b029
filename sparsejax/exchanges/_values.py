"""Averages over the workers, of whole vectors and of values at some coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._workers import Workers
from sparsejax.parts import Step
from sparsejax.vectors import _codec
from sparsejax.vectors._narrow import value_code
from sparsejax.vectors._ratio import ratio

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Float, Int


# Bits of a value on its way to the worker that averages, and of a mean on its way back.
Widths = tuple[int, int]
FULL: Widths = (32, 32)

# A shorter list does not tell its rounding error: two bytes are much of its message.
_TELLING = 64


def relative_error(
    values: Float[Array, "*shape"], received: Float[Array, "*shape"]
) -> BFloat16[Array, ""]:
    """The sum of the rounding errors' magnitudes, over that of the values."""
    largest = jnp.max(jnp.abs(values), initial=0)  # whose sum may overflow
    lost, whole = (
        jnp.sum(ratio(jnp.abs(x), largest)) for x in (values - received, values)
    )
    return ratio(lost, whole).astype(jnp.bfloat16)


def told_errors(
    values: Float[Array, "*shape"], received: Float[Array, "*shape"]
) -> tuple[BFloat16[Array, ""], ...]:
    """The `relative_error` for a message; empty if the list is short."""
    return (relative_error(values, received),) if values.size >= _TELLING else ()


def mean_error(gathered: Sequence[BFloat16[Array, " w"]]) -> Float[Array, ""]:
    """The mean of all workers' `told_errors`; 0 if they are empty."""
    return sum((jnp.mean(x.astype(jnp.float32)) for x in gathered), jnp.zeros(()))


def average(
    values: Float[Array, " m"], workers: Workers, widths: Widths
) -> tuple[Float[Array, " m"], Float[Array, " m"], Float[Array, ""]]:
    """The mean over workers, with values of few bits on the wire, summed in float32.

    An all-reduce sends each value twice in float32; with fewer bits this function sends
    each value twice in them. Each worker sends a share of its values to every other
    worker and averages the received shares; an all-gather collects the means. The wire
    carries integers, since compilers widen narrow floats and move casts across
    collectives.

    Args:
      values: Float32[m], per worker.
      workers: the workers' axis.
      widths: bits of a value there and back.

    Returns:
      mean: Float32[m], replicated.
      error: Float32[m], per worker. The mean of the workers' errors is the exact mean
        minus `mean`: a worker keeps the rounding error of its own values, and w times
        the rounding error of the means that it computed.
      rounding: Float[], replicated: the mean over workers of `relative_error`, of the
        values on both ways.
    """
    exactly = jnp.zeros((), jnp.float32)
    if widths == FULL:
        mean = workers.mean(values)
        # `mean - mean` is 0, but makes the residual depend on the mean: the residual is
        # not overwritten before this worker's values are read.
        return mean, workers.localize(mean - mean), exactly
    (m,), count = values.shape, workers.count()
    if not m:
        return workers.mean(values), values, exactly
    once = _xla.computed_once
    rows = once(jnp.pad(values, (0, -m % count)).reshape(count, -1))
    there, back = (value_code(bits, rows.shape[1]) for bits in widths)
    words = jax.vmap(there.encode)(rows)
    rounded = once(jax.vmap(there.decode)(words))
    received = jax.vmap(there.decode)(workers.all_to_all(words))
    exact = once(jnp.sum(received, axis=0) / count)
    words = back.encode(exact)
    returned = once(back.decode(words))
    errors = told_errors(rows, rounded)
    errors = [there + relative_error(exact, returned) for there in errors]
    message = (words, *errors)
    gathered, *errors = _codec.unpack(workers.gather(_codec.pack(message)), message)
    means = once(jax.vmap(back.decode)(gathered))
    error = (rows - rounded).at[workers.index()].add(count * (exact - returned))
    return means.reshape(-1)[:m], error.reshape(-1)[:m], mean_error(errors)


def deliver_at(
    vector: Float[Array, " n"],
    indices: Int[Array, " m"],
    step: Step,
    widths: Widths,
) -> tuple[Float[Array, " n"], Float[Array, " m"], Float[Array, ""]]:
    """Averages every worker's values at `indices`.

    Args:
      vector: Float[n], per worker.
      indices: Int32[m], replicated and distinct; empty slots hold `n`.
      step: the step.
      widths: bits of a value there and back.

    Returns:
      update: Float[n], replicated.
      left: Float[m], per worker: the rounding errors, which stay at `indices`.
      rounding: Float[], replicated: see `average`.
    """
    workers = step.workers
    own = _xla.values_at(vector, indices)
    mean, error, rounding = average(own, workers, widths)
    update, rest = placed(mean, indices, step)
    return update, workers.localize(rest) + error, rounding


def placed(
    mean: Float[Array, " m"], indices: Int[Array, " m"], step: Step
) -> tuple[Float[Array, " n"], Float[Array, " m"]]:
    """The update: `mean` at distinct `indices`, in the gradient's dtypes, else zeros.

    Returns:
      update: Float[n], replicated.
      rest: Float[m], replicated: `mean` minus its rounding in the update.
    """
    rounded = step.layout.round(indices, mean)
    # Indices are distinct, so the order of the scatter cannot make replicas drift
    # apart.
    sent = jnp.sum(indices < step.n, dtype=jnp.int32)  # that of the report: one kernel
    zeros = _xla.late_zeros(step.n, sent)
    return _xla.insert(zeros, indices, rounded), mean - rounded
