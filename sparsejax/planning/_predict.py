"""`predict`: how long an exchange takes on links of a given speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax._checks import check_count, check_density
from sparsejax._workers import AxisName
from sparsejax.planning._wire_bytes import Collective, summarise, wire_bytes


class Prediction(NamedTuple):
    """What `predict` expects of a step.

    Attributes:
      seconds: of the exchange; of each conditional the costliest branch.
      least: the same with the cheapest branch of each: an overflow that does not
        happen, a step of `marsit` that sends bits.
      bytes: that each worker receives in `seconds`.
      least_bytes: that each worker receives in `least`.
    """

    seconds: float
    least: float
    bytes: float
    least_bytes: float


def predict(
    recipe: optax.GradientTransformation | Callable[[float], Any],
    n: int,
    density: float,
    workers: int,
    bandwidth: float,
    latency: float,
    *,
    compute: float = 0.0,
    axis_name: AxisName = "data",
) -> Prediction:
    """Seconds that an exchange takes, from the collectives of the traced step.

    Every collective takes `bytes / bandwidth + messages latency`, one after the other:
    bytes as in `wire_bytes`, and the messages of a ring, `w - 1` for an all-gather, an
    all-to-all and a reduce-scatter, `2 (w - 1)` for an all-reduce, 1 for a permute.
    What the workers compute is not known from this: measure it once, on one machine
    without a link, or leave it out to learn what the links alone would allow.

    Args:
      recipe: a transformation, or a function of the density that makes one, such as
        `sparsejax.exdyna`.
      n: coordinates of the gradient, float32.
      density: given to `recipe` if it is a function, in (0, 1].
      workers: how many.
      bandwidth: that each worker receives with, in bits per second: 1e9 for 1 Gbit/s.
      latency: of one message, in seconds.
      compute: seconds that a worker computes in an exchange.
      axis_name: the mesh axis of the workers.

    Returns:
      A `Prediction`.

    Raises:
      TypeError: if a number is not one.
      ValueError: if `density` is outside (0, 1], `n` or `workers` less than 1,
        `bandwidth` not positive, or `latency` or `compute` negative.

    Example:
      >>> import sparsejax
      >>> link = dict(n=10**7, workers=8, bandwidth=1e9, latency=1e-4)
      >>> dense = sparsejax.predict(sparsejax.dense(), density=1.0, **link)
      >>> sparse = sparsejax.predict(sparsejax.exdyna, density=0.01, **link)
      >>> print(f"{dense.seconds / sparse.seconds:.0f} times as fast")
      64 times as fast
    """
    check_count("n", n)
    if not bandwidth > 0:
        raise ValueError(f"bandwidth: got {bandwidth}, expected bits per second, > 0.")
    for name, value in (("latency", latency), ("compute", compute)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name}: got {value}, expected seconds, 0 or more.")
    density = check_density(density)
    tx = recipe if isinstance(recipe, optax.GradientTransformation) else recipe(density)
    gradient = jax.ShapeDtypeStruct((n,), jnp.float32)
    moved = wire_bytes(tx, gradient, workers=workers, axis_name=axis_name)
    messages = {"all-reduce": 2 * (workers - 1), "permute": 1 if workers > 1 else 0}

    def seconds(c: Collective) -> Collective:
        sent = messages.get(c.kind, workers - 1) * c.times
        return c._replace(bytes=8 * c.bytes / bandwidth + sent * latency)

    taken = summarise(tuple(map(seconds, moved.collectives)))
    return Prediction(
        compute + taken.total, compute + taken.least, moved.total, moved.least
    )
