"""SparseLoCo's exchange: chunked top-k of few bits, with a residual that decays."""

from __future__ import annotations

from typing import Any

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._checks import check_count, check_density
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.sparsifiers._target import target_count


def sparseloco(
    density: float = 64 / 4096,
    *,
    chunk: int = 4096,
    beta: float = 0.95,
    value_bits: Any = 2,
    axis_name: AxisName = "data",
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """The outer exchange of SparseLoCo, for `sparsejax.rounds`.

    With `delta_r` the sum of worker r's local updates, and `S_r` the
    `k = max(1, floor(density c))` largest magnitudes in each chunk of `c` coordinates,

        acc_r = beta residual_r + delta_r
        q_r = round(acc_r[S_r]),  in `value_bits` bits
        update = (1/w) sum_r q_r,    residual_r = acc_r - q_r

    After it, `optax.sgd(alpha)` without momentum moves the shared parameters. The decay
    forgets stale directions on purpose, so gradient mass is not conserved.

    Args:
      density: fraction of the coordinates that each worker sends, in (0, 1]; the
        paper's 64 of each 4096.
      chunk: the number of coordinates of a chunk.
      beta: the decay of the residual in a round, in (0, 1].
      value_bits: bits of a value on the wire: 32, 16, 8, 4, 2 or 1.
      axis_name: see `sparsejax.sparsify`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker.

    Raises:
      ValueError: for a `density`, `beta` or `value_bits` out of range.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch @ params) ** 2)
      >>> outer = optax.chain(sparsejax.sparseloco(), optax.sgd(1.0))
      >>> training = sparsejax.rounds(loss_fn, optax.adamw(1e-3), outer, steps=30)

    References:
      Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo",
      arXiv:2508.15706, 2025. Departs from the paper: its values are quantised by blocks
      of other codes, and its indices take 12 bits each.
    """
    density, chunk = check_density(density), check_count("chunk", chunk)
    return sparsify(
        sparsifiers.chunked_topk(chunk, target_count(density, chunk)),
        exchange=exchanges.pairs(value_bits),
        memory=memories.decayed(beta),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
