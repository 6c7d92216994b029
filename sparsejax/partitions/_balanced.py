"""Parts that reach their quota at nearly the same threshold: ExDyna by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.partitions._grid import blocks, even_split
from sparsejax.parts import Partition

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Tuned on the recorded gradient stream. If a part's threshold is 1 % above the common
# one, the rule assumes that 8 % more coordinates than its quota exceed the common one.
# In the long run error feedback delivers at a rate of threshold**-2, but within a step
# accumulated values pile up just below the threshold: an exponent of 8 follows moving
# gradients, 2 lags behind.
_EXPONENT = 8.0
# Weight of the past in the mean count per block, which then covers about five steps.
# Longer means follow a moving distribution late (ratio of thresholds 1.027 at 0.9,
# 1.017 at 0.8).
_MEMORY = 0.8
# Bound of the log ratios of thresholds. While parts are still far off, the eighth power
# of the unbounded ratio overshoots (with 8 workers, steps 10 to 50: ratio of thresholds
# 1.37 instead of 1.09).
_LOG_RATIO = 0.5
# Least size of a part, as a fraction of the mean: 1/16. With the published quarter, hot
# parts cannot shrink enough (ratio of thresholds 2 instead of 1.02 at mid-run).
_LEAST = 16


class BalancedState(NamedTuple):
    """State of `balanced`. Replicated.

    Attributes:
      cuts: Int32[w + 1], the wanted bounds of the parts in blocks, before `bounds`
        enforces the least size.
      mean: Float32[B], exponential mean of the count per block at a common threshold.
    """

    cuts: Int[Array, " w+1"]
    mean: Float[Array, " B"]


def _least_blocks(n: int, worker_count: int, target: int) -> int | None:
    """Static: the fewest blocks that a part may have; None if no bound can move."""
    count, size = blocks(n, worker_count)
    quota = -(-target // worker_count)
    # One block more than the quota fills, since the last block may be short.
    least = max(1, count // (_LEAST * worker_count), -(-quota // size) + 1)
    return least if worker_count > 1 and worker_count * least <= count else None


def balanced() -> Partition:
    """Parts that all reach their quota at nearly the same threshold.

    Let `h_b` be the number of delivered coordinates of block `b`, `p` the block's part,
    `t_p` the threshold of `p`, and `t` the geometric mean of the thresholds. Then

        mean_b <- 0.8 mean_b + 0.2 h_b (t_p / t)^8

    estimates the number of coordinates of the block above one common threshold. Bounds
    are the quantiles `p / w` of the cumulative sum of `mean`, and every part keeps
    enough blocks to hold its quota. If no bound can move, the parts are those of
    `even`.

    Reads the histogram of the delivered coordinates, which the exchange `union`
    provides.

    Example:
      >>> partition = balanced()
      >>> state, count = partition.init(4096, 4), blocks(4096, 4)[0]
      >>> histogram = jnp.where(jnp.arange(count) < count // 2, 3, 1)
      >>> demand, threshold = jnp.full(4, 10), jnp.full(4, 0.1)
      >>> state = partition.adapt(state, 4096, 40, demand, threshold, histogram)
      >>> print(partition.bounds(state, 4096, 4, 40))
      [   0  672 1376 2048 4096]

    Departs from the paper: ExDyna moves one block per pair and step, by the counts at
    a threshold that all parts share. Here each part has its own threshold, so counts
    are equal by construction, and a high threshold marks a part that holds too many
    large coordinates.
    """

    def init(n, worker_count):
        count, _ = blocks(n, worker_count)
        return BalancedState(
            cuts=even_split(count, worker_count), mean=jnp.zeros(count, jnp.float32)
        )

    def guarded(cuts, least, count):
        """Int32[w + 1]: the nearest cuts at least `least` apart, from 0 to `count`."""
        worker_count = cuts.shape[0] - 1
        room = jnp.arange(worker_count + 1, dtype=jnp.int32) * least
        slack = jax.lax.cummax(jnp.clip(cuts - room, 0, count - worker_count * least))
        return slack + room

    def bounds(state, n, worker_count, target):
        least = _least_blocks(n, worker_count, target)
        if least is None:
            return even_split(n, worker_count)
        count, size = blocks(n, worker_count)
        # The guard is here and not in `adapt`, so a state made for another target stays
        # legal.
        cuts = guarded(state.cuts, least, count)
        return jnp.where(cuts == count, n, cuts * size)

    def span(n, worker_count, target):
        least = _least_blocks(n, worker_count, target)
        if least is None:
            return -(-n // worker_count)
        count, size = blocks(n, worker_count)
        return min(n, (count - (worker_count - 1) * least) * size)

    def adapt(state, n, target, demand, threshold, histogram):
        worker_count = demand.shape[0]
        least = _least_blocks(n, worker_count, target)
        if least is None:
            return state
        count, _ = blocks(n, worker_count)
        cuts = guarded(state.cuts, least, count)
        number = jnp.arange(count, dtype=jnp.int32)
        part = jnp.searchsorted(cuts, number, side="right", method="compare_all") - 1
        weight = jnp.exp(_EXPONENT * _log_ratios(threshold))[part]
        counts = histogram.astype(jnp.float32) * weight
        mean = _MEMORY * state.mean + (1 - _MEMORY) * counts

        cumulative = jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(mean)])
        parts = jnp.arange(worker_count + 1, dtype=jnp.float32)
        goal = cumulative[-1] * (parts / worker_count)
        above = jnp.searchsorted(cumulative, goal, method="compare_all")
        above = jnp.clip(above, 1, count)
        nearer = goal - cumulative[above - 1] < cumulative[above] - goal
        wanted = jnp.where(nearer, above - 1, above).astype(jnp.int32)
        wanted = wanted.at[0].set(0).at[-1].set(count)
        # A step that delivered nothing changes nothing.
        news = jnp.any(histogram > 0)
        return BalancedState(
            cuts=jnp.where(news, wanted, state.cuts),
            mean=jnp.where(news, mean, state.mean),
        )

    return Partition(init, bounds, span, adapt, reads=frozenset({"histogram"}))


def _log_ratios(threshold: Float[Array, " w"]) -> Float[Array, " w"]:
    """Float32[w]: log of each threshold over their geometric mean, bounded.

    A threshold at or below the least normal number means that the part could not fill
    its quota; the part gets the lowest ratio. Infinite thresholds (parts without a
    quota) and NaN are unknown: their log ratio is 0.
    """
    tiny = jnp.finfo(jnp.float32).tiny
    threshold = threshold.astype(jnp.float32)
    known = jnp.isfinite(threshold) & (threshold > tiny)
    logs = jnp.log(jnp.where(known, threshold, 1.0))
    number = jnp.maximum(jnp.sum(known, dtype=jnp.int32), 1).astype(jnp.float32)
    ratios = logs - jnp.sum(logs) / number
    poor = jnp.where((threshold <= tiny) & jnp.any(known), -_LOG_RATIO, 0.0)
    return jnp.where(known, jnp.clip(ratios, -_LOG_RATIO, _LOG_RATIO), poor)
