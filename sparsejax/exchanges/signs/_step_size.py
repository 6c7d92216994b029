"""The step size of signs: the root mean square of the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.vectors._ratio import ratio

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# Weight of the past. The mean covers about ten steps, so the step size follows a
# learning-rate schedule.
_MEMORY = 0.9


class StepSize(NamedTuple):
    """An exponential running mean of the mean square gradient. Replicated.

    Attributes:
      square: Float[], weighted sum of the mean squares.
      weight: Float[], sum of the weights; 0 before the first step.
    """

    square: Float[Array, ""]
    weight: Float[Array, ""]


def start() -> StepSize:
    """The state before the first measurement."""
    return StepSize(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def follow(size: StepSize, mean_square: Float[Array, ""]) -> StepSize:
    """Adds the mean square of one more step, unless that mean overflowed."""
    known = jnp.isfinite(mean_square)
    square = _MEMORY * size.square + (1 - _MEMORY) * jnp.where(known, mean_square, 0.0)
    weight = _MEMORY * size.weight + (1 - _MEMORY)
    return StepSize(
        jnp.where(known, square, size.square), jnp.where(known, weight, size.weight)
    )


def rms(size: StepSize) -> Float[Array, ""]:
    """The root mean square, rounded by `coarse`; 0 before the first step."""
    return coarse(jnp.sqrt(ratio(size.square, size.weight)))


def coarse(size: Float[Array, ""]) -> Float[Array, ""]:
    """`size`, rounded to the eight significant bits of a bfloat16.

    More bits would not improve a step size. The last bits of a sum over n coordinates
    differ between programs, and the sign of a coordinate near 0 could turn such a
    difference into a whole step. Rounded sizes are equal under `simulate` and on
    devices, except for rare ties.
    """
    return jax.lax.reduce_precision(size, exponent_bits=8, mantissa_bits=7)
