"""Checks of static arguments, shared by the recipes."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax


def check_density(density: Any, name: str = "density") -> float:
    """`density` as a float in (0, 1]; `name` is the argument to blame.

    Raises:
      TypeError: if it is not a Python or numpy number.
      ValueError: if it lies outside (0, 1] or is NaN.
    """
    if isinstance(density, jax.Array):
        raise TypeError(
            f"{name}: got a jax array ({density}); it fixes the size of messages, so "
            f"it must be a Python number when the transformation is built. Inside "
            f'`optax.inject_hyperparams` pass `static_args=("{name}",)`.'
        )
    if isinstance(density, bool) or not isinstance(density, numbers.Real):
        raise TypeError(
            f"{name}: got {density!r}, expected a number in (0, 1], such as 0.01 to "
            f"send one per cent."
        )
    value = float(density)
    if math.isnan(value) or not 0 < value <= 1:
        raise ValueError(
            f"{name}: got {density}, expected a fraction in (0, 1], such as 0.01 to "
            f"send one per cent."
        )
    return value


def check_capacity(capacity: Any) -> int | None:
    """`capacity` as a positive int, or None.

    Raises:
      TypeError: if it is neither an integer nor None.
      ValueError: if it is less than 1.
    """
    if capacity is None:
        return None
    if isinstance(capacity, bool) or not isinstance(capacity, numbers.Integral):
        raise TypeError(
            f"capacity: got {capacity!r}, expected a number of payload slots per "
            f"worker (a positive int), or None to derive it from the density."
        )
    if capacity < 1:
        raise ValueError(
            f"capacity: got {capacity}, expected at least one payload slot per worker."
        )
    return int(capacity)
