"""Rounding of values to narrower types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array


def holds_float32(dtype: np.dtype) -> bool:
    """Whether `dtype` represents every float32 number."""
    return jnp.finfo(dtype).bits >= 32


def round_to(values: Array, dtype: np.dtype) -> Array:
    """Rounds `values` to `dtype`; the result has the dtype of `values`.

    Values beyond the largest number of `dtype` become that number, so the difference
    stays finite.

    Args:
      values: float32, or float64.
      dtype: a floating-point type.

    Returns:
      Values that `dtype` represents, unless it is float32 or wider.

    Example:
      >>> print(round_to(jnp.float32(1.001), jnp.bfloat16))
      1.0
    """
    if holds_float32(dtype):
        return values
    # Saturate: the excess stays in the residual, and an infinity there would poison
    # every later step.
    largest = float(jnp.finfo(dtype).max)
    clipped = jnp.clip(values, -largest, largest)
    return clipped.astype(dtype).astype(values.dtype)
