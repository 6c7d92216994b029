"""Checks of static arguments: errors name the argument, its value and the rule.

The function that uses an argument checks it. Recipes hand arguments on unchecked.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# For errors: whole trees of parameters are passed by mistake.
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 80


def _static_hint(name: str, value: Any) -> str:
    """The remedy for an argument that `inject_hyperparams` made into an array."""
    if not isinstance(value, jax.Array):
        return ""
    return (
        f" It is fixed when the transformation is built: pass a Python number, and "
        f'inside `optax.inject_hyperparams` also `static_args=("{name}", ...)`.'
    )


def path_name(path: Any) -> str:
    """The name of a leaf, for errors, such as `['layer']['bias']`.

    Example:
      >>> path_name(()), path_name((jax.tree_util.DictKey("bias"),))
      ('(root)', "['bias']")
    """
    return jax.tree_util.keystr(path) or "(root)"


def check_number(
    name: str, value: Any, allowed: Callable[[float], bool], meaning: str
) -> float:
    """`value` as a float that is `allowed`; `meaning` names such values.

    Raises:
      TypeError: if it is not a Python or numpy number.
      ValueError: if it is not allowed; NaN never is.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name}: got {_SHORT.repr(value)}, expected {meaning}."
            f"{_static_hint(name, value)}"
        )
    found = float(value)
    if math.isnan(found) or not allowed(found):
        raise ValueError(f"{name}: got {value}, expected {meaning}.")
    return found


def check_density(density: Any, name: str = "density") -> float:
    """`density` as a float in (0, 1]; `name` is the argument's, for errors.

    Raises:
      TypeError: if it is not a Python or numpy number.
      ValueError: if it lies outside (0, 1] or is NaN.
    """
    if callable(density):
        raise TypeError(
            f"{name}: got the function {density!r}, expected a number in (0, 1]. "
            f"Schedules are taken by `exdyna`, `micro`, `topk`, `cltk` and `random_k`, "
            f"as their `density` with `max_density=`."
        )
    meaning = "a number in (0, 1], such as 0.01 to send one per cent"
    return check_number(name, density, lambda x: 0 < x <= 1, meaning)


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
    return check_optional_count("capacity", capacity, 1, meaning)


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
            f"halve the bytes of values (the rounding error is sent later)."
        )
    return found


def check_threshold(threshold: Any, name: str = "threshold") -> float:
    """`threshold` as a float, at least 0.

    Raises:
      TypeError: if it is not a Python or numpy number.
      ValueError: if it is negative or not finite.
    """
    meaning = "a finite number of 0 or more, in units of the accumulated gradient"
    return check_number(name, threshold, lambda x: 0 <= x < math.inf, meaning)


def check_densification(densification: Any, workers: int | None = None) -> float | None:
    """`densification` as a float of at least 1, or None; at most `workers`, if given.

    Raises:
      TypeError: if it is neither a number nor None.
      ValueError: if it is out of range or not finite.
    """
    if densification is None:
        return None
    most = math.inf if workers is None else workers
    meaning = (
        f"how many times denser the sum is than one gradient, from 1 (same support "
        f"everywhere) to the number of workers (no overlap"
        f"{'' if workers is None else f', here {workers}'}), or None for independent "
        f"supports"
    )
    # Measured ones are float32.
    return check_number(
        "densification",
        densification,
        lambda x: 1 <= x <= most * (1 + 1e-6) and x < math.inf,
        meaning,
    )


def check_part(name: str, value: Any, kind: type, example: str) -> Any:
    """`value`, which is a `kind`: a record of `sparsejax.parts`.

    Raises:
      TypeError: if it is not, such as a name, or a function that was not called.
    """
    if isinstance(value, kind):
        return value
    raise TypeError(
        f"{name}: got {_SHORT.repr(value)}, expected a `{kind.__name__}`, the "
        f"result of a function of `sparsejax.{example.split('.')[0]}`, such as "
        f"`sparsejax.{example}`, parentheses included."
    )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """`value`, which is one of `choices`.

    Raises:
      ValueError: if it is not.
    """
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, expected one of {choices}.")
    return value


def check_count(name: str, value: Any, least: int = 1, meaning: str = "") -> int:
    """`value` as an int of at least `least`; `meaning` names such values.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if it is too small.
    """
    meaning = meaning or f"an int of at least {least}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"{name}: got {_SHORT.repr(value)}, expected {meaning}."
            f"{_static_hint(name, value)}"
        )
    if value < least:
        raise ValueError(f"{name}: got {value}, expected {meaning}.")
    return int(value)


def check_optional_count(
    name: str, value: Any, least: int = 1, meaning: str = ""
) -> int | None:
    """None, or `value` as `check_count` has it."""
    return None if value is None else check_count(name, value, least, meaning)


def check_seed(seed: Any) -> Any:
    """`seed` as an int of at least 0; traced integers as they are.

    Raises:
      TypeError: if it is not an integer.
      ValueError: if it is negative.
    """
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jnp.integer):
        return seed
    return check_count("seed", seed, 0)


def check_fraction(name: str, value: Any) -> float:
    """`value` as a float in [0, 1).

    Raises:
      TypeError: if it is not a Python or numpy number.
      ValueError: if it lies outside.
    """
    return check_number(name, value, lambda x: 0 <= x < 1, "a number in [0, 1)")


def check_period(period: Any) -> int | None:
    """`period` as a positive int, or None.

    Raises:
      TypeError: if it is neither an integer nor None.
      ValueError: if it is less than 1.
    """
    meaning = "a number of steps (a positive int), or None for never"
    return check_optional_count("period", period, 1, meaning)


def check_scale(scale: Any) -> Any:
    """`scale` as it is: a positive number, a traced one, or None.

    Raises:
      TypeError: if it is not a number.
      ValueError: if it is not positive and finite.
    """
    if scale is None or isinstance(scale, jax.Array):
        return scale
    meaning = "a positive number, or None for the root mean square of the gradients"
    return check_number("scale", scale, lambda x: 0 < x < math.inf, meaning)
