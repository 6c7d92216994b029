"""Error feedback: the undelivered rest is added to the next gradient."""

from __future__ import annotations

import jax.numpy as jnp

from sparsejax.parts import Memory


def error_feedback() -> Memory:
    """The residual holds every coordinate of the vector that was not delivered.

    `vector = gradient + residual`. After the exchange the residual is `delivery.left`
    at delivered coordinates and `vector` at all others. No gradient mass is lost, only
    delayed.

    Example:
      >>> import jax.numpy as jnp
      >>> memory = error_feedback()
      >>> vector, _ = memory.accumulate(jnp.ones(3), memory.init(3) + 0.5)
      >>> print(vector)
      [1.5 1.5 1.5]

    References:
      Seide et al., "1-bit stochastic gradient descent", Interspeech 2014.
      Stich et al., "Sparsified SGD with memory", NeurIPS 2018.
    """

    def init(n):
        return jnp.zeros((n,), jnp.float32)

    def accumulate(gradient, residual):
        return gradient + residual, residual

    def settle(vector, delivery, residual):
        del residual  # the vector contains the residual
        if delivery.delivered is None:
            return delivery.left
        return vector.at[delivery.delivered].set(delivery.left, mode="drop")

    return Memory(init, accumulate, settle)
