"""Thresholds for a region from a sample of it, for accelerators.

An accelerator waits for memory in each pass over a region, and a search needs several
passes. So the search reads a sample only. The selection reads the region once and tries
a few thresholds in that read, so that it reaches the quota even if the sample misleads.
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

# The magnitudes above the threshold in a usual sample: this many make a count accurate
# to about a hundredth (1 / sqrt(8192)).
_ABOVE = 8192
# A sample reads at most 1/8 of a usual region, but at least 2^16 coordinates.
_SHARE, _LEAST = 8, 1 << 16

# The first threshold is lowered by this many standard deviations of the count, so that
# nearly always enough coordinates reach it.
_SAFE = 3.0
# The next threshold, relative to the first one. Where tails fall off as the fourth
# power, twice as many coordinates reach it. All but zeros reach the last threshold.
_LOWER = 0.84


def samples(rule: ThresholdRule) -> bool:
    """Whether the threshold of a rule is to be searched in a sample. Static."""
    return rule.fills and not _xla.on_cpu()


def sample_size(span: int, usual: int, density: float) -> int:
    """Static: the number of magnitudes in a sample of a region, at most `span`.

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
      state: the state of the rule.
      part: Int32[], the number of the region.
      quota: Int32[], the coordinates that should reach the threshold.
      region: the vector [n], per worker, and the start [] and size [] of the region.
      span: static, the most coordinates of the region.
      number: static, the size of the sample; if `span`, the whole region is counted.

    Returns:
      Float32[3]: the threshold that the rule finds for the quota, or in a sample for a
      little more than the quota; a lower one; and the least normal number. All are 0 if
      the quota is the whole region, and infinite if the quota is 0.
    """
    size, wanted = region[2], quota
    if number < span:
        sample = sample_in(*region, number=number)
        number = sample.size
        region, span = (sample, 0, number), number
        share = number / jnp.maximum(size, 1).astype(jnp.float32)
        expected = quota.astype(jnp.float32) * share
        # The sample of a small region may contain a coordinate twice.
        spread = jnp.sqrt(expected * jnp.maximum(1 - share, 1 / 16))
        wanted = jnp.ceil(expected + _SAFE * spread).astype(jnp.int32)
        # The quota of the sample is the whole sample only for a quota of the region.
        wanted = jnp.where(quota < size, jnp.minimum(wanted, number - 1), number)
        size = jnp.int32(number)

    def count_at(thresholds):
        return count_in(*region, thresholds, span=span)

    found = rule.find(state, part, wanted, size, count_at)
    tiny = jnp.finfo(jnp.float32).tiny
    lower = jnp.stack([found, _LOWER * found, jnp.float32(tiny)])
    return jnp.where((found > 0) & (found < jnp.inf), jnp.maximum(lower, tiny), found)
