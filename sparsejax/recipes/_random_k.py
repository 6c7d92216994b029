"""Random-k: the same random coordinates on all workers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._checks import check_value_bits
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.sparsifiers._target import Target


def random_k(
    density: float | optax.Schedule = 0.01,
    *,
    max_density: float | None = None,
    seed: int = 0,
    unbiased: bool = False,
    axis_name: AxisName = "data",
    value_bits: Any = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """All workers deliver their values at the same k random coordinates.

    With `acc_r = residual_r + gradient_r` and `S` a uniform random set of
    `k = max(1, floor(density n))` coordinates, drawn in each step from `(seed, step)`,

        update = (1/w) sum_r acc_r[S],    residual_r = acc_r outside of S.

    No worker searches or sends indices. Each coordinate waits about 1/density steps,
    whatever its size, so learning rates that suit `dense` may be too high.

    Args:
      density: fraction of the coordinates to deliver, in (0, 1], or a schedule.
      max_density: the largest density of a schedule, see `sparsejax.exdyna`.
      seed: the seed of the draws.
      unbiased: keeps no residual and multiplies by n/k instead. The expected update is
        the mean gradient, with n/k times the variance. Not allowed with a schedule, or
        with values in fewer than 16 bits, whose rounding errors a residual has to keep.
      axis_name: see `sparsejax.sparsify`.
      value_bits: see `sparsejax.exchanges.union`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 residual [n] per worker unless `unbiased`.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.random_k(density=0.1), optax.sgd(0.01))

    References:
      Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """
    if unbiased and callable(density):
        raise ValueError(
            "unbiased: the factor n/k is fixed when the step is compiled, and cannot "
            "follow a density schedule. Leave one of the two out."
        )
    if unbiased and min(check_value_bits(value_bits)) < 16:
        raise ValueError(
            f"value_bits: got {value_bits} with `unbiased`, which keeps no residual "
            f"for the rounding errors of few bits, so that the mean update would be "
            f"too small. Use 16 or 32, or leave `unbiased` out."
        )
    tx = sparsify(
        sparsifiers.random_k(density, seed=seed, max_density=max_density),
        exchange=exchanges.union(value_bits),
        memory=memories.none() if unbiased else memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
    return optax.chain(tx, optax.stateless(_amplify(density))) if unbiased else tx


def _amplify(density):
    """Multiplies by n/k, after the mean: compilers fuse a product into a sum."""
    target = Target.of(density)

    def amplify(updates, params):
        del params
        n = sum(leaf.size for leaf in jax.tree.leaves(updates))
        factor = n / target.most(n) if n else 1.0
        return jax.tree.map(
            lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), updates
        )

    return amplify
