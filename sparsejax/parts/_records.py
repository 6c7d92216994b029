"""The records that pass between the parts in one step."""

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
      present: Bool[], per worker: whether this worker takes part; `None` if all do.
      mean_square: `() -> Float[]`, per worker: the mean square of this worker's
        gradient, before the memory adds the residual. Each call is one pass over the
        gradient.

    Example:
      >>> def select(vector, state, step):  # of a sparsifier: one part per worker
      ...     size = step.n // step.w
      ...     indices = step.rank * size + jnp.arange(size, dtype=jnp.int32)
      ...     return Choice(indices, jnp.int32(size), jnp.float32(0)), state
    """

    index: Int[Array, ""]
    workers: Workers
    layout: Layout
    support: str = "everything"
    lossless: bool = False
    dropped: Bool[Array, ""] | bool = False
    present: Bool[Array, ""] | None = None
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
    """The range in which each worker's indices lie.

    All workers know it, so an index takes fewer bits.

    Attributes:
      start: Int32[w], replicated: the first coordinate that each worker may choose.
      span: static: no worker chooses a coordinate at or beyond `start + span`.
      usual: static, the span for which the message has full room; by default `span`.
      long: Bool[w], replicated: whether a worker may choose coordinates at or beyond
        `start + usual`. Its indices take more bits each, so its last slots must be
        empty: all from `sparsejax.vectors.room(k, usual, span)` on.

    Example:
      Four workers, each with a quarter of 100 coordinates:

      >>> window = Window(25 * jnp.arange(4, dtype=jnp.int32), span=25)
    """

    start: Int[Array, " w"]
    span: int = dataclasses.field(metadata={"static": True})
    usual: int | None = dataclasses.field(default=None, metadata={"static": True})
    long: Bool[Array, " w"] | None = None


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

    Example:
      Two of five coordinates, in a message of three slots; four had qualified:

      >>> indices = jnp.array([0, 3, 5], jnp.int32)
      >>> choice = Choice(indices, demand=jnp.int32(4), threshold=jnp.float32(0.5))
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
      dropped: Bool[w], True for workers that were left out of the step: their gradient
        was not finite, or they were absent (`present=`). With `nonfinite="propagate"`,
        True for workers whose gradient made the update NaN.
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
        out; empty slots hold `n`. `None` stands for every coordinate: a memory that
        forgets at delivered coordinates, as `momentum_correction` does, forgets all.
      left: Float[m], per worker: the value that this worker keeps at each of them, such
        as a rounding error, or 0. Float[n] if `delivered` is `None`.
      report: Report, replicated.

    Example:
      The end of `apply` of an exchange that averages whole vectors:

      >>> def deliver(vector, report, step):
      ...     mean = step.workers.mean(vector)
      ...     rounded = step.layout.round_all(mean)
      ...     return Delivery(rounded, None, mean - rounded, report)
    """

    mean: Float[Array, " n"]
    delivered: Int[Array, " m"] | None
    left: Float[Array, " m"]
    report: Report
