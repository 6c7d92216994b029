"""A threshold from several fits, each further out in the tail."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._workers import vary_like
from sparsejax.sparsifiers._fit._tails import FITS, moments_above, scaled

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# From the published program: the fraction that the first of several stages keeps.
_FIRST = 0.25


def tail_threshold(
    vector: Float[Array, " n"],
    density: Float[Array, ""] | float,
    fit: str,
    stages: Int[Array, ""],
    most: int = 32,
) -> Float[Array, ""]:
    """The magnitude that a fraction `density` exceeds, if the fit is right.

    The threshold is at most the largest magnitude, so at least one coordinate of a
    non-zero vector is selected, and always positive, so zeros are never selected.

    Args:
      vector: Float[n], per worker.
      density: the fraction.
      fit: a name in `FITS`.
      stages: Int32[], the number of stages, at most `most`.
      most: static. On accelerators the time grows with this number.
    """
    first, later = FITS[fit]
    x, largest = scaled(vector)
    single = (stages <= 1) | (density >= _FIRST)
    threshold = first(x, jnp.where(single, density, _FIRST))
    later_stages = jnp.maximum(stages - 1, 1).astype(jnp.float32)
    log = math.log if isinstance(density, float) else jnp.log
    ratio = jnp.exp(log(density / _FIRST) / later_stages)

    trips = jnp.where(single, 0, stages - 1)

    def refine(i, threshold):
        moments = moments_above(x, threshold)
        refined = later(moments, ratio)
        useful = (moments.size > 0) & (i < trips)
        return jnp.where(useful, refined, threshold)

    threshold = vary_like(threshold, stages)
    # An accelerator would wait for the host in each turn, if `trips` ended the loop.
    turns = trips if _xla.on_cpu() else most - 1
    threshold = jax.lax.fori_loop(0, turns, refine, threshold)
    threshold = jnp.minimum(threshold, 1.0) * largest
    return jnp.maximum(threshold, jnp.finfo(jnp.float32).tiny)
