"""Top-k of each chunk of the vector, with error feedback."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import memories, sparsifiers
from sparsejax._checks import check_count, check_density
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.parts import Exchange
from sparsejax.recipes._default_exchange import exchange_or_pairs
from sparsejax.sparsifiers._target import target_count


def chunked_topk(
    density: float = 0.01,
    *,
    chunk: int = 4096,
    axis_name: AxisName = "data",
    exchange: Exchange | None = None,
    value_bits: Any = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker sends the largest magnitudes of each chunk of its vector.

    With `acc_r = residual_r + gradient_r` and `S_r` the `k = max(1, floor(density c))`
    largest of `|acc_r|` in each chunk of `c` consecutive coordinates,

        update = (1/w) sum_r acc_r[S_r],    residual_r = acc_r outside of S_r,

    with `pairs`. There is no threshold and no search: one call selects everything. Each
    chunk sends the same share, so the sum of the sent magnitudes is smaller than that
    of `topk` where magnitudes differ along the vector.

    Args:
      density: fraction of the coordinates that each worker sends, in (0, 1], rounded
        down to a whole number for each chunk, at least 1.
      chunk: the number of coordinates of a chunk.
      axis_name: see `sparsejax.sparsify`.
      exchange: an exchange for overlapping choices; by default `exchanges.pairs()`.
      value_bits: see `sparsejax.exchanges.pairs`; other exchanges have their own.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.chunked_topk(density=0.01), optax.sgd(0.1))

    References:
      Aji and Heafield, "Sparse Communication for Distributed Gradient Descent",
      EMNLP 2017. Departs from the paper: the largest of each chunk, not of the vector.
    """
    density, chunk = check_density(density), check_count("chunk", chunk)
    return sparsify(
        sparsifiers.chunked_topk(chunk, target_count(density, chunk)),
        exchange=exchange_or_pairs(exchange, value_bits),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
