"""Averages over the workers, of whole vectors and of values at some coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax.parts import Step
from sparsejax.vectors import _codec
from sparsejax.vectors._narrow import in_slots, value_code
from sparsejax.vectors._ratio import ratio, shares

if TYPE_CHECKING:
    from jaxtyping import Array, BFloat16, Bool, Float, Int


# Bits of a value sent to the worker that averages, and of a mean sent back.
Widths = tuple[int, int]
FULL: Widths = (32, 32)

# A shorter list does not report its rounding error: two bytes would be a large part.
_TELLING = 64


def relative_error(
    values: Float[Array, "*shape"], received: Float[Array, "*shape"]
) -> BFloat16[Array, ""]:
    """The sum of `|values - received|` over the sum of `|values|`."""
    largest = jnp.max(jnp.abs(values), initial=0)  # sums of magnitudes may overflow
    lost, whole = (
        jnp.sum(shares(jnp.abs(x), largest)) for x in (values - received, values)
    )
    return ratio(lost, whole).astype(jnp.bfloat16)


def told_errors(
    values: Float[Array, "*shape"], received: Float[Array, "*shape"], slots: int
) -> tuple[BFloat16[Array, ""], ...]:
    """The `relative_error`, for a message; empty if the list has few `slots`."""
    return (relative_error(values, received),) if slots >= _TELLING else ()


def mean_error(gathered: Sequence[BFloat16[Array, " w"]]) -> Float[Array, ""]:
    """The mean of all workers' `told_errors`; 0 if they are empty."""
    return sum(
        (jnp.mean(x.astype(jnp.float32)) for x in gathered), jnp.zeros((), jnp.float32)
    )


def average(
    values: Float[Array, " m"],
    step: Step,
    widths: Widths,
    indices: Int[Array, " m"] | None = None,
) -> tuple[Float[Array, " m"], Float[Array, " m"], Float[Array, ""]]:
    """The mean over workers, with values of few bits on the wire, summed in float32.

    An all-reduce sends each value twice in float32; this function sends each value
    twice in fewer bits. Each worker sends a share of its values to every other
    worker and averages the received shares; an all-gather collects the means. The wire
    carries integers, since compilers widen narrow floats and move casts across
    collectives. Where padding and scales would make that more bytes, such as for short
    lists of many workers, an all-reduce carries the values.

    Args:
      values: Float32[m], per worker.
      step: the step.
      widths: see `Widths`.
      indices: Int32[m], replicated: the values' coordinates, by default all.

    Returns:
      mean: Float32[m], replicated.
      error: Float32[m], per worker. The mean of the workers' errors is the exact mean
        minus `mean`: a worker keeps the rounding error of its own values, and w times
        the rounding error of the means that it computed.
      rounding: Float[], replicated: the `relative_error` of a sample of a worker's
        values plus the `relative_error` of its means, as a mean over workers.
    """
    (m,), count, workers = values.shape, step.w, step.workers
    slots, leaf_count = _share(m, step, widths), step.layout.leaf_count
    there, back = (value_code(bits, slots, leaf_count) for bits in widths)
    # In 16-bit words: a message to and from each worker, and each worker's error.
    words = count * (there.size + back.size + (m >= _TELLING))
    if widths == FULL or words >= 4 * m:
        mean = workers.mean(values)
        # `mean - mean` is 0, but makes the residual depend on the mean: the residual is
        # not overwritten before this worker's values are read.
        return mean, workers.localize(mean - mean), jnp.zeros((), jnp.float32)
    once, share = _xla.computed_once, step.rank

    def split(vector):
        return jnp.pad(vector, (0, count * slots - m)).reshape(count, slots)

    def mine(rows):
        return rows[share]

    def sample(rows):
        """Every w-th slot of each row, but at least one slot.

        Slots that this worker chose itself would be a biased sample: their values are
        larger. The sample is spread over the row, whose last slots may be empty.
        """
        apart = min(count, slots)
        rows = rows[:, : slots // apart * apart].reshape(count, -1, apart)
        return jax.lax.dynamic_index_in_dim(rows, share % apart, 2, keepdims=False)

    def filled(values, view):
        """Decoded values of the rows that `view` selects, 0 in empty slots."""
        if inside is None:
            return values
        return in_slots(values, view(inside), min(widths))

    inside = None if indices is None else split(indices) < step.n
    rows = once(split(values))
    leaves = jax.tree.map(split, step.layout.leaf_turns(indices))
    own = jax.tree.map(mine, leaves)
    words = jax.vmap(there.encode)(rows, leaves)
    rounded = once(jax.vmap(there.decode)(words, leaves))
    decode = jax.vmap(there.decode, in_axes=(0, None))
    received = decode(workers.all_to_all(words), own)
    exact = once(filled(jnp.sum(received, axis=0) / count, mine))
    words = back.encode(exact, own)
    returned = once(filled(back.decode(words, own), mine))
    errors = told_errors(sample(rows), filled(sample(rounded), sample), m)
    of_means = relative_error(exact, returned)
    if inside is not None:
        of_means = _among_filled(of_means, inside)
    errors = [error + of_means for error in errors]
    message = (words, *errors)
    gathered, *errors = _codec.unpack(workers.gather(_codec.pack(message)), message)
    means = once(jax.vmap(back.decode)(gathered, leaves))
    error = (rows - rounded).at[share].add(count * (exact - returned))
    return means.reshape(-1)[:m], error.reshape(-1)[:m], mean_error(errors)


def _among_filled(
    error: BFloat16[Array, ""], filled: Bool[Array, "w s"]
) -> BFloat16[Array, ""]:
    """Scales `error`, so that the mean over workers is the mean over filled shares."""
    number = jnp.sum(jnp.any(filled, axis=1), dtype=jnp.int32)
    part = jnp.maximum(number, 1) / len(filled)
    return error / part.astype(error.dtype)


def _share(m: int, step: Step, widths: Widths) -> int:
    """Static: the slots of a worker's share of `m` values, which fill whole blocks."""
    return value_code(widths[0], -(-m // step.w), step.layout.leaf_count).full


def fill_shares(
    indices: Int[Array, " m"], step: Step, widths: Widths
) -> Int[Array, " c"]:
    """`indices` with empty slots at the end, so that `average` need not pad values."""
    (m,), share = indices.shape, _share(indices.size, step, widths)
    if share == -(-m // step.w):  # Short lists, or codes without blocks.
        return indices
    return jnp.pad(indices, (0, step.w * share - m), constant_values=step.n)


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
      widths: see `Widths`.

    Returns:
      update: Float[n], replicated.
      left: Float[m], per worker: the rounding errors, which stay at `indices`.
      rounding: Float[], replicated: see `average`.
    """
    own = _xla.values_at(vector, indices)
    mean, error, rounding = average(own, step, widths, indices)
    update, rest = placed(mean, indices, step)
    return update, step.workers.localize(rest) + error, rounding


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
    sent = jnp.sum(indices < step.n, dtype=jnp.int32)  # as in the report: one kernel
    zeros = _xla.late_zeros(step.n, sent)
    return _xla.insert(zeros, indices, rounded), mean - rounded
