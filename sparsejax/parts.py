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
    """Which step it is, and who takes part: every part gets it.

    Attributes:
      index: Int32[], replicated: how many updates were made before.
      workers: static, the workers' axis: `gather`, `sum`, `mean` and the like.
      layout: static, where each leaf of the gradient lies in the vector.
      support: static, `Sparsifier.support` of the method.
      lossless: static, `Sparsifier.lossless` of the method.
      dropped: Bool[], per worker: whether this worker's gradient was left out.
      mean_square: `() -> Float[]`, per worker: the mean square of this worker's
        gradient, before the memory added to it. Each call costs a pass over it.
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
    """Where each worker's indices lie: known to all, so that less of them is sent.

    Attributes:
      start: Int32[w], replicated. First coordinate that each worker may choose.
      span: static. No worker chooses at or beyond `start + span`.
    """

    start: Int[Array, " w"]
    span: int = dataclasses.field(metadata={"static": True})


class Choice(NamedTuple):
    """What this worker would like to send. Per worker.

    Attributes:
      indices: Int32[k], ascending; empty slots hold `n`, so that gathers fill and
        scatters drop. `None`: the whole vector. With rows, indices of rows, and empty
        slots hold `n / row_size`.
      demand: Int32[], how many qualified before truncation to `k`.
      threshold: Float[], the threshold that was applied; 0 where there is none.
      window: where every worker's indices lie, or `None` for anywhere in `[0, n)`.
      row_size: static, D: an index stands for D coordinates in a row.
    """

    indices: Int[Array, " k"] | None
    demand: Int[Array, ""]
    threshold: Float[Array, ""]
    window: Window | None = None
    row_size: int = 1


class Report(NamedTuple):
    """What happened in a step; what users log. Replicated.

    Attributes:
      demand: Int32[w], how many coordinates qualified on each worker.
      sent: Int32[], how many distinct coordinates of the update were delivered.
      density: Float[], `sent / n`.
      threshold: Float[w], the threshold that each worker applied.
      dropped: Bool[w], which workers' gradients were non-finite and left out.
      details: NamedTuple, facts that only this exchange has.

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
    """What everybody got, and how much of this worker's vector went out.

    Attributes:
      mean: Float[n], replicated. The averaged update; 0 where nothing was delivered.
        Representable in the gradient's dtypes.
      delivered: Int32[m], per worker: coordinates of this worker's vector that went
        out; empty slots hold `n`. `None`: every coordinate.
      left: Float[m], per worker: the part of those coordinates that stays: zeros, or
        the rounding error. Float[n] where `delivered` is `None`.
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
        (equal on all of them), or "everything". Exchanges say which they accept.
      init: `(layout, worker_count) -> state`, replicated or marked `PerWorker`.
      adapt: `(state, report, step) -> state`. Only replicated facts come in, so the
        state stays equal on all workers.
      lossless: whether nothing may wait: where `demand` exceeds the slots, an exchange
        that can averages whole vectors in that step.
      reads: names in `Report.details` that `adapt` reads; the exchange has to tell
        them.
    """

    select: Callable[[Float[Array, " n"], State, Step], tuple[Choice, State]]
    support: str
    init: Callable[[Layout, int], State] = no_state
    adapt: Callable[[State, Report, Step], State] = unchanged
    lossless: bool = False
    reads: frozenset[str] = frozenset()


class Exchange(NamedTuple):
    """Delivers choices: the only part that decides what was delivered.

    Attributes:
      apply: `(vector [n], choice, state, step) -> (Delivery, state)`.
      accepts: the kinds of `Sparsifier.support` that it can deliver.
      name: for error messages.
      init: `(layout, worker_count) -> state`, replicated or marked `PerWorker`.
      details: `(layout, worker_count) -> NamedTuple` of zeros: `Report.details` before
        the first step, which fixes their structure.
      tells: names in `Report.details` that a sparsifier may read.
    """

    apply: Callable[[Float[Array, " n"], Choice, State, Step], tuple[Delivery, State]]
    accepts: frozenset[str]
    name: str
    init: Callable[[Layout, int], State] = no_state
    details: Callable[[Layout, int], Any] = no_details
    tells: frozenset[str] = frozenset()


class Memory(NamedTuple):
    """What a worker carries to the next step. Never communicates. Per worker.

    Attributes:
      init: `(n) -> residual`, a pytree of float32 arrays.
      accumulate: `(gradient, residual) -> (vector, residual)`, elementwise on arrays of
        any one shape with n coordinates: `sparsify` calls it on rows [1, n], and more
        than once in a step. The vector takes the place of the first leaf of the
        residual that came in; `settle` gets the one that comes out.
      settle: `(vector [n], delivery, residual) -> residual`.
    """

    init: Callable[[int], State]
    accumulate: Callable[[Float[Array, " n"], State], tuple[Float[Array, " n"], State]]
    settle: Callable[[Float[Array, " n"], Delivery, State], State]


class ThresholdRule(NamedTuple):
    """How an exclusive sparsifier finds the threshold of the part that it scans.

    `quota` is how many coordinates the part should send; quotas sum to the target.
    `count` maps thresholds Float[T], ascending, to Int32[T]: how many coordinates
    of this worker's part have `|x| >= threshold`. It costs one pass over the part.

    Attributes:
      init: `(target, worker_count) -> state`, replicated.
      find: `(state, part [], quota [], size [], count) -> Float[]`, the threshold
        for this step. Per worker.
      adapt: `(state, demand [w], threshold [w], target) -> state` after the step; both
        arrays replicated and ordered by *part*. `target` is an int, or Int32[] where
        the density is a schedule.
      capacity: `(target, n, worker_count) -> int`, payload slots per worker.
      limit: `(quota [], slots) -> Int32[]`, how many a worker may send at most.
      partition: how parts move that follow this rule's thresholds.

    Example:
      A rule that selects what exceeds a fixed magnitude, up to twice the target:

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
      span: `(n, worker_count, target) -> int`, static: no part is ever longer.
      adapt: `(state, n, target, demand [w], threshold [w], histogram [B]) -> state`:
        replicated; `demand` and `threshold` ordered by part. `histogram` counts the
        delivered coordinates of each block (`partitions.blocks`); `None` unless
        `reads` names it.
      reads: facts of the exchange that `adapt` needs: `{"histogram"}`, or none.

    Example:
      The published blocks, without their moves:

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
