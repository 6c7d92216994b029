"""Threshold rules: they find the threshold of a part for an exclusive sparsifier.

A rule is a `ThresholdRule`, a record of pure functions; pass one as `threshold=` to
`exdyna`, `micro` or `sparsifiers.exclusive`. This module has two rules. To write
another, fill in the record, or replace some of its fields (`rule._replace(...)`). Rules
do not communicate. `find` runs per worker, on facts about the part that the worker
scans in this step; `adapt` sees replicated facts only, so the state stays equal on all
workers. `exdyna` uses the rule's `partition`, whose parts move by the rule's
thresholds.

Shapes: `w` workers and parts, `T` thresholds counted in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla, partitions
from sparsejax._checks import check_number, check_part
from sparsejax._workers import vary_like
from sparsejax.parts import ThresholdRule

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

__all__ = ["ThresholdRule", "quota", "staircase"]

# Factors of the authors' published programs. Their shrink factor 0.9987 is left out: no
# ratio reaches that branch.
_OVER, _UNDER = 1.1, 0.909
_RAISE_FAST, _RAISE, _LOWER = 1.005, 1.00125, 0.995

# The search runs over bit patterns: the integer with the bits of a non-negative float32
# is nearly linear in its logarithm, and a search by halves ends exactly on integers.
_TINY = int(np.float32(np.finfo(np.float32).tiny).view(np.int32))
_UNKNOWN = _TINY - 1  # A lower end at which no pass has counted yet.
_INFINITY = int(np.float32(np.inf).view(np.int32))
_UNIT = 2**23 / math.log(2)  # Bit patterns per unit of the natural logarithm.

# A pass counts at 4 thresholds. On one CPU core a pass with 4, 8 or 16 thresholds costs
# 1.3, 1.8 or 3.2 times as much as one with a single threshold: several cheap passes
# narrow a range down faster than an expensive one.
# Thresholds of the first pass, as log ratios to the expected threshold. From one to the
# next the count changes by about the default slack. The slowest of four workers makes
# 1.2 passes per step on the recorded gradient stream, and 1.1 on Laplace noise.
_OFFSETS = tuple(round(_UNIT * x) for x in (-0.045, -0.02, 0.0, 0.02))

# An accelerator would wait for the host in each turn of a loop, so its search makes a
# fixed number of passes. There a pass with many thresholds costs about as much as one
# with few. The first one counts around the hint and over all magnitudes, since a hint
# may mislead; the others narrow either range down by a factor of 1089, so that at last
# neighbours differ by less than 1 %.
_WIDE_RUNGS, _WIDE_PASSES = 32, 3
_WIDE_OFFSETS = tuple(round(_UNIT * x) for x in np.linspace(-0.35, 0.35, 8))

# The slope of the logarithm of the count over the logarithm of the threshold. Error
# feedback makes tails steep: slopes of 8 to 12 were measured on both streams.
_STEEPNESS = 9.0


def _slots(target: int, n: int, worker_count: int) -> int:
    return -(-target // worker_count)


def staircase() -> ThresholdRule:
    """The published rule: one global threshold that moves a little in each step.

    Let `exam` be the number of coordinates that qualified, divided by the target. The
    rule multiplies the threshold by 1.005 if `exam > 1.1`, by 1.00125 if
    `0.909 < exam <= 1.1`, and by 0.995 otherwise. The threshold starts at
    `1 / (2 sqrt(target))`, needs hundreds of steps if it is far off, and never settles.
    `quota` finds its threshold in the same step.

    The rule's partition is `partitions.published()`.

    State: Float32[], the threshold. Replicated.

    Returns:
      A `ThresholdRule`.

    Example:
      >>> rule = staircase()
      >>> state = rule.init(100, 4)
      >>> demand = jnp.array([90, 40, 50, 20])
      >>> thresholds = jnp.full(4, state)
      >>> print(state, rule.adapt(state, demand, thresholds, 100))
      0.05 0.05025

    References:
      Yoon and Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable
      Distributed Deep Learning", CCGrid 2024.
    """

    def init(target, worker_count):
        return jnp.float32(1 / (2 * math.sqrt(max(target, 1))))

    def find(state, part, quota, size, count):
        return vary_like(state, part)

    def adapt(state, demand, threshold, target):
        total = jnp.sum(demand, dtype=jnp.int32).astype(jnp.float32)
        if isinstance(target, int):
            exam = total / max(target, 1)
        else:
            exam = total / jnp.maximum(target, 1).astype(jnp.float32)
        up = jnp.where(exam > _OVER, jnp.float32(_RAISE_FAST), jnp.float32(_RAISE))
        return state * jnp.where(exam > _UNDER, up, jnp.float32(_LOWER))

    def limit(quota, slots):
        return vary_like(jnp.int32(slots), quota)

    return ThresholdRule(init, find, adapt, _slots, limit, partitions.published())


def quota(slack: float = 0.25) -> ThresholdRule:
    """The default rule: each part fills its quota, at its own threshold.

    In each step the rule finds a threshold `t` of the part such that

        quota <= count(t) <= quota (1 + slack)

    Each pass over the part counts at 4 thresholds: the first pass around the threshold
    that the last step's count suggests, the next ones between the two thresholds that
    bracket the quota. If more coordinates than the quota reach `t`, the sparsifier
    leaves some for later steps, evenly over the part. If ties leave no such `t`, the
    rule uses the highest threshold that at least `quota` coordinates reach. If the
    part has fewer non-zeros than its quota, the rule uses the least normal number,
    since zeros are never selected. A quota of 0 selects nothing, and a quota of the
    part's size selects everything; both need no pass.

    On accelerators there are always three passes at 32 thresholds each, over a sample
    of a large part. The slack is a target there: if the sample misleads, more
    coordinates than `quota (1 + slack)` may reach `t`, and more of them wait.

    The rule's partition is `partitions.balanced()`.

    State: Float32[w], replicated: the expected threshold of each part, 0 if unknown.

    Args:
      slack: the largest excess of the count over the quota, as a fraction of the quota.
        Less slack needs more passes over the part. Not guaranteed on accelerators.

    Returns:
      A `ThresholdRule`.

    Raises:
      TypeError: if `slack` is not a number.
      ValueError: if `slack` is negative or not finite.

    Example:
      >>> x = jnp.arange(1.0, 1001.0)
      >>> rule = quota(slack=0.1)
      >>> t = rule.find(
      ...     rule.init(100, 1), jnp.int32(0), jnp.int32(100), jnp.int32(1000),
      ...     lambda ts: jnp.sum(x[None] >= ts[:, None], axis=1, dtype=jnp.int32))
      >>> 100 <= int(jnp.sum(x >= t)) <= 110
      True
    """
    meaning = (
        "a finite number of 0 or more, the fraction by which a count may exceed its "
        "quota; leave it out for 0.25"
    )
    slack = check_number("slack", slack, lambda x: 0 <= x < math.inf, meaning)

    def init(target, worker_count):
        return jnp.zeros(worker_count, jnp.float32)

    def find(state, part, quota, size, count):
        allowed = quota + (quota.astype(jnp.float32) * slack).astype(jnp.int32)
        trivial = (quota <= 0) | (quota >= size)
        few = _xla.on_cpu()
        rungs = (_first_rungs if few else _wide_rungs)(state[part])
        start = (rungs, jnp.int32(_UNKNOWN), jnp.int32(_INFINITY), size, trivial)
        # The loop's carry has to vary over the same axes as the result of a pass. This
        # line makes no pass.
        start = vary_like(
            start, jax.eval_shape(lambda: count(_from_bits(rungs)) >= quota + size)
        )

        def count_and_narrow(carry):
            rungs, low, high, low_count, _ = carry
            counts = count(_from_bits(rungs))
            reached = counts >= quota
            low = jnp.max(jnp.where(reached, rungs, low))
            high = jnp.min(jnp.where(reached, high, rungs))
            low_count = jnp.min(jnp.where(reached, counts, low_count))
            done = (low_count <= allowed) | (high - low <= 1)
            return _rungs_between(low, high, rungs.size), low, high, low_count, done

        if few:
            carry = jax.lax.while_loop(lambda c: ~c[-1], count_and_narrow, start)
        else:
            carry = start
            for _ in range(_WIDE_PASSES):
                carry = count_and_narrow(carry)
        low = jnp.maximum(carry[1], _TINY)
        found = jnp.where(quota >= size, 0.0, _from_bits(low))
        return jnp.where(quota <= 0, jnp.inf, found)

    def adapt(state, demand, threshold, target):
        tiny = jnp.finfo(jnp.float32).tiny
        known = jnp.isfinite(threshold) & (threshold > tiny)
        # The middle of the range of accepted counts.
        middle = jnp.asarray(target, jnp.float32) * ((1 + slack / 2) / demand.size)
        excess = demand.astype(jnp.float32) / jnp.maximum(middle, 1.0)
        expected = threshold * jnp.clip(excess, 0.5, 2.0) ** (1 / _STEEPNESS)
        return jnp.where(known, expected.astype(jnp.float32), state)

    def limit(quota, slots):
        return jnp.minimum(quota, slots)

    return ThresholdRule(
        init, find, adapt, _slots, limit, partitions.balanced(), fills=True
    )


def rule_or_default(threshold: ThresholdRule | None) -> ThresholdRule:
    """Returns `threshold`, or `quota()` for None.

    Raises:
      TypeError: if `threshold` is neither a rule nor None.
    """
    if threshold is None:
        return quota()
    return check_part("threshold", threshold, ThresholdRule, "thresholds.staircase()")


def _from_bits(bits: Int[Array, " T"]) -> Float[Array, " T"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _around(hint: Float[Array, ""], offsets: Sequence[int]) -> Int[Array, " T"]:
    bits = jax.lax.bitcast_convert_type(hint, jnp.int32)
    return jnp.clip(bits + jnp.array(offsets, jnp.int32), _TINY, _INFINITY - 1)


def _anywhere(number: int) -> Int[Array, " T"]:
    return _rungs_between(jnp.int32(_UNKNOWN), jnp.int32(_INFINITY), number)


def _first_rungs(hint: Float[Array, ""]) -> Int[Array, " T"]:
    """Bit patterns Int32[T], ascending, of the first pass. Per worker.

    They surround the hint, or cover all exponents if the hint is unknown.
    """
    around = _around(hint, _OFFSETS)
    return jnp.where(hint > 0, around, _anywhere(len(_OFFSETS)))


def _wide_rungs(hint: Float[Array, ""]) -> Int[Array, " T"]:
    """Bit patterns Int32[T] of the first pass on accelerators. Per worker.

    They surround the hint and cover all exponents, so they do not ascend.
    """
    few = len(_WIDE_OFFSETS)
    return jnp.concatenate([_around(hint, _WIDE_OFFSETS), _anywhere(_WIDE_RUNGS - few)])


def _rungs_between(
    low: Int[Array, ""], high: Int[Array, ""], number: int
) -> Int[Array, " T"]:
    """`number` bit patterns Int32[T], ascending, strictly inside `(low, high)`."""
    step = jnp.maximum(jax.lax.div(high - low, jnp.int32(number + 1)), 1)
    order = jnp.arange(1, number + 1, dtype=jnp.int32)
    rungs = jnp.minimum(low + step * order, high - 1)
    # A count at the least normal number shows whether the part has enough non-zeros.
    return jnp.where((low == _UNKNOWN) & (order == 1), _TINY, rungs)
