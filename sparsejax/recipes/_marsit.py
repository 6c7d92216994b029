"""Marsit: one sign bit per coordinate on every hop of a ring."""

from __future__ import annotations

import optax

from sparsejax import exchanges, memories, sparsifiers
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
    Where `step mod period = 0`, `update = (1/w) sum_r u_r` and `c_r <- 0`. In any step,
    `sum of updates + mean(c) = sum of mean gradients`.

    On hop m of the ring a worker keeps its own bit with probability 1/(m+1), else the
    bit that it received. Over a tuple of two axes the bits go around a torus, with
    `R + C - 2` hops instead of `R C - 1`.

    With the learning rate in front, `x + mean(c)` moves by exactly `-lr_t mean(g)` in
    every step. With the rate behind, as with other recipes, a gradient that waits is
    multiplied by a later one. Momentum and Adam in front need `per_worker`.

    Args:
      period: of the full steps; 1 is uncompressed training. None for never: then the
        compensations drift apart where workers have different data; 20 is better.
      scale: how far one bit moves a coordinate; by default the root mean square of the
        workers' gradients over about ten steps. If it is 5 to 10 times too small,
        compensation piles up until a full step applies it all at once.
      seed: of the random bits.
      axis_name: see `sparsejax.sparsify`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 compensation [n] per worker.

    Departs from the paper: the step size of the signs is not constant, but follows the
    gradients, rounded to eight bits. Probabilities are multiples of 2^-16.

    Example:
      Behind the learning rate, or before it:

      >>> import optax, sparsejax
      >>> rate = optax.cosine_decay_schedule(0.1, 1000)
      >>> tx = optax.chain(optax.scale_by_learning_rate(rate), sparsejax.marsit())
      >>> tx = optax.chain(sparsejax.marsit(), optax.sgd(rate))

      Behind local momentum:

      >>> tx = optax.chain(
      ...     sparsejax.per_worker(optax.trace(decay=0.9)),
      ...     optax.scale_by_learning_rate(rate),
      ...     sparsejax.marsit(),
      ... )

      On two workers that agree on the signs, a full step and one of bits:

      >>> import jax.numpy as jnp
      >>> tx = sparsejax.simulate(sparsejax.marsit(), workers=2)
      >>> grads = jnp.array([[3.0, -3.0], [5.0, -5.0]])
      >>> first, state = tx.update(grads, tx.init(jnp.zeros(2)))
      >>> second, state = tx.update(grads, state)
      >>> print(first, second)
      [ 4. -4.] [ 4.125 -4.125]

    References:
      Wu, He, Guo, Qu, Wang, Zhuang, Zhang, "Sign Bit is Enough: A Learning
      Synchronization Framework for Multi-hop All-reduce with Ultimate Compression",
      DAC 2022 (arXiv 2204.06787).
    """
    return sparsify(
        sparsifiers.everything(),
        exchange=exchanges.one_bit_ring(period=period, scale=scale, seed=seed),
        memory=memories.error_feedback(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
