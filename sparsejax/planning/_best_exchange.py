"""`best_exchange`: the exchange with the fewest bytes for an exact sparse sum."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._checks import check_count, check_densification, check_density
from sparsejax._transform import sparsify
from sparsejax.parts import Exchange
from sparsejax.planning._arguments import refuse_arrays
from sparsejax.planning._wire_bytes import wire_bytes


class Choice(NamedTuple):
    """The exchange that `best_exchange` found.

    Attributes:
      name: the name of the exchange with the fewest bytes.
      exchange: that exchange, ready for `sparsify`.
      bytes: the bytes that a worker receives in a step in which everything fits, by
        the name of the exchange.
    """

    name: str
    exchange: Exchange
    bytes: dict[str, float]


def best_exchange(
    density: float,
    densification: float | None,
    workers: int,
    *,
    n: int,
    row_size: int = 1,
) -> Choice:
    """The exchange with the fewest bytes for gradients of a given sparsity.

    Traces every exchange of this library at the static sizes that follow from the
    arguments, padding included, and counts the bytes of the messages. `pairs` takes
    part only without rows. If a step has more non-zeros than `density`, `pairs` needs a
    memory, and the other exchanges average densely.

    Args:
      density: the largest fraction of non-zeros, coordinates or rows, in one worker's
        gradient, in (0, 1].
      densification: the density of the sum over the density of one gradient, from 1
        (same support on all workers) to w (no overlap); None for independent supports.
        See `sparsejax.characteristics`.
      workers: the number of workers.
      n: the number of coordinates of the gradient.
      row_size: the number of coordinates of a row, of which all or none are zero; 1
        without rows.

    Returns:
      The choice, and the bytes of all exchanges.

    Raises:
      TypeError: if an argument is not a Python or numpy number.
      ValueError: if `density` is outside (0, 1], `densification` outside [1, w], a
        count below 1, or `n` not a multiple of `row_size`.

    Example:
      >>> import sparsejax
      >>> few = sparsejax.best_exchange(0.05, None, 16, n=2**20)
      >>> many = sparsejax.best_exchange(0.7, None, 16, n=2**20)
      >>> few.name, many.name
      ('hashed_owners', 'dense')
    """
    refuse_arrays(
        density=density,
        densification=densification,
        workers=workers,
        n=n,
        row_size=row_size,
    )
    density = check_density(density)
    workers, n = check_count("workers", workers), check_count("n", n)
    check_densification(densification, workers)
    if n % check_count("row_size", row_size):
        raise ValueError(
            f"n: got {n}, expected a multiple of row_size, here {row_size}."
        )
    shape = (n // row_size, row_size) if row_size > 1 else (n,)
    candidates = {
        "dense": exchanges.dense(),
        "hashed_owners": exchanges.hashed_owners(densification=densification),
        "recursive_doubling": exchanges.recursive_doubling(densification=densification),
    }
    if row_size == 1:
        candidates["pairs"] = exchanges.pairs()
    received = {
        name: _usual_bytes(exchange, density, shape, workers)
        for name, exchange in candidates.items()
    }
    best = min(received, key=lambda name: received[name])
    return Choice(best, candidates[best], received)


def _usual_bytes(exchange, density, shape, workers) -> float:
    tx = sparsify(
        sparsifiers.nonzero(density), exchange=exchange, memory=memories.none()
    )
    gradient = jax.ShapeDtypeStruct(shape, jnp.float32)
    # The cheapest branch is a step in which everything fits.
    return wire_bytes(tx, gradient, workers=workers).least
