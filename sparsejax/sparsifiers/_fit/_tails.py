"""Thresholds from distributions that are fitted to magnitudes by their moments.

Fits read the vector piece by piece and sort nothing. Nothing here communicates: results
are per worker if the arguments are. `p` is the fraction of the magnitudes that should
exceed the threshold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.vectors._regions import fold

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    Scalar = Float[Array, ""]

# Coordinates per row of a sum: with sums of row sums the rounding error does not grow
# with n.
_ROW = 1024
# Bound of magnitudes, whose largest is 1, before the logarithm: smaller magnitudes do
# not matter for the tail.
_LEAST = 1e-30


class Moments(NamedTuple):
    """The moments of exceedances `y = x - least`. All Float[].

    Attributes:
      size: the number of exceedances.
      least: the smallest of the `x`.
      mean: the mean of the `y`.
      variance: the unbiased variance of the `y`.
    """

    size: Scalar
    least: Scalar
    mean: Scalar
    variance: Scalar


class Scaled(NamedTuple):
    """The magnitudes of a vector, divided by the largest; they are never stored.

    Attributes:
      vector: Float[n].
      unit: Float[], positive.
    """

    vector: Float[Array, " n"]
    unit: Scalar

    def fold(self, step: Callable[[Any, Array], Any], *start: float) -> Any:
        """Folds `step` over pieces [m], with NaN beyond the end of the vector."""
        carry = tuple(map(jnp.float32, start))
        return fold(lambda carry, x: step(carry, x / self.unit), carry, self.vector)


def scaled(vector: Float[Array, " n"]) -> tuple[Scaled, Scalar]:
    """The scaled vector, and the largest magnitude, which is 0 for an empty vector."""

    def larger(largest, x):
        return jnp.maximum(largest, jnp.max(jnp.where(jnp.isnan(x), 0.0, x)))

    largest = fold(larger, jnp.float32(0), vector)
    return Scaled(vector, jnp.where(largest > 0, largest, 1.0)), largest


def moments_above(x: Scaled, threshold: Scalar) -> Moments:
    """The moments of `{x > threshold}`, counted from the smallest such `x`."""
    moments = _moments(x, threshold, threshold)
    return moments._replace(mean=moments.mean - (moments.least - threshold))


def moments_of(x: Scaled) -> Moments:
    """The moments of all `x`, counted from 0."""
    zero = jnp.zeros((), jnp.float32)
    return _moments(x, zero - 1, zero)._replace(least=zero)


def _moments(x: Scaled, threshold: Scalar, origin: Scalar) -> Moments:
    """The moments of `{x > threshold}`, with mean and variance of `x - origin`."""

    def add(carry, x):
        count, total, least = carry
        inside = x > threshold
        return (
            count + _sum(inside.astype(jnp.float32)),
            total + _sum(jnp.where(inside, x - origin, 0.0)),
            jnp.minimum(least, jnp.min(jnp.where(inside, x, jnp.inf))),
        )

    count, total, least = x.fold(add, 0, 0, jnp.inf)
    mean = total / jnp.maximum(count, 1)

    def spread(carry, x):
        far = jnp.where(x > threshold, (x - origin - mean) ** 2, 0.0)
        return (carry[0] + _sum(far),)

    (squares,) = x.fold(spread, 0)
    return Moments(count, least, mean, squares / jnp.maximum(count - 1, 1))


def exponential(moments: Moments, p: Scalar) -> Scalar:
    """`least - mean ln p`."""
    return moments.least - moments.mean * jnp.log(p)


def generalized_pareto(moments: Moments, p: Scalar) -> Scalar:
    """`least + a (1 - p^c) / c`, with `a` and `c` from mean and variance.

    With `r = mean^2 / variance`: `a = mean (r + 1) / 2` and `c = (r - 1) / 2`. In the
    limit of `c` to 0 the result equals `exponential(moments, p)`.
    """
    tiny = jnp.finfo(jnp.float32).tiny
    ratio = moments.mean**2 / jnp.maximum(moments.variance, tiny)
    ratio = jnp.minimum(ratio, 1e6)
    a, c = moments.mean * (ratio + 1) / 2, (ratio - 1) / 2
    c = jnp.where(jnp.abs(c) < 1e-6, 1e-6, c)
    return moments.least - a * jnp.expm1(c * jnp.log(p)) / c


def gamma(x: Scaled, p: Scalar) -> Scalar:
    """The quantile of a gamma distribution of shape `a` and scale `b`, at `1 - p`.

    With `s = ln mean(x) - mean(ln x)`, the shape is the usual approximation of the most
    likely one, `a = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s)`; the scale is
    `b = mean(x) / a`.
    """

    def add(carry, x):
        total, logs = carry
        inside = x >= 0
        log = jnp.log(jnp.maximum(x, _LEAST))
        return (
            total + _sum(jnp.where(inside, x, 0.0)),
            logs + _sum(jnp.where(inside, log, 0.0)),
        )

    size = max(x.vector.size, 1)
    total, logs = x.fold(add, 0, 0)
    mean = jnp.maximum(total / size, _LEAST)
    s = jnp.log(mean) - logs / size
    s = jnp.maximum(s, 1e-4)
    a = (3 - s + jnp.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        more = jax.scipy.special.gammaincc(a, jnp.exp(middle)) > p
        return jnp.where(more, middle, low), jnp.where(more, high, middle)

    # The search runs over logarithms: with small shapes, quantiles span many orders of
    # magnitude.
    high = jnp.log(a + 40 * jnp.sqrt(a) + 40)
    low, high = jax.lax.fori_loop(0, 32, halve, (high - 90, high))
    return mean / a * jnp.exp((low + high) / 2)


Fit = Callable[[Moments, "Scalar"], "Scalar"]
# For each fit, the threshold of the first stage, from all magnitudes, and the threshold
# of later stages, from exceedances.
FITS: dict[str, tuple[Callable[..., Scalar], Fit]] = {
    "exponential": (lambda x, p: exponential(moments_of(x), p), exponential),
    "generalized_pareto": (
        lambda x, p: generalized_pareto(moments_of(x), p),
        generalized_pareto,
    ),
    "gamma": (gamma, generalized_pareto),
}


def _sum(values: Float[Array, " n"]) -> Scalar:
    whole = values.size // _ROW * _ROW
    rows = values[:whole].reshape(-1, _ROW)
    return jnp.sum(jnp.sum(rows, axis=1)) + jnp.sum(values[whole:])
