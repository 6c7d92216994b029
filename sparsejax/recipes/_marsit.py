"""Marsit: one sign bit per coordinate on every hop of a ring."""

from __future__ import annotations

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._checks import check_period, check_scale, check_seed
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def marsit(
    period: int | None = 100,
    *,
    scale: float | None = None,
    seed: int = 0,
    axis_name: AxisName = "data",
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Signs travel around a ring as single bits, and still are right on average.

    With `u_r = g_r + c_r` on worker r and a random worker `i(j)` for each coordinate j,

        update_j = scale sign(u_i(j),j),    c_r <- u_r - update

    so that the update is `scale` times the mean of the workers' signs in expectation.
    Where `step mod period = 0`, counted from step 0, vectors go whole:

        update = (1/w) sum_r u_r,    c_r <- 0

    Whatever the signs do, `sum of updates + mean(c) = sum of mean gradients`.

    Nobody draws `i(j)` for all: on hop m of the ring a worker keeps its own bit with
    probability 1/(m+1), and the bit that it received otherwise. Over a tuple of two
    mesh axes the bits go around a torus, with `R + C - 2` hops instead of `R C - 1`.

    Put in front what belongs into the compensation. With the learning rate in front,
    `x + mean(c)` moves by exactly `-lr_t mean(g)` in every step, whatever the schedule.
    With the learning rate behind, a gradient that waits is later multiplied by the rate
    of that time; this is the order in which other recipes are used, and equal for a
    constant rate. Momentum and Adam in front are local: they see this worker's
    gradients only, and need `per_worker`.

    Args:
      period: of the full steps. None for never: with different data on each worker, the
        compensations then drift apart, and a period of about 20 is better. 1 is
        uncompressed training.
      scale: how far one bit moves a coordinate. By default the root mean square of the
        workers' gradients (without compensation) over about ten steps. A number
        instead must match the size of what comes in: 5 to 10 times too small, and
        compensation piles up until a full step applies it all at once.
      seed: of the random bits. Equal seeds give equal runs.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`.

    Returns:
      An optax transformation from local gradients (per worker) to updates (replicated).
      Its state holds one float32 compensation [n] per worker. `report.details` has the
      scale, the root mean square of the compensation, and whether the step was full.

    Raises:
      TypeError: if `period`, `scale` or `seed` is no number.
      ValueError: if `period` is below 1, `scale` not positive, `seed` negative, or
        `nonfinite` unknown.

    Departs from the paper: the step size of the signs follows the gradients, rounded to
    eight significant bits; the paper has a constant. Probabilities are rounded to
    multiples of 2^-16.

    Example:
      Behind the learning rate, or before it:

      >>> import optax, sparsejax
      >>> rate = optax.cosine_decay_schedule(0.1, 1000)
      >>> tx = optax.chain(optax.scale_by_learning_rate(rate), sparsejax.marsit())
      >>> tx = optax.chain(sparsejax.marsit(), optax.sgd(rate))

      Behind local momentum, and behind local Adam:

      >>> momentum = optax.chain(
      ...     sparsejax.per_worker(optax.trace(decay=0.9)),
      ...     optax.scale_by_learning_rate(rate),
      ...     sparsejax.marsit(),
      ... )
      >>> adam = optax.chain(
      ...     sparsejax.per_worker(optax.scale_by_adam()),
      ...     optax.scale_by_learning_rate(1e-3),
      ...     sparsejax.marsit(period=20),
      ... )

      On two workers. The first step is a full one; in the second both agree on the
      signs, so that no chance is left, and move by the rounded root mean square:

      >>> import jax.numpy as jnp
      >>> tx = sparsejax.simulate(sparsejax.marsit(), workers=2)
      >>> params = {"w": jnp.zeros(2)}
      >>> grads = {"w": jnp.array([[3.0, -3.0], [5.0, -5.0]])}
      >>> first, state = tx.update(grads, tx.init(params), params)
      >>> second, state = tx.update(grads, state, params)
      >>> print(first["w"], second["w"])
      [ 4. -4.] [ 4.125 -4.125]

    References:
      Wu, He, Guo, Qu, Wang, Zhuang, Zhang, "Sign Bit is Enough: A Learning
      Synchronization Framework for Multi-hop All-reduce with Ultimate Compression",
      DAC 2022 (arXiv 2204.06787).
    """
    return sparsify(
        sparsifiers.everything(),
        exchange=exchanges.one_bit_ring(
            period=check_period(period),
            scale=check_scale(scale),
            seed=check_seed(seed),
        ),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
