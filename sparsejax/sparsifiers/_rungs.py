"""Thresholds for a region from a sample of it, for accelerators.

There a pass over a region waits for memory, and a search needs several of them. The
search therefore passes over a sample, and the selection tries a few thresholds in its
one read of the region: so as many coordinates as the quota are found even if the sample
misleads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from sparsejax import _xla
from sparsejax.parts import ThresholdRule
from sparsejax.vectors._counting import count_in
from sparsejax.vectors._sample import sample_in

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Magnitudes of a usual sample above the threshold: they make a count accurate to about
# a hundredth (1 / sqrt(8192)).
_ABOVE = 8192
# A sample reads at most this share of a usual region; and no sample is shorter.
_SHARE, _LEAST = 8, 1 << 16

# Standard deviations by which the first threshold is low, so that nearly always enough
# coordinates reach it.
_SAFE = 3.0
# The next threshold, relative to the first one. Where tails fall off as the fourth
# power, twice as many coordinates reach it. At the last one all do but zeros.
_LOWER = 0.84


def samples(rule: ThresholdRule) -> bool:
    """Whether the threshold of a rule is to be searched in a sample. Static."""
    return rule.fills and not _xla.on_cpu()


def sample_size(span: int, usual: int, density: float) -> int:
    """Static: the magnitudes of a sample of a region, at most all `span` of them.

    Args:
      span: the most coordinates of the region.
      usual: the usual number of its coordinates.
      density: the usual share of the coordinates to choose.
    """
    enough = math.ceil(_ABOVE / density)
    return min(span, max(_LEAST, min(usual // _SHARE, enough)))


def sample_of(vector: Float[Array, " n"], density: float) -> Float[Array, " m"]:
    """A sample of the whole vector, of a size that suits a density. Per worker."""
    n = vector.size
    number = sample_size(n, n, density)
    if number == n:
        return vector
    return sample_in(vector, jnp.int32(0), jnp.int32(n), number=number)


def rungs(
    rule: ThresholdRule,
    state: Any,
    part: Int[Array, ""],
    quota: Int[Array, ""],
    region: tuple[Float[Array, " n"], Int[Array, ""], Int[Array, ""]],
    *,
    span: int,
    number: int,
) -> Float[Array, " 3"]:
    """Thresholds for `filled`, descending. Per worker.

    Args:
      rule: the rule that searches.
      state: of the rule.
      part: Int32[], the number of the region.
      quota: Int32[], the coordinates that should reach the threshold.
      region: the vector [n], per worker, and the start [] and size [] of the region.
      span: static, the most coordinates of the region.
      number: static, the magnitudes of the sample; all are counted if `span` is.

    Returns:
      Float32[3]: the one that the rule finds for the quota, or for a little more than
      the quota in a sample; a lower one; and the least normal number. All are 0 if the
      quota is the region, and infinite if it is 0.
    """
    size, wanted = region[2], quota
    if number < span:
        sample = sample_in(*region, number=number)
        number = sample.size
        region, span = (sample, 0, number), number
        share = number / jnp.maximum(size, 1).astype(jnp.float32)
        expected = quota.astype(jnp.float32) * share
        # Neighbours may be in the sample of a small region twice.
        spread = jnp.sqrt(expected * jnp.maximum(1 - share, 1 / 16))
        wanted = jnp.ceil(expected + _SAFE * spread).astype(jnp.int32)
        # The quota of a whole region is the whole sample, and no other quota is.
        wanted = jnp.where(quota < size, jnp.minimum(wanted, number - 1), number)
        size = jnp.int32(number)

    def count_at(thresholds):
        return count_in(*region, thresholds, span=span)

    found = rule.find(state, part, wanted, size, count_at)
    tiny = jnp.finfo(jnp.float32).tiny
    lower = jnp.stack([found, _LOWER * found, jnp.float32(tiny)])
    return jnp.where((found > 0) & (found < jnp.inf), jnp.maximum(lower, tiny), found)
