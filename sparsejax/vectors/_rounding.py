"""Values as a narrower type holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array


def holds_float32(dtype: np.dtype) -> bool:
    """Whether `dtype` has every float32 number."""
    return jnp.finfo(dtype).bits >= 32


def round_to(values: Array, dtype: np.dtype) -> Array:
    """Float32 `values` as `dtype` holds them, saturated, in float32 again."""
    if holds_float32(dtype):
        return values
    # Saturate: the rest stays in the residual, where an infinity would poison every
    # later step.
    largest = float(jnp.finfo(dtype).max)
    clipped = jnp.clip(values, -largest, largest)
    return clipped.astype(dtype).astype(jnp.float32)
