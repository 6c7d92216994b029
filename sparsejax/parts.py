"""The records that pass between the parts, and the protocols the parts fulfil.

Shapes: `n` coordinates, `k` payload slots per worker (static), `w` workers, `m`
delivered coordinates. *Per worker* values differ between workers, *replicated* values
are equal on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int, Shaped

    from sparsejax._layout import Layout
    from sparsejax._workers import Workers

State = Any


def no_state(layout: Any, worker_count: int) -> tuple[()]:
    """`Exchange.init` of an exchange that carries nothing to the next step."""
    del layout, worker_count
    return ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """Where each worker's indices lie: known to all, so that none of it is sent.

    Attributes:
      start: Int32[w], replicated. First coordinate that each worker may choose.
      span: static. No worker chooses at or beyond `start + span`.
    """

    start: Int[Array, " w"]
    span: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Agreed:
    """In place of a `Window`: all workers have the same indices, so none is sent."""


class Payload(NamedTuple):
    """What this worker would like to send. Per worker.

    Attributes:
      indices: Int32[k], ascending; empty slots hold `n`, so that gathers fill and
        scatters drop. `None`: the whole vector.
      values: Float[k], this worker's values at `indices`, 0 in empty slots. `None`
        with `indices=None`. Float[k, D]: the vector is taken as `n / D` rows, and
        `indices` and `demand` are of rows; empty slots hold `n / D`.
      demand: Int32[], how many coordinates qualified before truncation to `k`.
      threshold: Float[], the threshold that was applied; 0 where there is none.
      dropped: Bool[], whether this worker's gradient was left out of the step;
        filled in by `sparsify`.
      window: where every worker's indices lie, `None` for anywhere in `[0, n)`, or
        `Agreed()` where they are replicated.
      complete: Bool[], or True for always: whether nothing is missing that may not
        wait. False asks the exchange for the mean of whole vectors.
      gradient_square: Float[], mean square of this worker's gradient, before the memory
        added to it; filled in by `sparsify` for an exchange that asks for it.
    """

    indices: Int[Array, " k"] | None
    values: Float[Array, " k *D"] | None
    demand: Int[Array, ""]
    threshold: Float[Array, ""]
    dropped: Bool[Array, ""] | bool = False
    window: Window | Agreed | None = None
    complete: Bool[Array, ""] | bool = True
    gradient_square: Float[Array, ""] | None = None


class Report(NamedTuple):
    """What happened in a step; what users log. Replicated.

    Attributes:
      demand: Int32[w], how many coordinates qualified on each worker.
      sent: Int32[], how many distinct coordinates of the update were delivered.
      density: Float[], `sent / n`.
      threshold: Float[w], the threshold that each worker applied.
      dropped: Bool[w], which workers' gradients were non-finite and left out.
      details: NamedTuple, what is particular to the exchange.

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
    """What everybody got, and what of this worker's vector went out.

    Attributes:
      mean: Float[n], replicated. The averaged update; 0 where nothing was delivered.
        Representable in the gradient's dtypes.
      delivered: Int32[m], per worker: coordinates of this worker's vector that went
        out; empty slots hold `n`. `None`: every coordinate.
      left: Float[m], per worker: what stays at those coordinates: zeros, or the
        rounding error. Float[n] where `delivered` is `None`.
      report: Report, replicated.
    """

    mean: Float[Array, " n"]
    delivered: Int[Array, " m"] | None
    left: Float[Array, " m"]
    report: Report


class Sparsifier(NamedTuple):
    """Chooses what a worker would like to send.

    Attributes:
      init: `(layout, worker_count) -> state`, replicated or marked `PerWorker`.
      select: `(vector [n], state, step [], workers, layout) -> (Payload, state)`, per
        worker.
      adapt: `(state, report, step [], layout) -> state`. It sees replicated facts only,
        so the state stays equal on all workers.
      support: how the workers' choices relate: "disjoint", "overlapping", "agreed"
        (equal on all of them), or "everything". Exchanges say which they accept.
    """

    init: Callable[[Layout, int], State]
    select: Callable[
        [Float[Array, " n"], State, Int[Array, ""], Workers, Layout],
        tuple[Payload, State],
    ]
    adapt: Callable[[State, Report, Int[Array, ""], Layout], State]
    support: str


class Exchange(NamedTuple):
    """Delivers payloads: the only part that decides what was delivered.

    Attributes:
      init: `(layout, worker_count) -> state`, replicated; mostly `()`.
      apply: `(vector [n], payload, state, step [], workers, layout) ->
        (Delivery, state)`.
      report: `(layout, worker_count) -> Report` of zeros: the report of step -1, which
        fixes its structure.
      accepts: the kinds of `Sparsifier.support` that it can deliver.
      name: for error messages.
      needs_gradient_square: whether `Payload.gradient_square` is to be filled in, which
        costs a pass over the gradient.
    """

    init: Callable[[Layout, int], State]
    apply: Callable[
        [Float[Array, " n"], Payload, State, Int[Array, ""], Workers, Layout],
        tuple[Delivery, State],
    ]
    report: Callable[[Layout, int], Report]
    accepts: frozenset[str]
    name: str
    needs_gradient_square: bool = False


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
      movement: which topology belongs to it, "published" or "balanced".

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
    movement: str


class Partition(NamedTuple):
    """Contiguous exclusive parts of `[0, n)`, which may move from step to step.

    Attributes:
      init: `(n, worker_count) -> state`, replicated.
      bounds: `(state, n, worker_count, target) -> Int32[w + 1]`, ascending
        coordinates: part `p` is `[bounds[p], bounds[p + 1])`. Replicated.
      span: `(n, worker_count, target) -> int`, static: no part is ever longer.
      adapt: `(state, n, target, demand [w], threshold [w], histogram [B]) -> state`:
        replicated; `demand` and `threshold` ordered by part, `histogram` counts the
        delivered coordinates of each block (`partitions.blocks`).
    """

    init: Callable[[int, int], State]
    bounds: Callable[[State, int, int, int], Int[Array, " w+1"]]
    span: Callable[[int, int, int], int]
    adapt: Callable[..., State]


if TYPE_CHECKING:
    Vector = Shaped[Array, " n"]
