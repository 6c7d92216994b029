"""Checks of static arguments, shared by the recipes."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_density(density: Any, name: str = "density") -> float:
    """`density` as a float in (0, 1]; `name` is the argument's, for errors.

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
    if callable(density):
        raise TypeError(
            f"{name}: got the function {density!r}, expected a number in (0, 1]. "
            f"Schedules are taken by `exdyna` and `micro`, as their `density` with "
            f"`max_density=`."
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


def _static_hint(name: str, value: Any) -> str:
    """What to do about an argument that `inject_hyperparams` made into an array."""
    if not isinstance(value, jax.Array):
        return ""
    return f' Inside `optax.inject_hyperparams` pass `static_args=("{name}", ...)`.'


def check_density_schedule(
    density: Any, max_density: Any
) -> tuple[float | Callable[[Any], Any], float]:
    """`(density, most)`: a float or a schedule, and the largest density it may reach.

    Raises:
      TypeError: as `check_density`.
      ValueError: as `check_density`; also for a schedule without `max_density`, and for
        `max_density` without a schedule.
    """
    if not callable(density):
        density = check_density(density)
        if max_density is not None:
            raise ValueError(
                f"max_density: got {max_density} with the fixed density {density}. It "
                f"belongs to a schedule, `density=optax.linear_schedule(...)`; leave "
                f"it out."
            )
        return density, density
    if max_density is None:
        raise ValueError(
            "max_density: density is a schedule, but the size of messages is fixed "
            "when the step is compiled. Pass the largest density that the schedule "
            "reaches, such as `max_density=0.1`."
        )
    return density, check_density(max_density, "max_density")


def check_capacity(capacity: Any) -> int | None:
    """`capacity` as a positive int, or None.

    Raises:
      TypeError: if it is neither an integer nor None.
      ValueError: if it is less than 1.
    """
    meaning = (
        "payload slots per worker (a positive int), or None to derive them from the "
        "density"
    )
    return None if capacity is None else check_count("capacity", capacity, 1, meaning)


def check_value_dtype(dtype: Any) -> np.dtype:
    """The dtype of values on the wire: float32 or bfloat16.

    Defaults name it by a string: `optax.inject_hyperparams` takes every callable
    argument for a schedule, and `jnp.float32` is callable.

    Raises:
      ValueError: if it is another one.
    """
    allowed = (np.dtype(jnp.float32), np.dtype(jnp.bfloat16))
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = None
    if dtype is None or found not in allowed:
        raise ValueError(
            f"value_dtype: got {dtype!r}, expected jnp.float32, or jnp.bfloat16 to "
            f"halve the bytes of values (what rounding takes away is sent later)."
        )
    return found


def check_threshold(threshold: Any, name: str = "threshold") -> float:
    """`threshold` as a float, at least 0.

    Raises:
      TypeError: if it is not a Python or numpy number.
      ValueError: if it is negative or not finite.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real):
        raise TypeError(
            f"{name}: got {threshold!r}, expected a number of 0 or more, in units of "
            f"the accumulated gradient.{_static_hint(name, threshold)}"
        )
    found = float(threshold)
    if not (math.isfinite(found) and found >= 0):
        raise ValueError(
            f"{name}: got {threshold}, expected a finite number of 0 or more, in "
            f"units of the accumulated gradient."
        )
    return found


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value`, which is one of `choices`.

    Raises:
      ValueError: if it is not.
    """
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, expected one of {choices}.")
    return value


def check_count(name: str, value: Any, least: int = 1, meaning: str = "") -> int:
    """`value` as an int of at least `least`; `meaning` says what was expected.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if it is too small.
    """
    meaning = meaning or f"an int of at least {least}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"{name}: got {value!r}, expected {meaning}.{_static_hint(name, value)}"
        )
    if value < least:
        raise ValueError(f"{name}: got {value}, expected {meaning}.")
    return int(value)


def check_fraction(name: str, value: Any) -> float:
    """`value` as a float in [0, 1).

    Raises:
      TypeError: if it is not a Python or numpy number.
      ValueError: if it lies outside.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name}: got {value!r}, expected a number in [0, 1)."
            f"{_static_hint(name, value)}"
        )
    found = float(value)
    if not 0 <= found < 1:
        raise ValueError(f"{name}: got {value}, expected a number in [0, 1).")
    return found


def check_period(period: Any) -> int | None:
    """`period` as a positive int, or None.

    Raises:
      TypeError: if it is neither an integer nor None.
      ValueError: if it is less than 1.
    """
    meaning = "a number of steps (a positive int), or None for never"
    return None if period is None else check_count("period", period, 1, meaning)


def check_scale(scale: Any) -> Any:
    """`scale` as it is: a positive number, a traced one, or None.

    Raises:
      TypeError: if it is no number.
      ValueError: if it is not positive and finite.
    """
    if scale is None or isinstance(scale, jax.Array):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(
            f"scale: got {scale!r}, expected a positive number, or None for the root "
            f"mean square of the gradients."
        )
    size = float(scale)
    if not 0 < size < math.inf:
        raise ValueError(
            f"scale: got {scale}, expected a positive number, or None for the root "
            f"mean square of the gradients."
        )
    return size
