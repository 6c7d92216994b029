"""Parts that reach their quota at nearly the same threshold: ExDyna by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.partitions._grid import blocks, even_split
from sparsejax.parts import Partition

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Balanced rule, tuned on the recorded gradient stream. A part whose threshold is 1 %
# high is taken to hold 8 % more than its quota above the common threshold. The rate at
# which error feedback delivers goes as threshold**-2 in the long run, but within a step
# accumulated values pile up just below it; 8 follows moving gradients, 2 lags behind.
_EXPONENT = 8.0
# Weight of the past in the mean count per block: about five steps. Longer means follow
# a moving distribution late (ratio of thresholds 1.027 at 0.9, 1.017 at 0.8).
_MEMORY = 0.8
# Log ratios of thresholds are bounded by this: while parts are still far off, the
# whole ratio to the eighth power overshoots (with 8 workers, steps 10 to 50: ratio of
# thresholds 1.37 instead of 1.09).
_LOG_RATIO = 0.5
# Least size of a part, as a fraction of the mean. The published quarter keeps hot
# parts from shrinking enough: ratio of thresholds 2 instead of 1.02 at mid-run.
_LEAST = 16


class BalancedState(NamedTuple):
    """Replicated.

    Attributes:
      cuts: Int32[w + 1], where parts should begin, in blocks; before the guard.
      mean: Float32[B], exponential mean of the count per block at a common threshold.
    """

    cuts: Int[Array, " w+1"]
    mean: Float[Array, " B"]


def _least_blocks(n: int, worker_count: int, target: int) -> int | None:
    """Static: the fewest blocks that a part may have; None if no bound can move."""
    count, size = blocks(n, worker_count)
    quota = -(-target // worker_count)
    # One more than holds the quota, as the last block may be short.
    least = max(1, count // (_LEAST * worker_count), -(-quota // size) + 1)
    return least if worker_count > 1 and worker_count * least <= count else None


def balanced() -> Partition:
    """Parts that all reach their quota at nearly the same threshold.

    With `h_b` the delivered coordinates of block `b`, `p` the part it was in, `t_p`
    that part's threshold, and `t` the geometric mean of the thresholds,

        mean_b <- 0.8 mean_b + 0.2 h_b (t_p / t)^8

    estimates how many coordinates of the block lie above one common threshold. Bounds
    are the quantiles `p / w` of its cumulative sum, and every part keeps enough blocks
    to hold its quota. Where that leaves nothing to move, parts are those of `even`.

    Reads the histogram of the delivered coordinates, which the exchange `union` tells.

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
    are equal by construction, and the thresholds tell which parts hold too much.
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
        # Guarded here and not in `adapt`: a state made for another target stays legal.
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
        part = jnp.searchsorted(cuts, number, side="right") - 1
        weight = jnp.exp(_EXPONENT * _log_ratios(threshold))[part]
        counts = histogram.astype(jnp.float32) * weight
        mean = _MEMORY * state.mean + (1 - _MEMORY) * counts

        cumulative = jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(mean)])
        parts = jnp.arange(worker_count + 1, dtype=jnp.float32)
        goal = cumulative[-1] * (parts / worker_count)
        above = jnp.clip(jnp.searchsorted(cumulative, goal), 1, count)
        nearer = goal - cumulative[above - 1] < cumulative[above] - goal
        wanted = jnp.where(nearer, above - 1, above).astype(jnp.int32)
        wanted = wanted.at[0].set(0).at[-1].set(count)
        # Nothing delivered: no news.
        news = jnp.any(histogram > 0)
        return BalancedState(
            cuts=jnp.where(news, wanted, state.cuts),
            mean=jnp.where(news, mean, state.mean),
        )

    return Partition(init, bounds, span, adapt, reads=frozenset({"histogram"}))


def _log_ratios(threshold: Float[Array, " w"]) -> Float[Array, " w"]:
    """Float32[w]: log of each threshold over their geometric mean, bounded.

    Thresholds at or below the least normal number mean that the part could not fill its
    quota: it counts as the poorest. Infinite ones (no quota) and NaN tell nothing.
    """
    tiny = jnp.finfo(jnp.float32).tiny
    threshold = threshold.astype(jnp.float32)
    known = jnp.isfinite(threshold) & (threshold > tiny)
    logs = jnp.log(jnp.where(known, threshold, 1.0))
    number = jnp.maximum(jnp.sum(known, dtype=jnp.int32), 1).astype(jnp.float32)
    ratios = logs - jnp.sum(logs) / number
    poor = jnp.where((threshold <= tiny) & jnp.any(known), -_LOG_RATIO, 0.0)
    return jnp.where(known, jnp.clip(ratios, -_LOG_RATIO, _LOG_RATIO), poor)
