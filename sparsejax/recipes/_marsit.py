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
    """Sends one sign bit per coordinate around a ring; the result is unbiased.

    With `u_r = g_r + c_r` on worker r, where `c_r` is its compensation, and a random
    worker `i(j)` for each coordinate j,

        update_j = scale sign(u_i(j),j),    c_r <- u_r - update

    So the expected update is `scale` times the mean of the workers' signs. In a full
    step, `step mod period = 0`, `update = (1/w) sum_r u_r` and `c_r <- 0`. In every
    step, `sum of updates + mean(c) = sum of mean gradients`.

    On hop m of the ring a worker keeps its own bit with probability 1/(m+1), and
    otherwise the received bit. Over a tuple of two axes the bits go around a torus,
    with `R + C - 2` hops instead of `R C - 1`.

    With the learning rate before `marsit` in the chain, `x + mean(c)` moves by exactly
    `-lr_t mean(g)` in every step. With the rate after `marsit`, as with other recipes,
    a gradient that waits is multiplied by a later rate. An optimizer before `marsit`
    needs `per_worker`, and should have no momentum (`b1=0` in Adam): with momentum a
    worker's steps point the same way for a while, so compensation piles up, and a full
    step applies all of it. With momentum, use a period of about 5. Leaves whose
    gradients differ in size train better with a `marsit` each, in `optax.partition`, at
    the price of a ring for each.

    Args:
      period: steps from one full step to the next; 1 is uncompressed training. With
        None there are no full steps, and the compensations of workers with different
        data drift apart; a period of 20 is better.
      scale: the distance by which one bit moves a coordinate; by default the root mean
        square of the workers' gradients over about ten steps. With a scale 5 to 10
        times too small, compensation piles up until a full step applies all of it.
      seed: the seed of the random bits.
      axis_name: see `sparsejax.sparsify`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a float32 compensation [n] per worker.

    Departs from the paper: the step size of the signs follows the gradients, rounded to
    eight bits, and is not constant. Probabilities are multiples of 2^-16.

    Example:
      With the learning rate before `marsit`, or after:

      >>> import optax, sparsejax
      >>> rate = optax.cosine_decay_schedule(0.1, 1000)
      >>> tx = optax.chain(optax.scale_by_learning_rate(rate), sparsejax.marsit())
      >>> tx = optax.chain(sparsejax.marsit(), optax.sgd(rate))

      With Adam on each worker, before `marsit`:

      >>> tx = optax.chain(
      ...     sparsejax.per_worker(optax.scale_by_adam(b1=0.0)),
      ...     optax.scale_by_learning_rate(rate),
      ...     sparsejax.marsit(),
      ... )

      A full step and a one-bit step, on two workers that agree on the signs:

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
