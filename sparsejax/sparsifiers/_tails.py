"""Thresholds read off distributions that are fitted to magnitudes by moments.

Each fit reads the vector once and sorts nothing. Local arithmetic only: per worker
where what goes in is. `p` is the fraction of the magnitudes that should be larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

    Scalar = Float[Array, ""]

# Sums are formed in rows of so many, so that their rounding error does not grow with n.
_ROW = 1024
# Magnitudes have 1 as their largest. Below this a logarithm says nothing about tails.
_LEAST = 1e-30


class Moments(NamedTuple):
    """Of exceedances `y = x - least`. All Float[].

    Attributes:
      size: how many there are.
      least: the smallest of the `x`.
      mean: of the `y`.
      variance: of the `y`, unbiased.
    """

    size: Scalar
    least: Scalar
    mean: Scalar
    variance: Scalar


def moments_above(x: Float[Array, " n"], threshold: Scalar) -> Moments:
    """The moments of `{x > threshold}` beyond the smallest of them."""
    inside = x > threshold
    y = jnp.where(inside, x - threshold, 0.0)
    count, first = _sum(inside.astype(jnp.float32)), _sum(y)
    least = jnp.min(jnp.where(inside, x, jnp.inf), initial=jnp.inf)
    mean = first / jnp.maximum(count, 1)
    return Moments(count, least, mean - (least - threshold), _variance(y, mean, inside))


def moments_of(x: Float[Array, " n"]) -> Moments:
    """The moments of all `x`, counted from 0."""
    every, zero = jnp.ones(x.shape, jnp.bool_), jnp.zeros((), jnp.float32)
    mean = _sum(x) / max(x.size, 1)
    return Moments(jnp.float32(x.size), zero, mean, _variance(x, mean, every))


def exponential(moments: Moments, p: Scalar) -> Scalar:
    """`least - mean ln p`."""
    return moments.least - moments.mean * jnp.log(p)


def generalized_pareto(moments: Moments, p: Scalar) -> Scalar:
    """`least + a (1 - p^c) / c`, with `a` and `c` from mean and variance.

    With `r = mean^2 / variance`: `a = mean (r + 1) / 2` and `c = (r - 1) / 2`. As `c`
    goes to 0 this is `exponential`.
    """
    tiny = jnp.finfo(jnp.float32).tiny
    ratio = moments.mean**2 / jnp.maximum(moments.variance, tiny)
    ratio = jnp.minimum(ratio, 1e6)
    a, c = moments.mean * (ratio + 1) / 2, (ratio - 1) / 2
    c = jnp.where(jnp.abs(c) < 1e-6, 1e-6, c)
    return moments.least - a * jnp.expm1(c * jnp.log(p)) / c


def gamma(x: Float[Array, " n"], p: Scalar) -> Scalar:
    """`b` times where the regularised upper gamma function of shape `a` is `p`.

    With `s = ln mean(x) - mean(ln x)`, the shape is nearly the likeliest one,
    `a = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s)`, and `b = mean(x) / a`.
    """
    size = max(x.size, 1)
    mean = jnp.maximum(_sum(x) / size, _LEAST)
    s = jnp.log(mean) - _sum(jnp.log(jnp.maximum(x, _LEAST))) / size
    s = jnp.maximum(s, 1e-4)
    a = (3 - s + jnp.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) / 2
        more = jax.scipy.special.gammaincc(a, jnp.exp(middle)) > p
        return jnp.where(more, middle, low), jnp.where(more, high, middle)

    # Logarithms: with small shapes quantiles span many orders of magnitude.
    high = jnp.log(a + 40 * jnp.sqrt(a) + 40)
    low, high = jax.lax.fori_loop(0, 32, halve, (high - 90, high))
    return mean / a * jnp.exp((low + high) / 2)


Fit = Callable[[Moments, "Scalar"], "Scalar"]
# What the first stage makes of all magnitudes, and later ones of exceedances.
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


def _variance(y: Float[Array, " n"], mean: Scalar, inside: Bool[Array, " n"]) -> Scalar:
    count = _sum(inside.astype(jnp.float32))
    squares = _sum(jnp.where(inside, (y - mean) ** 2, 0.0))
    return squares / jnp.maximum(count - 1, 1)
