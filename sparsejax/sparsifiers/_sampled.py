"""Top-k by the quantile of a sample: the selection of DGC."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from sparsejax import thresholds
from sparsejax._checks import check_capacity, check_density
from sparsejax.parts import Choice, Sparsifier
from sparsejax.sparsifiers._everything import or_everything
from sparsejax.sparsifiers._target import slot_count, target_count
from sparsejax.vectors._counting import count_in
from sparsejax.vectors._division import muldiv
from sparsejax.vectors._selection import compact

# As published, the sample is 1 %. It grows until 100 of its magnitudes are expected
# above the threshold, which makes the count accurate to a tenth (1/sqrt(100)).
_FRACTION = 0.01
_LEAST_ABOVE = 100

# An odd number near 2^31 divided by the golden ratio: its multiples, modulo a smaller
# number, are spread about evenly.
_LEAP = np.uint32(1327217885)


def sampled(density: float, *, capacity: int | None = None) -> Sparsifier:
    """Selects `|x| >= t`, where `t` is the density's quantile in a sample.

    The sample has 1 % of the coordinates, or 100 / density of them if that is more. It
    is evenly strided and starts at another coordinate in each step. The quota in
    the sample is one standard deviation higher, so messages are mostly full.
    Coordinates that do not fit wait, at evenly strided ranks.

    Args:
      density: fraction of the coordinates that each worker selects, in (0, 1].
      capacity: slots per worker; by default `max(1, floor(density n))`.

    Raises:
      TypeError: if an argument is not a number, or is traced.
      ValueError: if an argument is out of its range.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.sampled(0.01),
      ...     exchange=exchanges.pairs(),
      ...     memory=memories.momentum_correction(0.9),
      ... )
    """
    rule = thresholds.quota(slack=0.0)
    density, capacity = check_density(density), check_capacity(capacity)

    def select(vector, state, step):
        n = step.n
        goal = target_count(density, n)
        size = min(n, math.ceil(max(_FRACTION * n, _LEAST_ABOVE / density)))
        first = (step.index.astype(jnp.uint32) * _LEAP % n).astype(jnp.int32)
        grid = muldiv(jnp.arange(size, dtype=jnp.int32), jnp.int32(n), size)
        # (grid + first) mod n, without the sum, which may overflow.
        sample = vector[jnp.where(grid < n - first, grid + first, grid - (n - first))]
        above = goal * size / n
        quota = min(size, math.ceil(above + (math.sqrt(above) if size < n else 0)))

        def count_at(thresholds):
            return count_in(sample, 0, size, thresholds, span=size)

        unknown = rule.init(goal, 1)
        found = rule.find(
            unknown, jnp.int32(0), jnp.int32(quota), jnp.int32(size), count_at
        )
        most = slot_count(capacity, goal, n)
        indices, demand = compact(vector, found, capacity=most)
        return Choice(indices, demand, found), state

    made = Sparsifier(select, "overlapping")
    return or_everything(made, lambda n: target_count(density, n) >= n)
