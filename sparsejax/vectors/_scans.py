"""Running sums and maxima of a vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


# Numbers of a row, which one kernel combines for each place of the row: a power of 2.
_ROW = 64


def running_sum(x: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """The inclusive running sum.

    Example:
      >>> print(running_sum(jnp.array([1, 2, 0, 3], jnp.int32)))
      [1 3 3 6]
    """
    return _running(x, jnp.add, jnp.sum)


def running_max(x: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """The largest of all values up to each one. They must not be negative.

    Example:
      >>> print(running_max(jnp.array([1, 2, 0, 3], jnp.int32)))
      [1 2 2 3]
    """
    return _running(x, jnp.maximum, jnp.max)


def _running(
    x: Int32[Array, " m"], combine: Callable[..., Any], of_row: Callable[..., Any]
) -> Int32[Array, " m"]:
    """The running result of `combine`, of which 0 is the neutral element.

    For GPUs `associative_scan` becomes dozens of kernels that take the compiler
    seconds, and `jax.lax.cumsum` two kernels for each power of 16. The rows here take
    one kernel for each power of 64, and a last one.
    """
    if _xla.on_cpu():
        return jax.lax.associative_scan(combine, x)
    within, parts, level = np.tri(_ROW, dtype=bool)[None], [], x
    while not parts or level.size > 1:
        rows = jnp.pad(level, (0, -level.size % _ROW)).reshape(-1, 1, _ROW)
        parts.append(of_row(jnp.where(within, rows, 0), axis=2))
        level = parts[-1][:, -1]
    total = parts[0].reshape(-1)[: x.size]
    place = jnp.arange(x.size, dtype=jnp.int32)
    for level in parts[1:]:
        # Of the row, among the rows that form a row above. Not `//`, which rounds down
        # with one more kernel.
        place = jax.lax.div(place, jnp.int32(_ROW))
        before = level.reshape(-1)[jnp.maximum(place, 1) - 1]
        total = combine(total, jnp.where(place & (_ROW - 1) > 0, before, 0))
    return total
