"""Running sums and maxima of a vector."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax import _xla

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


def running_sum(x: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """The inclusive running sum.

    On CPU `cumsum` reads a window for each result. For GPUs XLA splits the windows into
    levels of 16, and `associative_scan` becomes dozens of kernels that take the
    compiler seconds.

    Example:
      >>> print(running_sum(jnp.array([1, 2, 0, 3], jnp.int32)))
      [1 3 3 6]
    """
    if _xla.on_cpu():
        return jax.lax.associative_scan(jnp.add, x)
    return jax.lax.cumsum(x)


def running_max(x: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """The largest of all values up to each one; the forms are those of `running_sum`.

    Example:
      >>> print(running_max(jnp.array([1, 2, 0, 3], jnp.int32)))
      [1 2 2 3]
    """
    if _xla.on_cpu():
        return jax.lax.associative_scan(jnp.maximum, x)
    return jax.lax.cummax(x)
