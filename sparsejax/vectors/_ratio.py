"""Ratios of counts that may be 0."""

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
