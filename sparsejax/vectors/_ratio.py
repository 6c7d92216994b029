"""Ratios to numbers that may be 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Real


def ratio(
    a: Real[Array, " *shape"], b: Real[Array, " *shape"]
) -> Float[Array, " *shape"]:
    """`a / b` in float32, for non-negative numbers; 0 where `b` is 0."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1.0), 0.0)


def shares(
    magnitudes: Float[Array, "*shape"], largest: Float[Array, "*whole"]
) -> Float[Array, "*shape"]:
    """`magnitudes / largest`, for `largest` of any size; 0 where `largest` is 0."""
    # Devices may flush subnormal numbers to zero, and compilers multiply by the inverse
    # of a number that divides many, which is subnormal for the largest ones.
    normal = largest >= jnp.finfo(jnp.float32).tiny
    down = jnp.where(largest > 1, 1 / 16, 1.0)
    return jnp.where(
        normal, magnitudes * down / jnp.where(normal, largest * down, 1.0), 0.0
    )
