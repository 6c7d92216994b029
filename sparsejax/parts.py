"""The three parts of a method, and the records that pass between them.

A method is a `Sparsifier`, an `Exchange` and a `Memory`, composed by
`sparsejax.sparsify`. Each part is a record of pure functions; most fields have a
default, so that a new part states only the functions that differ.

Shapes: `n` coordinates, `k` slots of a message per worker (static), `w` workers, `m`
delivered coordinates. *Per worker* values differ between workers, *replicated* values
are equal on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    from sparsejax._layout import Layout
    from sparsejax._workers import Workers

__all__ = [
    "Choice",
    "Delivery",
    "Exchange",
    "Memory",
    "Partition",
    "Report",
    "Sparsifier",
    "Step",
    "ThresholdRule",
    "Window",
    "no_details",
    "no_state",
    "unchanged",
]

State = Any


@dataclasses.dataclass(frozen=True)
class Step:
    """The number of a step, its workers and its layout: each part's functions get one.

    Attributes:
      index: Int32[], replicated: the number of updates made before this one.
      workers: static, the workers' axis: `gather`, `sum`, `mean` and the like.
      layout: static, the place of each leaf of the gradient in the vector.
      support: static, `Sparsifier.support` of the method.
      lossless: static, `Sparsifier.lossless` of the method.
      dropped: Bool[], per worker: whether this worker's gradient was left out.
      mean_square: `() -> Float[]`, per worker: the mean square of this worker's
        gradient, before the memory adds the residual. Each call is one pass over the
        gradient.
    """

    index: Int[Array, ""]
    workers: Workers
    layout: Layout
    support: str = "everything"
    lossless: bool = False
    dropped: Bool[Array, ""] | bool = False
    mean_square: Callable[[], Float[Array, ""]] = lambda: jnp.zeros((), jnp.float32)

    @property
    def n(self) -> int:
        """The number of coordinates, static."""
        return self.layout.n

    @property
    def w(self) -> int:
        """The number of workers, static."""
        return self.workers.count()

    @property
    def rank(self) -> Int[Array, ""]:
        """Int32[], per worker: this worker's index."""
        return self.workers.index()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """The range of each worker's indices, known to all: so indices take fewer bytes.

    Attributes:
      start: Int32[w], replicated: the first coordinate that each worker may choose.
      span: static: no worker chooses a coordinate at or beyond `start + span`.
    """

    start: Int[Array, " w"]
    span: int = dataclasses.field(metadata={"static": True})


class Choice(NamedTuple):
    """The coordinates that a worker would like to send. Per worker.

    Attributes:
      indices: Int32[k], ascending; empty slots hold `n`, so that gathers fill and
        scatters drop. `None` stands for the whole vector. With rows, these are indices
        of rows, and empty slots hold `n / row_size`.
      demand: Int32[], the number of coordinates that qualified, before truncation to
        `k`.
      threshold: Float[], the applied threshold; 0 for rules without a threshold.
      window: the range of every worker's indices, or `None` for all of `[0, n)`.
      row_size: static, D: each index stands for D consecutive coordinates.
    """

    indices: Int[Array, " k"] | None
    demand: Int[Array, ""]
    threshold: Float[Array, ""]
    window: Window | None = None
    row_size: int = 1


class Report(NamedTuple):
    """The facts of one step, for users to log. Replicated.

    Attributes:
      demand: Int32[w], the number of coordinates that qualified on each worker.
      sent: Int32[], the number of distinct coordinates that were delivered.
      density: Float[], `sent / n`.
      threshold: Float[w], the threshold that each worker applied.
      dropped: Bool[w], True for workers whose gradient was non-finite and left out.
      details: NamedTuple, the facts that only this exchange reports.

    Example:
      >>> import jax.numpy as jnp, sparsejax
      >>> tx = sparsejax.simulate(sparsejax.micro(density=0.1), workers=4)
      >>> params = jnp.zeros(100)
      >>> _, state = tx.update(jnp.ones((4, 100)), tx.init(params), params)
      >>> print(sparsejax.report(state).sent)
      10
    """

    demand: Int[Array, " w"]
    sent: Int[Array, ""]
    density: Float[Array, ""]
    threshold: Float[Array, " w"]
    dropped: Bool[Array, " w"]
    details: Any = ()


class Delivery(NamedTuple):
    """The averaged update, and the coordinates of this worker's vector that went out.

    Attributes:
      mean: Float[n], replicated: the averaged update; 0 where nothing was delivered.
        Its values are representable in the gradient's dtypes.
      delivered: Int32[m], per worker: the coordinates of this worker's vector that went
        out; empty slots hold `n`. `None` stands for every coordinate.
      left: Float[m], per worker: the value that stays behind at each of them, such as a
        rounding error, or 0. Float[n] if `delivered` is `None`.
      report: Report, replicated.
    """

    mean: Float[Array, " n"]
    delivered: Int[Array, " m"] | None
    left: Float[Array, " m"]
    report: Report


def no_state(layout: Layout, worker_count: int) -> tuple[()]:
    """`init` of a part that carries nothing to the next step."""
    del layout, worker_count
    return ()


def no_details(layout: Layout, worker_count: int) -> tuple[()]:
    """`Exchange.details` of an exchange that reports nothing of its own."""
    del layout, worker_count
    return ()


def unchanged(state: State, report: Report, step: Step) -> State:
    """`Sparsifier.adapt` of a sparsifier that does not follow the reports."""
    del report, step
    return state


class Sparsifier(NamedTuple):
    """Chooses the coordinates that a worker would like to send.

    Attributes:
      select: `(vector [n], state, step) -> (Choice, state)`, per worker.
      support: how the workers' choices relate: "disjoint", "overlapping", "agreed"
        (equal on all workers), or "everything". See `Exchange.accepts`.
      init: `(layout, worker_count) -> state`, replicated or marked `PerWorker`.
      adapt: `(state, report, step) -> state`. Sees replicated facts only, so the state
        stays equal on all workers.
      lossless: whether every non-zero coordinate has to be delivered in its own step.
        If `demand` exceeds the slots, some exchanges then average whole vectors.
      reads: the names in `Report.details` that `adapt` reads. `Exchange.tells` has to
        contain them.
    """

    select: Callable[[Float[Array, " n"], State, Step], tuple[Choice, State]]
    support: str
    init: Callable[[Layout, int], State] = no_state
    adapt: Callable[[State, Report, Step], State] = unchanged
    lossless: bool = False
    reads: frozenset[str] = frozenset()


class Exchange(NamedTuple):
    """Delivers choices, and tells each worker which of its values were delivered.

    Attributes:
      apply: `(vector [n], choice, state, step) -> (Delivery, state)`.
      accepts: the kinds of `Sparsifier.support` that the exchange can deliver.
      name: for error messages.
      init: `(layout, worker_count) -> state`, replicated or marked `PerWorker`.
      details: `(layout, worker_count) -> NamedTuple` of zeros: `Report.details` before
        the first step, which fixes their structure.
      tells: the names in `Report.details` that a sparsifier may read.
    """

    apply: Callable[[Float[Array, " n"], Choice, State, Step], tuple[Delivery, State]]
    accepts: frozenset[str]
    name: str
    init: Callable[[Layout, int], State] = no_state
    details: Callable[[Layout, int], Any] = no_details
    tells: frozenset[str] = frozenset()


class Memory(NamedTuple):
    """Keeps the vectors that a worker carries to the next step. Never communicates.

    Attributes:
      init: `(n) -> residual`, a pytree of float32 arrays. Per worker.
      accumulate: `(gradient, residual) -> (vector, residual)`, elementwise on arrays of
        one shape, with n coordinates in all. `sparsify` passes rows [1, n], and calls
        the function more than once per step. The vector overwrites the first leaf of
        the old residual; `settle` gets the new residual.
      settle: `(vector [n], delivery, residual) -> residual`.
    """

    init: Callable[[int], State]
    accumulate: Callable[[Float[Array, " n"], State], tuple[Float[Array, " n"], State]]
    settle: Callable[[Float[Array, " n"], Delivery, State], State]


class ThresholdRule(NamedTuple):
    """Finds the threshold of the part that a worker of an exclusive sparsifier scans.

    `quota` is the number of coordinates that the part should send; quotas sum to the
    target. `count` maps ascending thresholds Float[T] to Int32[T]: the number of
    coordinates of this worker's part with `|x| >= threshold`. Each call is one pass
    over the part.

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
