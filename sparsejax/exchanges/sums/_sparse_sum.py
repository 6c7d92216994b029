"""What exchanges that form an exact sparse sum share: sizes, fallback, delivery."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

from sparsejax._checks import check_densification, check_density
from sparsejax.parts import Delivery, Payload, Report

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Bool, Float, Int, Shaped

    from sparsejax._layout import Layout
    from sparsejax._workers import Workers


class Facts(NamedTuple):
    """What every worker tells about a step; rides in a message. Per worker.

    Attributes:
      demand: Int32[], units that qualified.
      threshold: Float[].
      dropped: Bool[].
      failed: Bool[], whether something did not fit.
    """

    demand: Int[Array, ""]
    threshold: Float[Array, ""]
    dropped: Bool[Array, ""]
    failed: Bool[Array, ""]


def independent(density: float, workers: int) -> float:
    """Densification `(1 - (1 - d)^j) / d` of the sum over `j` independent supports."""
    return (1 - (1 - density) ** workers) / density if density else float(workers)


def densified(
    density: float, workers: int, densification: float | None, of: int
) -> float:
    """Expected densification among `of` out of `workers` workers.

    With a given one, g for all workers, `of^(log g / log w)`: between no growth for
    g = 1 and full growth for g = w.
    """
    if densification is None:
        return independent(density, of)
    if workers == 1:
        return 1.0
    return of ** (math.log(densification) / math.log(workers))


def ratio(a: Array, b: Array) -> Float[Array, " *shape"]:
    """`a / b` of non-negative numbers, 0 where b is."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1.0), 0.0)


def check_sizes(capacity: Any, densification: Any) -> tuple[Any, Any]:
    """Both as floats or None; raises what `check_density` and the other one raise."""
    if capacity is not None:
        capacity = check_density(capacity, "capacity")
    return capacity, check_densification(densification)


def units_of(n: int, values: Any) -> tuple[int, tuple[int, ...]]:
    """How many units there are for values [k, ...], and the shape of one value."""
    shape = values.shape[1:]
    return n // math.prod(shape), shape


def deliver_sum(
    vector: Float[Array, " n"],
    payload: Payload,
    facts: Facts,
    decode: Callable[[], tuple[Shaped[Array, "u *D"], Int[Array, " u"] | None]],
    after: Int[Array, ""],
    details: Callable[[Float[Array, ""], Float[Array, ""], Bool[Array, ""]], Any],
    workers: Workers,
    layout: Layout,
) -> Delivery:
    """Delivers the sum that was made, or where something did not fit, a dense one.

    Where the payload is always complete, the dense sum is one of payloads: it is what
    would have been delivered. Otherwise it is the sum of the whole vectors.

    Args:
      vector: Float[n], per worker.
      payload: per worker.
      facts: of all workers, [w]; replicated.
      decode: `() -> (mean Float[u, ...], contributors Int32[u] or None)`, replicated.
        Contributors are needed where `layout` is not exact and payloads are complete.
      after: Int32[], non-zero units of the sum, replicated.
      details: `(before, after, overflow)` to the details of the report.
      workers: the axis.
      layout: of the vector.
    """
    n, count = vector.shape[0], workers.count()
    units, shape = units_of(n, payload.values)
    width = math.prod(shape)
    partial = payload.complete is True
    shared = partial and not layout.exact
    overflow = jnp.any(facts.failed)

    def sparse():
        mean, contributors = decode()
        return mean.reshape(n), contributors if shared else None, after

    def dense():
        if partial:
            nothing = jnp.zeros((units, *shape), jnp.float32)
            given = nothing.at[payload.indices].set(payload.values, mode="drop")
        else:
            given = vector
        given = given.reshape(n)
        contributors = None
        if shared:
            mine = jnp.zeros((units,), jnp.float32)
            mine = mine.at[payload.indices].set(1.0, mode="drop")
            given, contributors = workers.sum((given, mine))
            contributors = contributors.astype(jnp.int32)
        else:
            given = workers.sum(given)
        nonzero = _nonzero(given.reshape(units, width))
        return given / count, contributors, jnp.sum(nonzero, dtype=jnp.int32)

    mean, contributors, after = workers.cond(overflow, dense, sparse)
    rounded = layout.round_all(mean)
    error = mean - rounded
    if partial:
        delivered, left = _left(error, contributors, payload, units, shape, count)
    else:
        delivered, left = None, error
    whole = overflow & (not partial)
    before = jnp.sum(facts.demand, dtype=jnp.int32).astype(jnp.float32) / count
    report = Report(
        demand=facts.demand * width,
        sent=jnp.where(whole, n, after * width),
        density=jnp.where(whole, 1.0, after.astype(jnp.float32) / max(units, 1)),
        threshold=facts.threshold,
        dropped=facts.dropped,
        details=details(
            before / max(units, 1),
            after.astype(jnp.float32) / max(units, 1),
            overflow,
        ),
    )
    return Delivery(rounded, delivered, workers.localize(left), report)


def _left(error, contributors, payload, units, shape, count):
    """What stays at the coordinates of the payload, `count` workers together."""
    width = math.prod(shape)
    errors = error.reshape(units, *shape)
    left = errors.at[payload.indices].get(mode="fill", fill_value=0)
    if contributors is not None:
        # Shared by those who sent something there, so that no mass is lost.
        many = contributors.at[payload.indices].get(mode="fill", fill_value=1)
        part = count / jnp.maximum(many, 1).astype(jnp.float32)
        left = left * part.reshape(-1, *(1 for _ in shape))
    if not shape:
        return payload.indices, left
    inside = jnp.arange(width, dtype=jnp.int32)
    delivered = payload.indices[:, None] * width + inside[None]
    return delivered.reshape(-1), left.reshape(-1)


def _nonzero(rows):
    """Bool[u]: which rows [u, D] are not all zero; NaN is not zero."""
    return jnp.any(rows != 0, axis=1)
