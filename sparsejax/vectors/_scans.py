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


# Row lengths. One kernel computes the running results of all rows: rows of 16 by a
# window. Vectors of at most `_FEW` numbers use rows of 64 by a mask, which compiles
# slowly for longer vectors.
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
    """The inclusive running maximum of values that are not negative.

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

    For GPUs `associative_scan` becomes dozens of kernels that take seconds to compile,
    and `of_window` of a long vector two kernels for each power of 16. Here one kernel
    scans rows, the next scans the rows' totals, and so on; the last combines all.
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
        # The number of this element's row. Not `//` and `%`, which round down with one
        # more kernel.
        place = jax.lax.div(place, jnp.int32(below.shape[1]))
        before = part.reshape(-1)[jnp.maximum(place, 1) - 1]
        inside = place & (part.shape[1] - 1)
        total = combine(total, jnp.where(inside > 0, before, 0))
    return total
