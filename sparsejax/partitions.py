"""Who scans what: contiguous parts of the vector, one per worker and step.

Everything here is replicated and deterministic: each worker computes all bounds by
itself, from facts that all of them have. Sizes are static; the work of a program grows
with the number of workers, its length does not.

Shapes: `n` coordinates, `w` workers and parts, `B` blocks, `target` coordinates to
deliver per step (K* in the papers); sizes follow from the largest target, which is
static, and only `quotas` take the one of this step, which may be traced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.parts import Partition

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Shaped

# Number of blocks in the authors' published program.
_BLOCKS = 1024

# Published rule: a part is hot above 1.05 times the mean count, and cold below 0.95238
# times. The second is the program's literal for 1 / 1.05.
_HOT, _COLD = 1.05, 0.95238

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


class PublishedState(NamedTuple):
    """Replicated.

    Attributes:
      blocks: Int32[w], blocks per part.
    """

    blocks: Int[Array, " w"]


class BalancedState(NamedTuple):
    """Replicated.

    Attributes:
      cuts: Int32[w + 1], where parts should begin, in blocks; before the guard.
      mean: Float32[B], exponential mean of the count per block at a common threshold.
    """

    cuts: Int[Array, " w+1"]
    mean: Float[Array, " B"]


def parts_of(step: Int[Array, ""], worker_count: int) -> Int[Array, " w"]:
    """Int32[w], replicated: the part of each worker, `(step + worker) mod w`."""
    ranks = jnp.arange(worker_count, dtype=jnp.int32)
    return (step % worker_count + ranks) % worker_count


def by_part(
    values: Shaped[Array, " w ..."], step: Int[Array, ""], worker_count: int
) -> Shaped[Array, " w ..."]:
    """Reorders `values` [w, ...] from workers to the parts they held. Replicated."""
    parts = jnp.arange(worker_count, dtype=jnp.int32)
    return values[(parts - step % worker_count) % worker_count]


def quotas(
    step: Int[Array, ""], n: int, target: int | Int[Array, ""], worker_count: int
) -> Int[Array, " w"]:
    """How many coordinates each part should send in this step.

    `target / w` each. What remains goes one by one to parts that change every `w`
    steps: with fixed ones and `target < w`, some parts would never be sent.

    Returns:
      Int32[w], replicated, by part; sums to `target` exactly.
    """
    share, rest = target // worker_count, target % worker_count
    # Near density 1 only the longer parts of `even` can hold one more.
    few = max(1, n % worker_count)
    if isinstance(target, int):
        holders = few if share == n // worker_count else worker_count
    else:
        holders = jnp.where(share == n // worker_count, few, worker_count)
    parts = jnp.arange(worker_count, dtype=jnp.int32)
    turn = (parts + step // worker_count % holders) % holders
    extra = (parts < holders) & (turn < rest)
    return share + extra.astype(jnp.int32)


def blocks(n: int, worker_count: int) -> tuple[int, int]:
    """The grid on which `balanced` moves bounds: static `(count, size)`.

    Blocks are `size` coordinates long, a multiple of 32 where `n` allows at least two
    per worker; the last one may be short. At least one block, also for `n = 0`.
    """
    wanted = max(_BLOCKS, 4 * worker_count)
    size = 32 * max(1, -(-n // (32 * wanted)))
    if -(-n // size) < 2 * worker_count:
        size = max(1, -(-n // (4 * worker_count)))
    return max(1, -(-n // size)), size


def _even_split(total: int, worker_count: int) -> Int[Array, " w+1"]:
    """Int32[w + 1]: the first `total mod w` intervals are one longer."""
    share, rest = divmod(total, worker_count)
    parts = jnp.arange(worker_count + 1, dtype=jnp.int32)
    return parts * share + jnp.minimum(parts, rest)


def even() -> Partition:
    """Equal parts that never move: the first `n mod w` are one longer.

    References:
      Yoon and Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and
      Accelerating Distributed DNN Training", HiPC 2023.
    """
    return Partition(
        init=lambda n, worker_count: (),
        bounds=lambda state, n, worker_count, target: _even_split(n, worker_count),
        span=lambda n, worker_count, target: -(-n // worker_count),
        adapt=lambda state, n, target, demand, threshold, histogram: state,
    )


def _published_grid(n: int, worker_count: int) -> tuple[int, int, int]:
    """Static `(count, size, least blocks in a part)` of the published program."""
    size = max(32, n // _BLOCKS // 32 * 32)
    count = min(_BLOCKS, n // size)
    return count, size, -(-count // (4 * worker_count))


def published() -> Partition:
    """Parts that exchange single blocks with their neighbours, as published.

    Blocks are `floor(n / 1024)` coordinates rounded down to a multiple of 32, and at
    least 32; the last part also takes the remainder. After a step, from the first pair
    of neighbouring parts to the last, one block moves from a hot part (more than 1.05
    times the mean count) to a cold one (less than 0.95238 times), unless fewer than a
    quarter of the mean number of blocks would be left.

    References:
      Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable
      Distributed Deep Learning", CCGrid 2024.
    """

    def init(n, worker_count):
        count, _, _ = _published_grid(n, worker_count)
        return PublishedState(jnp.diff(_even_split(count, worker_count)))

    def bounds(state, n, worker_count, target):
        _, size, _ = _published_grid(n, worker_count)
        ends = jnp.cumsum(state.blocks, dtype=jnp.int32) * size
        edge = jnp.zeros(1, jnp.int32)
        return jnp.concatenate([edge, ends[:-1], edge + n])

    def span(n, worker_count, target):
        count, size, least = _published_grid(n, worker_count)
        # A part gives blocks only while `least` are left to it.
        return n - (worker_count - 1) * min(least, count // worker_count) * size

    def adapt(state, n, target, demand, threshold, histogram):
        worker_count = demand.shape[0]
        _, size, least = _published_grid(n, worker_count)
        total = jnp.sum(demand, dtype=jnp.int32)
        mean = total // worker_count
        unit = jnp.maximum(mean, 1).astype(jnp.float32)
        per_block = _scaled(total, size, max(n, 1))

        def move(i, carry):
            owned, counts = carry
            pair = jnp.stack([i, i + 1])
            load = counts[pair].astype(jnp.float32) / unit
            hot, cold = load > _HOT, load < _COLD
            right, left = hot[0] & cold[1], cold[0] & hot[1]
            giver = jnp.where(right, i, i + 1)
            allowed = (right | left) & (mean > 0) & (owned[giver] - 1 >= least)
            sign = jnp.where(right, 1, -1) * allowed.astype(jnp.int32)
            gain = jnp.stack([-sign, sign])
            return owned.at[pair].add(gain), counts.at[pair].add(gain * per_block)

        moved, _ = jax.lax.fori_loop(
            0, worker_count - 1, move, (state.blocks, demand.astype(jnp.int32))
        )
        return PublishedState(moved)

    return Partition(init, bounds, span, adapt)


def _scaled(total: Int[Array, ""], size: int, n: int) -> Int[Array, ""]:
    """`floor(size * total / n)`, exact wherever the product fits 32 bits."""
    if size * n < 2**31:
        return total * size // n
    return jnp.floor(total.astype(jnp.float32) * (size / n)).astype(jnp.int32)


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

    Departs from the paper: ExDyna moves one block per pair and step, by the counts at
    a threshold that all parts share. Here each part has its own threshold, so counts
    are equal by construction and it is the thresholds that tell who holds too much.
    """

    def init(n, worker_count):
        count, _ = blocks(n, worker_count)
        return BalancedState(
            cuts=_even_split(count, worker_count), mean=jnp.zeros(count, jnp.float32)
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
            return _even_split(n, worker_count)
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

    return Partition(init, bounds, span, adapt)


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
