"""Running sums and maxima of a vector."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla

if TYPE_CHECKING:
    from jaxtyping import Array, Int32


# Numbers of a row, which one kernel combines for each place of the row. A window for
# each place is one kernel for rows of 16. Longer rows are masked, which takes the
# compiler long for many numbers.
_WINDOW, _ROW = 16, 64
_FEW = 1 << 17


def running_sum(x: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """The inclusive running sum.

    Example:
      >>> print(running_sum(jnp.array([1, 2, 0, 3], jnp.int32)))
      [1 3 3 6]
    """
    return _running(x, jnp.add, jnp.sum, jax.lax.cumsum)


def running_max(x: Int32[Array, " m"]) -> Int32[Array, " m"]:
    """The largest of all values up to each one. They must not be negative.

    Example:
      >>> print(running_max(jnp.array([1, 2, 0, 3], jnp.int32)))
      [1 2 2 3]
    """
    return _running(x, jnp.maximum, jnp.max, jax.lax.cummax)


def _running(
    x: Int32[Array, " m"],
    combine: Callable[..., Any],
    of_row: Callable[..., Any],
    of_window: Callable[..., Any],
) -> Int32[Array, " m"]:
    """The running result of `combine`, of which 0 is the neutral element.

    For GPUs `associative_scan` becomes dozens of kernels that take the compiler
    seconds, and `of_window` of a long vector two kernels for each power of 16. Here a
    kernel combines rows, one their results, and so on; a last one adds up.
    """
    if _xla.on_cpu():
        return jax.lax.associative_scan(combine, x)
    within, level = np.tri(_ROW, dtype=bool)[None], x
    parts: list[Array] = []
    while not parts or level.size > 1:
        length = _ROW if level.size <= _FEW else _WINDOW
        rows = jnp.pad(level, (0, -level.size % length)).reshape(-1, length)
        if length == _ROW:
            part = of_row(jnp.where(within, rows[:, None], 0), axis=2)
        else:
            part = of_window(rows, axis=1)
        parts.append(part)
        level = part[:, -1]
    total = parts[0].reshape(-1)[: x.size]
    place = jnp.arange(x.size, dtype=jnp.int32)
    for below, part in itertools.pairwise(parts):
        # Of the row, among those that form a row above. Not `//` and `%`, which round
        # down with one more kernel.
        place = jax.lax.div(place, jnp.int32(below.shape[1]))
        before = part.reshape(-1)[jnp.maximum(place, 1) - 1]
        inside = place & (part.shape[1] - 1)
        total = combine(total, jnp.where(inside > 0, before, 0))
    return total
