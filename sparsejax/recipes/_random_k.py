"""Random-k: the same random coordinates on all workers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._checks import check_density_schedule, check_seed
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName
from sparsejax.sparsifiers._target import target_count


def random_k(
    density: float | optax.Schedule = 0.01,
    *,
    max_density: float | None = None,
    seed: int = 0,
    unbiased: bool = False,
    axis_name: AxisName = "data",
    value_dtype: Any = "float32",
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """All workers deliver their values at the same k coordinates, drawn at random.

    With `acc_r = residual_r + gradient_r` and `S` a set of `k = max(1, floor(density
    n))` coordinates, uniform and drawn anew in each step from `(seed, step)`,

        update = (1/w) sum_r acc_r[S],    residual_r = acc_r outside of S.

    No index is sent, and nothing is searched. Each coordinate waits about 1/density
    steps, whatever its size: learning rates that suit `dense` may be too high.

    Args:
      density: fraction of the coordinates to deliver per step, in (0, 1]. Or an
        optax schedule of it: a function from the number of updates made.
      max_density: the largest density that a schedule reaches, in (0, 1]; with a
        schedule only, and necessary there, since it fixes the size of messages.
      seed: of the draws.
      unbiased: keep no residual and multiply by n/k instead, so that the expected
        update is the mean gradient; its variance is n/k times higher.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      value_dtype: of values on the wire: float32, or bfloat16 for half the bytes.
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`.

    Returns:
      An optax transformation from local gradients (per worker) to averaged updates
      (replicated). Its state holds one float32 residual [n] per worker, or none if
      `unbiased`.

    Raises:
      TypeError: if `density` is not a number, or is traced, or if `seed` is no int.
      ValueError: if `density` is outside (0, 1], `seed` negative, `nonfinite` or
        `value_dtype` unknown, `max_density` missing or of no use, or for a schedule
        together with `unbiased`.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.random_k(density=0.1), optax.sgd(0.01))

    References:
      Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """
    density, most = check_density_schedule(density, max_density)
    if unbiased and callable(density):
        raise ValueError(
            "unbiased: the factor n/k is fixed when the step is compiled, so that it "
            "cannot follow a density schedule. Leave one of the two out."
        )
    tx = sparsify(
        sparsifiers.random_k(density, seed=check_seed(seed), max_density=most),
        exchange=exchanges.union(value_dtype),
        memory=memories.none() if unbiased else memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
    return optax.chain(tx, optax.stateless(_amplify(density))) if unbiased else tx


def _amplify(density):
    """Multiplies by n/k: the mean, as compilers fuse a product into a sum."""

    def amplify(updates, params):
        del params
        n = sum(leaf.size for leaf in jax.tree.leaves(updates))
        factor = n / target_count(density, n) if n else 1.0
        return jax.tree.map(
            lambda leaf: leaf * jnp.asarray(factor, leaf.dtype), updates
        )

    return amplify
