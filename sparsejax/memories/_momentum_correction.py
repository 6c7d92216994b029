"""Momentum correction: velocities are accumulated, not gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from sparsejax._checks import check_fraction
from sparsejax.parts import Memory

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class Corrected(NamedTuple):
    """The vectors that a worker keeps. Per worker.

    Attributes:
      unsent: Float32[n], the sum of velocities that were not delivered yet.
      velocity: Float32[n].
    """

    unsent: Float[Array, " n"]
    velocity: Float[Array, " n"]


def momentum_correction(momentum: float) -> Memory:
    """Applies momentum before sparsification: delayed coordinates lose no momentum.

        velocity = momentum velocity + gradient
        vector = unsent + velocity

    After the exchange both are cleared at delivered coordinates ("factor masking": the
    momentum of a coordinate that was just sent is stale); only `delivery.left` stays in
    `unsent`. Use plain SGD after this memory: an optimizer with momentum would apply
    momentum a second time.

    Args:
      momentum: the factor of the old velocity, in [0, 1). With 0, updates equal those
        of `error_feedback`.

    Raises:
      TypeError: if `momentum` is not a number, or is traced.
      ValueError: if `momentum` is outside [0, 1).

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.topk(0.01),
      ...     exchange=exchanges.pairs(),
      ...     memory=memories.momentum_correction(0.9),
      ... )

    References:
      Lin et al., "Deep Gradient Compression", ICLR 2018.
    """

    momentum = check_fraction("momentum", momentum)

    def init(n):
        return Corrected(jnp.zeros((n,), jnp.float32), jnp.zeros((n,), jnp.float32))

    def accumulate(gradient, residual):
        velocity = momentum * residual.velocity + gradient
        return residual.unsent + velocity, Corrected(residual.unsent, velocity)

    def settle(vector, delivery, residual):
        delivered, left = delivery.delivered, delivery.left
        if delivered is None:
            return Corrected(left, jnp.zeros_like(residual.velocity))
        return Corrected(
            vector.at[delivered].set(left, mode="drop"),
            residual.velocity.at[delivered].set(0, mode="drop"),
        )

    return Memory(init, accumulate, settle)
