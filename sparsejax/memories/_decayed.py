"""Error feedback with decay: values that wait long count less."""

from __future__ import annotations

from sparsejax._checks import check_number
from sparsejax.memories._error_feedback import error_feedback
from sparsejax.parts import Memory


def decayed(beta: float) -> Memory:
    """Error feedback whose residual is multiplied by `beta` in each step.

        vector = gradient + beta residual

    After the exchange the residual is `delivery.left` at delivered coordinates and
    `vector` at all others, as with `error_feedback`. A gradient that waits for t steps
    arrives multiplied by `beta ** t`, so that stale directions count less. The rest is
    lost on purpose: with `beta < 1` a method does not conserve gradient mass.

    Args:
      beta: the factor, in (0, 1]. With 1, the memory is `error_feedback`.

    Raises:
      TypeError: if `beta` is not a number, or is traced.
      ValueError: if `beta` is outside (0, 1].

    Example:
      >>> import jax.numpy as jnp
      >>> from sparsejax import memories
      >>> memory = memories.decayed(0.5)
      >>> vector, _ = memory.accumulate(jnp.ones(3), memory.init(3) + 0.5)
      >>> print(vector)
      [1.25 1.25 1.25]
    """
    beta = check_number("beta", beta, lambda x: 0 < x <= 1, "a number in (0, 1]")
    keep_all = error_feedback()
    if beta == 1:
        return keep_all

    def accumulate(gradient, residual):
        return gradient + beta * residual, residual

    return keep_all._replace(accumulate=accumulate)
