"""The two records that an exclusive sparsifier is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sparsejax.parts._method import State

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


class ThresholdRule(NamedTuple):
    """Finds the threshold of the part that a worker of an exclusive sparsifier scans.

    `quota` is the number of coordinates that the part should send; quotas sum to the
    target. `count` maps thresholds Float[T] to Int32[T]: the number of coordinates of
    this worker's part with `|x| >= threshold`. Each call is one pass over the part. If
    `fills`, programs for accelerators call `find` for a sample of the part: `quota`,
    `size` and `count` then describe the sample.

    Attributes:
      init: `(target, worker_count) -> state`, replicated.
      find: `(state, part [], quota [], size [], count) -> Float[]`, the threshold
        of this step. Per worker.
      adapt: `(state, demand [w], threshold [w], target) -> state`, after the step. Both
        arrays are replicated and ordered by *part*. `target` is an int, or Int32[] if
        the density is a schedule.
      capacity: `(target, n, worker_count) -> int`, payload slots per worker.
      limit: `(quota [], slots) -> Int32[]`, the most coordinates that a worker may
        send.
      partition: the partition whose parts move by this rule's thresholds.
      fills: static, whether `find` looks for a threshold that at least `quota`
        coordinates reach, and not many more.

    Example:
      A rule that selects the coordinates above a fixed magnitude, up to twice the
      target:

      >>> import jax.numpy as jnp, sparsejax
      >>> fixed = sparsejax.thresholds.staircase()._replace(
      ...     adapt=lambda state, demand, threshold, target: state,
      ...     capacity=lambda target, n, worker_count: -(-2 * target // worker_count),
      ... )
      >>> tx = sparsejax.micro(density=0.01, threshold=fixed)
    """

    init: Callable[[int, int], State]
    find: Callable[..., Float[Array, ""]]
    adapt: Callable[..., State]
    capacity: Callable[[int, int, int], int]
    limit: Callable[[Int[Array, ""], int], Int[Array, ""]]
    partition: Partition
    fills: bool = False


class Partition(NamedTuple):
    """Contiguous exclusive parts of `[0, n)`, which may move from step to step.

    Attributes:
      init: `(n, worker_count) -> state`, replicated.
      bounds: `(state, n, worker_count, target) -> Int32[w + 1]`, ascending
        coordinates: part `p` is `[bounds[p], bounds[p + 1])`. Replicated.
      span: `(n, worker_count, target) -> int`, static: the most coordinates of a part.
      adapt: `(state, n, target, demand [w], threshold [w], histogram [B]) -> state`,
        replicated; `demand` and `threshold` are ordered by part. `histogram` counts the
        delivered coordinates of each block (`partitions.blocks`); `None` unless
        `reads` contains "histogram".
      reads: facts of the exchange that `adapt` needs: `{"histogram"}`, or the empty
        set.

    Example:
      The published blocks, but they never move:

      >>> import sparsejax
      >>> fixed = sparsejax.partitions.published()._replace(
      ...     adapt=lambda state, n, target, demand, threshold, histogram: state,
      ... )
      >>> sparsifier = sparsejax.sparsifiers.exclusive(
      ...     0.01, partition=fixed, threshold=sparsejax.thresholds.quota()
      ... )
    """

    init: Callable[[int, int], State]
    bounds: Callable[[State, int, int, int], Int[Array, " w+1"]]
    span: Callable[[int, int, int], int]
    adapt: Callable[..., State]
    reads: frozenset[str] = frozenset()
