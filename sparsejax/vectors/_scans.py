"""Running sums and maxima of a vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from sparsejax import _xla

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


def running_sum(x: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """The inclusive running sum.

    Example:
      >>> print(running_sum(jnp.array([1, 2, 0, 3], jnp.int32)))
      [1 3 3 6]
    """
    return _running(x, jnp.add, jax.lax.cumsum)


def running_max(x: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """The largest of all values up to each one.

    Example:
      >>> print(running_max(jnp.array([1, 2, 0, 3], jnp.int32)))
      [1 2 2 3]
    """
    return _running(x, jnp.maximum, jax.lax.cummax)


def _running(
    x: Int32[Array, " m"], combine: Callable[..., Any], windowed: Callable[..., Any]
) -> Int32[Array, " m"]:
    """The running result of `combine`, which `windowed` computes as well.

    On CPU `windowed` reads a window for each result. For GPUs XLA splits the windows
    into levels of 16, and `associative_scan` becomes dozens of kernels that take the
    compiler seconds.
    """
    return jax.lax.associative_scan(combine, x) if _xla.on_cpu() else windowed(x)
