"""Sparsifier, exchange and memory: records of pure functions, with defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsejax.parts._records import Choice, Delivery, Report, Step

if TYPE_CHECKING:
    from jaxtyping import Array, Float

    from sparsejax._layout import Layout

State = Any


def no_state(layout: Layout, worker_count: int) -> tuple[()]:
    """`init` of a part that carries nothing to the next step.

    Args:
      layout: not read.
      worker_count: not read.

    Example:
      >>> no_state(None, 8)
      ()
    """
    del layout, worker_count
    return ()


def no_details(layout: Layout, worker_count: int) -> tuple[()]:
    """`Exchange.details` of an exchange that reports nothing of its own.

    Args:
      layout: not read.
      worker_count: not read.

    Example:
      >>> no_details(None, 8)
      ()
    """
    del layout, worker_count
    return ()


def unchanged(state: State, report: Report, step: Step) -> State:
    """`Sparsifier.adapt` of a sparsifier that does not follow the reports.

    Args:
      state: the state after `select`.
      report: not read.
      step: not read.

    Example:
      >>> unchanged((), None, None)
      ()
    """
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

    Example:
      The first half of the coordinates in even steps, and the others in odd steps:

      >>> import jax.numpy as jnp
      >>> def select(vector, state, step):
      ...     slots = -(-step.n // 2)
      ...     indices = jnp.arange(slots, dtype=jnp.int32) + slots * (step.index % 2)
      ...     indices = jnp.minimum(indices, step.n)  # empty slots hold n
      ...     return Choice(indices, jnp.int32(slots), jnp.float32(0)), state
      >>> halves = Sparsifier(select, support="agreed")
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
      tells: the names in `Report.details` that this exchange reports to sparsifiers.
      wide: whether `apply` delivers whole vectors of float64 without a loss. Other
        vectors are float32.
      abstains: whether a worker whose vector is zero adds nothing to the mean, so that
        it can be left out of a step.
      receive: `(vector, state, step) -> (vector, arrived)`, for exchanges that deliver
        later than they send: runs before the sparsifier chooses, and `apply` gets
        `arrived` instead of the state. `None` for exchanges that deliver at once.
      lag: static, the number of steps between a choice and its mean and report. If it
        is 1 or more, `details.present`, Bool[w], marks the workers that took part in
        the step of the choice; the mean is divided by their number.
      later: `(sparsifier, workers) -> Exchange`: the same exchange, late, for
        `sparsejax.delayed`. `None` if there is no such form.

    Example:
      The built-in all-reduce under another name:

      >>> import sparsejax
      >>> mine = sparsejax.exchanges.dense()._replace(name="mine")
    """

    apply: Callable[[Float[Array, " n"], Choice, State, Step], tuple[Delivery, State]]
    accepts: frozenset[str]
    name: str
    init: Callable[[Layout, int], State] = no_state
    details: Callable[[Layout, int], Any] = no_details
    tells: frozenset[str] = frozenset()
    wide: bool = False
    abstains: bool = True
    receive: Callable[..., tuple[Float[Array, " n"], Any]] | None = None
    lag: int = 0
    later: Callable[[Sparsifier, Any], Exchange] | None = None


class Memory(NamedTuple):
    """Keeps the vectors that a worker carries to the next step. Never communicates.

    Attributes:
      init: `(n) -> residual`, a pytree of float32 arrays. Per worker. The first leaf is
        the gradient that waits, Float32[n]: mass is counted there. All leaves are zero
        at first, and zero gradients keep them zero.
      accumulate: `(gradient, residual) -> (vector, residual)`, elementwise on arrays of
        one shape, with n coordinates in all. `sparsify` passes rows [1, n], and calls
        the function more than once per step. It returns the first leaf as it is: the
        vector takes the place of this leaf, so that no copy is made.
      settle: `(vector [n], delivery, residual) -> residual`. Gets the residual from
        `accumulate`, with the vector as its first leaf.

    Example:
      Error feedback that forgets a tenth of the residual in each step, as
      `memories.decayed(0.9)` does:

      >>> import sparsejax
      >>> keep_all = sparsejax.memories.error_feedback()
      >>> forgetful = keep_all._replace(
      ...     accumulate=lambda grads, kept: (grads + 0.9 * kept, kept)
      ... )
    """

    init: Callable[[int], State]
    accumulate: Callable[[Float[Array, " n"], State], tuple[Float[Array, " n"], State]]
    settle: Callable[[Float[Array, " n"], Delivery, State], State]
