"""A step size for signs, which say nothing about magnitudes: the gradients' RMS."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.vectors._ratio import ratio

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# Weight of the past: about ten steps, so that it follows a learning-rate schedule.
_MEMORY = 0.9


class StepSize(NamedTuple):
    """A running mean, exponential, of the mean square gradient. Replicated.

    Attributes:
      square: Float[], weighted sum of the mean squares.
      weight: Float[], sum of the weights; 0 before the first step.
    """

    square: Float[Array, ""]
    weight: Float[Array, ""]


def start() -> StepSize:
    """Before the first measurement."""
    return StepSize(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def follow(size: StepSize, mean_square: Float[Array, ""]) -> StepSize:
    """Takes in the mean square of one more step, unless it overflowed."""
    known = jnp.isfinite(mean_square)
    square = _MEMORY * size.square + (1 - _MEMORY) * jnp.where(known, mean_square, 0.0)
    weight = _MEMORY * size.weight + (1 - _MEMORY)
    return StepSize(
        jnp.where(known, square, size.square), jnp.where(known, weight, size.weight)
    )


def rms(size: StepSize) -> Float[Array, ""]:
    """The root mean square, coarse; 0 before the first step."""
    return coarse(jnp.sqrt(ratio(size.square, size.weight)))


def coarse(size: Float[Array, ""]) -> Float[Array, ""]:
    """`size` with the eight significant bits of a bfloat16.

    A step size needs no more. Sums over n coordinates differ in their last bits from
    one program to another, which a sign near 0 would make into a whole step. Rounded,
    they are the same number under `simulate` as on devices, but for rare ties.
    """
    return jax.lax.reduce_precision(size, exponent_bits=8, mantissa_bits=7)
