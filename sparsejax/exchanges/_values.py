"""What exchanges share: averaging values on the wire, and sets of coordinates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax._layout import Layout
from sparsejax._workers import Workers, vary_like
from sparsejax._xla import insert, late_zeros
from sparsejax.vectors._rounding import round_to

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def average(
    values: Float[Array, " m"], workers: Workers, dtype: jnp.dtype
) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    """The mean over workers, with values of `dtype` on the wire, summed in float32.

    Two narrow values travel where an all-reduce would take two wide ones: each worker
    sends to every other one the share that the other owns, sums its own, and the means
    are gathered. Integers are what is sent: compilers widen narrow floats, and move
    casts across collectives.

    Args:
      values: Float32[m], per worker.
      workers: the axis.
      dtype: float32, or bfloat16.

    Returns:
      mean: Float32[m], replicated.
      error: Float32[m], per worker. The mean of the workers' errors is how far `mean`
        is from the exact one: what rounding takes from a worker's value stays with the
        worker, and what it takes from a mean stays with the one who formed it, w times.
    """
    if dtype == jnp.float32:
        mean = workers.mean(values)
        # Zeros, and formed all the same: so the residual is not overwritten in place
        # before this worker's values were read.
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
    workers: Workers,
    layout: Layout,
    value_dtype: jnp.dtype,
) -> tuple[Float[Array, " n"], Float[Array, " m"]]:
    """Every worker's values at `indices`, averaged.

    Args:
      vector: Float[n], per worker.
      indices: Int32[m], replicated and distinct; empty slots hold `n`.
      workers, layout: as everywhere.
      value_dtype: of the values on the wire.

    Returns:
      update: Float[n], replicated.
      left: Float[m], per worker: what stays at `indices`.
    """
    own = vector.at[indices].get(mode="fill", fill_value=0)
    mean, error = average(own, workers, value_dtype)
    rounded = layout.round(indices, mean)
    # Each coordinate was summed before, so that the order of a scatter cannot make
    # replicas drift apart.
    zeros = late_zeros(vector.shape[0], jnp.min(indices, initial=0))
    update = insert(zeros, indices, rounded)
    return update, workers.localize(mean - rounded) + error


def distinct(indices: Int[Array, "w k"], n: int) -> Int[Array, "w k"]:
    """`indices`, with all but the first mention of each coordinate emptied. Replicated.

    Takes n bytes for marks; no worker's own indices repeat.
    """

    def visit(r, carry):
        seen, kept = carry
        row = indices[r]
        known = seen.at[row].get(mode="fill", fill_value=True)
        # All are read before the first is written: so the marks are not copied.
        known, seen = jax.lax.optimization_barrier((known, seen))
        kept = kept.at[r].set(jnp.where(known, n, row))
        return seen.at[row].set(True, mode="drop"), kept

    start = (jnp.zeros((n,), jnp.bool_), jnp.zeros_like(indices))
    return jax.lax.fori_loop(0, len(indices), visit, vary_like(start, indices))[1]
