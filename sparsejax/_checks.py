"""Checks of static arguments: errors name the argument, its value and the rule.

The function that uses an argument checks the argument; recipes pass them on unchecked.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

# Errors shorten values: users pass whole trees of parameters by mistake.
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 80


def _static_hint(name: str, value: Any) -> str:
    """The remedy for an argument that `inject_hyperparams` made into an array."""
    if not isinstance(value, jax.Array):
        return ""
    return (
        f" The value is fixed when the transformation is built: pass a Python number, "
        f'and inside `optax.inject_hyperparams` also `static_args=("{name}", ...)`.'
    )


def path_name(path: Any) -> str:
    """The name of a leaf, for errors, such as `['layer']['bias']`.

    Example:
      >>> path_name(()), path_name((jax.tree_util.DictKey("bias"),))
      ('(root)', "['bias']")
    """
    return jax.tree_util.keystr(path) or "(root)"


@contextlib.contextmanager
def matching_axis(axis_name: Any, callers: str) -> Iterator[None]:
    """Explains a NameError: the transformation `tx` has another `axis_name`.

    Its own advice is to set a mesh, but `callers` bind the axis themselves.
    """
    try:
        yield
    except NameError as error:
        found = re.match(r"\w+: the axis (.+?) is not bound", str(error))
        if found is None:
            raise
        raise NameError(
            f"axis_name: got {axis_name!r}, but `tx` exchanges over the axis "
            f"{found[1]}, which is not bound. Pass `axis_name={found[1]}` to "
            f"{callers}, or make `tx` with `axis_name={axis_name!r}`."
        ) from error


def check_number(
    name: str, value: Any, allowed: Callable[[float], bool], meaning: str
) -> float:
    """Returns `value` as a float; `meaning` describes the allowed values, for errors.

    Raises:
      TypeError: if `value` is not a Python or numpy number.
      ValueError: if `value` is not allowed; NaN never is.
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
    """Returns `density` as a float in (0, 1]; errors call the argument `name`.

    Raises:
      TypeError: if `density` is not a Python or numpy number.
      ValueError: if `density` is outside (0, 1] or NaN.
    """
    if callable(density):
        raise TypeError(
            f"{name}: got the function {density!r}, expected a number in (0, 1]. "
            f"Only `exdyna`, `micro`, `deft`, `topk`, `cltk`, `sidco` and `random_k` "
            f"take a schedule as their `density`, with `max_density=`."
        )
    meaning = "a number in (0, 1], such as 0.01 to send one per cent"
    return check_number(name, density, lambda x: 0 < x <= 1, meaning)


def check_density_schedule(
    density: Any, max_density: Any
) -> tuple[float | Callable[[Any], Any], float]:
    """Returns a float or a schedule, and the largest density of any step.

    Raises:
      TypeError: as in `check_density`.
      ValueError: as in `check_density`; also for a schedule without `max_density`, and
        for `max_density` without a schedule.
    """
    if not callable(density):
        density = check_density(density)
        if max_density is not None:
            raise ValueError(
                f"max_density: got {max_density} with the fixed density {density}, but "
                f"only a schedule, such as `density=optax.linear_schedule(...)`, needs "
                f"max_density. Leave max_density out."
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
    """Returns `capacity` as a positive int, or None.

    Raises:
      TypeError: if `capacity` is neither an integer nor None.
      ValueError: if `capacity` is less than 1.
    """
    meaning = (
        "payload slots per worker (a positive int), or None to derive them from the "
        "density"
    )
    return check_optional_count("capacity", capacity, 1, meaning)


VALUE_BITS = (32, 16, 8, 4, 2, 1)


def check_value_bits(bits: Any, ways: int = 2) -> tuple[int, int]:
    """Returns the bits of a worker's value on the wire, and of a mean.

    The default of recipes is None, for 32: `optax.inject_hyperparams` traces arguments
    that are numbers.

    Args:
      bits: one of 32, 16, 8, 4, 2, 1, or None for 32; with 2 `ways` also a pair of
        them. A single number below 8 means 8 bits for means.
      ways: 1 if only values are sent, 2 if their means are sent too.

    Raises:
      ValueError: for other `bits`.
    """
    pair = (bits, max(bits, 8) if isinstance(bits, int) else bits)
    if bits is None:
        pair = (32, 32)
    elif ways == 2 and isinstance(bits, tuple):
        pair = bits
    if len(pair) != 2 or any(type(b) is not int or b not in VALUE_BITS for b in pair):
        both = ", or a pair of them, for values and for means" if ways == 2 else ""
        raise ValueError(
            f"value_bits: got {bits!r}, expected 32 (the default), 16, 8, 4, 2 or 1 "
            f"bits for each value{both}, as Python ints. bfloat16 is 16."
        )
    return pair


def check_threshold(threshold: Any, name: str = "threshold") -> float:
    """Returns `threshold` as a float of at least 0.

    Raises:
      TypeError: if `threshold` is not a Python or numpy number.
      ValueError: if `threshold` is negative or not finite.
    """
    meaning = "a finite number of 0 or more, in units of the accumulated gradient"
    return check_number(name, threshold, lambda x: 0 <= x < math.inf, meaning)


def check_densification(densification: Any, workers: int | None = None) -> float | None:
    """Returns `densification` as a float in [1, `workers`], or None.

    Without `workers`, any finite number of at least 1 is allowed.

    Raises:
      TypeError: if `densification` is neither a number nor None.
      ValueError: if `densification` is out of range or not finite.
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
    # Measured densifications are float32, so they may exceed `workers` by an error.
    return check_number(
        "densification",
        densification,
        lambda x: 1 <= x <= most * (1 + 1e-6) and x < math.inf,
        meaning,
    )


def check_part(name: str, value: Any, kind: type, example: str) -> Any:
    """Returns `value`, which has to be a `kind`, a record of `sparsejax.parts`.

    Raises:
      TypeError: if `value` is not a `kind`: for example a name, or a function that was
        not called.
    """
    if isinstance(value, kind):
        return value
    raise TypeError(
        f"{name}: got {_SHORT.repr(value)}, expected a `{kind.__name__}`, the "
        f"result of a function of `sparsejax.{example.split('.')[0]}`, such as "
        f"`sparsejax.{example}`, parentheses included."
    )


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Returns `value`, which has to be one of `choices`.

    Raises:
      ValueError: if `value` is not one of `choices`.
    """
    if value not in choices:
        raise ValueError(f"{name}: got {value!r}, expected one of {choices}.")
    return value


def check_count(name: str, value: Any, least: int = 1, meaning: str = "") -> int:
    """Returns `value` as an int; `meaning` describes the allowed values, for errors.

    Raises:
      TypeError: if `value` is not an integer.
      ValueError: if `value` is less than `least`.
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
    """Returns None for None, otherwise `check_count(name, value, least, meaning)`."""
    return None if value is None else check_count(name, value, least, meaning)


def check_seed(seed: Any) -> Any:
    """Returns `seed` as an int of at least 0; returns traced integers unchanged.

    Raises:
      TypeError: if `seed` is not an integer.
      ValueError: if `seed` is negative.
    """
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jnp.integer):
        return seed
    return check_count("seed", seed, 0)


def check_fraction(name: str, value: Any) -> float:
    """Returns `value` as a float in [0, 1).

    Raises:
      TypeError: if `value` is not a Python or numpy number.
      ValueError: if `value` is outside [0, 1).
    """
    return check_number(name, value, lambda x: 0 <= x < 1, "a number in [0, 1)")


def check_period(period: Any) -> int | None:
    """Returns `period` as a positive int, or None.

    Raises:
      TypeError: if `period` is neither an integer nor None.
      ValueError: if `period` is less than 1.
    """
    meaning = "a number of steps (a positive int), or None for never"
    return check_optional_count("period", period, 1, meaning)


def check_scale(scale: Any) -> Any:
    """Returns `scale` unchanged: a positive number, a traced number, or None.

    Raises:
      TypeError: if `scale` is neither a number nor None.
      ValueError: if `scale` is not positive and finite.
    """
    if scale is None or isinstance(scale, jax.Array):
        return scale
    meaning = "a positive number, or None for the root mean square of the gradients"
    return check_number("scale", scale, lambda x: 0 < x < math.inf, meaning)


def as_present(present: Any, shape: tuple[int, ...]) -> Any:
    """Returns `present=` as an array of `shape`: Bool[], or Bool[w] of all workers.

    Raises:
      TypeError: if it holds anything but booleans.
      ValueError: if it has another shape.
    """
    found = jnp.asarray(present)
    if found.dtype != jnp.bool_:
        raise TypeError(
            f"present: got {found.dtype}, expected one Bool for each worker, such as "
            f"`jnp.array([True, False])`."
        )
    if found.shape != shape:
        count = f"one Bool for each of {shape[0]} workers" if shape else "Bool[w]"
        expected = f"Bool{list(shape)}" if shape else "Bool[]"
        raise ValueError(
            f"present: got shape {found.shape}, expected {expected}. Under plain "
            f"`jax.jit` and `sparsejax.simulate` pass {count}; inside `jax.shard_map` "
            f"pass this worker's own Bool, of shape ()."
        )
    return found
