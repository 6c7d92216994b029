"""`sparsify`: a sparsifier, an exchange and a memory as one optax transformation."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax import _entry
from sparsejax._checks import check_choice, check_part
from sparsejax._gradient import Gradient, with_first
from sparsejax._layout import Layout, Structure
from sparsejax._report import zero_report
from sparsejax._views import two_views
from sparsejax._workers import AxisName, Workers
from sparsejax.exchanges._dense import EVERY_SUPPORT
from sparsejax.parts import Exchange, Memory, Report, Sparsifier, Step
from sparsejax.parts._absence import among_present, keep_waiting, without_gaps
from sparsejax.parts._declared import declared
from sparsejax.parts._vocabulary import check_names
from sparsejax.placement import _groups as groups
from sparsejax.placement._allocation import allocate
from sparsejax.placement._markers import PerWorker, add_worker_axis

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

NONFINITE_POLICIES = ("drop", "propagate")


class SparsifyState(NamedTuple):
    """State of `sparsify`. Replicated, except the parts that are marked `PerWorker`.

    Attributes:
      step: Int32[], how many updates were made.
      memory: PerWorker, the residual: float32 [w, n] globally, [1, n] on a worker.
      sparsifier: state of the sparsifier.
      exchange: state of the exchange.
      report: Report of the last step; zeros after `init`.
      structure: static, which tree and which kind of method the state was made for.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> state = sparsejax.init(sparsejax.exdyna(density=0.1), jnp.zeros(50), mesh)
      >>> int(state.step), state.memory.per_worker.shape
      (0, (8, 50))
    """

    step: Int[Array, ""]
    memory: PerWorker
    sparsifier: Any
    exchange: Any
    report: Report
    structure: Structure


class SparsifyTransformation(optax.GradientTransformationExtraArgs):
    """A transformation made by `sparsify`, with its parts.

    Attributes:
      parts: the method.
      nonfinite: the policy.
    """

    parts: _Parts
    nonfinite: str

    def with_parts(
        self, *, exchange: Exchange | None = None, memory: Memory | None = None
    ) -> SparsifyTransformation:
        """The same method with another exchange or memory."""
        return sparsify(
            self.parts.sparsifier,
            exchange=exchange or self.parts.exchange,
            memory=memory or self.parts.memory,
            axis_name=self.parts.workers.axis_name,
            nonfinite=self.nonfinite,
        )


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A method: three parts, and the workers that run it."""

    sparsifier: Sparsifier
    exchange: Exchange
    memory: Memory
    workers: Workers

    @property
    def method(self) -> str:
        """A name for the method: states of methods with another name are refused."""
        # No densities and capacities: they may change from one run to the next.
        return f"{self.sparsifier.support} choices through `{self.exchange.name}`"

    @property
    def wide(self) -> bool:
        """Whether the method keeps all bits of float64 gradients."""
        kept = jax.tree.leaves(jax.eval_shape(lambda: self.memory.init(1)))
        everything = self.sparsifier.support == "everything"
        return self.exchange.wide and everything and not kept


def sparsify(
    sparsifier: Sparsifier,
    *,
    exchange: Exchange,
    memory: Memory,
    axis_name: AxisName = "data",
    nonfinite: str = "drop",
) -> SparsifyTransformation:
    """Composes the three parts of a method; the recipes are made with it.

    In each step every worker adds its gradient to its residual, selects coordinates,
    takes part in the exchange, and keeps the values that were not delivered.

    Args:
      sparsifier: chooses the coordinates that a worker would like to send.
      exchange: delivers them, and decides which values were delivered.
      memory: keeps the other values for the next step.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      nonfinite: "drop": a worker adds zeros in a step if its gradient, or the sum of
        the coordinates, is not finite. The mean still divides by the number of
        workers, and `report.dropped` marks the worker. "propagate": the whole update
        of that step is NaN and all residuals keep their values. With both, accumulated
        values are clipped to `jnp.finfo(dtype).max / (2 w)`, so that no sum over the w
        workers overflows.

    Returns:
      A transformation whose `update` takes this worker's **local** gradients and
      returns the **same** averaged updates on every worker. Inside `jax.shard_map` and
      `jax.pmap` (axis bound) gradients are this worker's; under plain `jax.jit` they
      come from `sparsejax.value_and_grad`. With `present=` (Bool[] per worker; Bool[w]
      under plain `jax.jit` and `simulate`) `update` leaves workers out of a step: see
      the guide on many hosts.

    Raises:
      TypeError: if an argument is not a part, such as a function that was not called,
        or if names in a part are not a set.
      ValueError: if the exchange cannot deliver the sparsifier's choices, or does not
        report a fact that the sparsifier reads; for an unknown kind of choices or
        `nonfinite`; if `axis_name` contains an axis twice.

    Example:
      >>> from sparsejax import exchanges, memories, sparsifiers, sparsify
      >>> tx = sparsify(
      ...     sparsifiers.everything(),
      ...     exchange=exchanges.dense(),
      ...     memory=memories.none(),
      ... )
    """
    check_part("sparsifier", sparsifier, Sparsifier, "sparsifiers.topk(0.01)")
    check_part("exchange", exchange, Exchange, "exchanges.union()")
    check_part("memory", memory, Memory, "memories.error_feedback()")
    check_names(sparsifier, exchange, EVERY_SUPPORT)
    _check_pair(sparsifier, exchange)
    check_choice("nonfinite", nonfinite, NONFINITE_POLICIES)
    workers = Workers(axis_name)
    parts = _Parts(sparsifier, exchange, memory, workers)
    first = functools.partial(_first_state, parts)

    def init(params):
        _entry.check_init(params, workers)

        def start(tree, axes=()):
            start_of_one = functools.partial(first, Layout.of(tree))
            return allocate(start_of_one, workers, shard_axes=axes)

        if workers.bound():
            return start(params)
        return groups.init(start, params, workers)

    def update(updates, state, params=None, **extra_args):
        del params
        entered = _entry.enter(updates, state, workers, first, extra_args)
        layout, updates, local = entered
        if layout.dtype == jnp.float64 and not parts.wide:
            _entry.refuse_wide(layout)
        gradient = Gradient.of(updates, layout, state.memory.per_worker)
        kept = local._replace(memory=state.memory)
        present = _entry.present_of(extra_args, exchange)
        if present is not None:
            present = workers.localize(present)
        if nonfinite == "drop":
            mean, new = _one_step(
                parts, gradient, kept, layout, gradient.broken, present
            )
        else:
            mean, new = _propagate(parts, gradient, kept, local, layout, present)
        return layout.unflatten(mean), add_worker_axis(new, workers)

    made = SparsifyTransformation(init, two_views(update, workers))
    made.parts, made.nonfinite = parts, nonfinite
    return made


def _check_pair(sparsifier: Sparsifier, exchange: Exchange) -> None:
    """Raises ValueError if the exchange cannot serve the sparsifier."""
    if sparsifier.support not in exchange.accepts:
        raise ValueError(
            f"exchange: `{exchange.name}` cannot deliver {sparsifier.support} choices, "
            f"only {' or '.join(sorted(exchange.accepts))} ones. Use an exchange that "
            f"accepts this sparsifier."
        )
    missing = sorted(sparsifier.reads - exchange.tells)
    if missing:
        raise ValueError(
            f"exchange: this sparsifier reads {', '.join(map(repr, missing))} in "
            f"`report.details`, which `{exchange.name}` does not report. Use an "
            f"exchange that does, such as `sparsejax.exchanges.union()`."
        )


def _first_state(parts: _Parts, layout: Layout, worker_count: int) -> SparsifyState:
    """One worker's first state; marked leaves have no leading axis yet."""
    details = parts.exchange.details(layout, worker_count)
    return SparsifyState(
        step=jnp.zeros((), jnp.int32),
        memory=PerWorker(parts.memory.init(layout.n)),
        sparsifier=parts.sparsifier.init(layout, worker_count),
        exchange=parts.exchange.init(layout, worker_count),
        report=zero_report(worker_count, details),
        structure=Structure.of(layout.leaves, parts.method),
    )


def _adapt(parts: _Parts, state: Any, report: Report, step: Step) -> Any:
    """The sparsifier's state after the step whose report has arrived. Replicated."""
    lag, sparsifier = parts.exchange.lag, parts.sparsifier
    seen = without_gaps(report, report.details.present) if lag else report
    seen = declared(seen, sparsifier.reads, parts.exchange.name)
    if not lag:
        return sparsifier.adapt(state, seen, step)
    then = dataclasses.replace(step, index=step.index - lag)
    adapted = sparsifier.adapt(state, seen, then)
    # Before step `lag`, the report belongs to no step.
    begun = step.index >= lag
    return jax.tree.map(lambda a, b: jnp.where(begun, a, b), adapted, state)


def _propagate(
    parts: _Parts,
    gradient: Gradient,
    kept: SparsifyState,
    local: SparsifyState,
    layout: Layout,
    present: Bool[Array, ""] | None,
) -> tuple[Float[Array, " n"], SparsifyState]:
    """A step of the policy "propagate": one broken gradient makes the update NaN."""
    workers = parts.workers

    def poisoned(who):
        details = parts.exchange.details(layout, workers.count())
        report = zero_report(workers.count(), details)._replace(dropped=who)
        nan = jnp.full((layout.n,), jnp.nan, layout.dtype)
        return nan, local._replace(step=local.step + 1, report=report)

    def healthy(who):
        del who
        return _one_step(parts, gradient, kept, layout, False, present)

    # An absent worker's gradient does not matter.
    here = True if present is None else present
    who = workers.gather(gradient.broken & here)
    return workers.cond(jnp.any(who), poisoned, healthy, who)


def _one_step(
    parts: _Parts,
    gradient: Gradient,
    state: SparsifyState,
    layout: Layout,
    skip: Bool[Array, ""] | bool,
    present: Bool[Array, ""] | None,
) -> tuple[Float[Array, " n"], SparsifyState]:
    """The mean [n], replicated, and this worker's next state.

    Args:
      parts: the method.
      gradient: this worker's gradient.
      state: per worker; the residual as it is stored, [1, n], so that the accumulated
        vector can overwrite it.
      layout: the layout of the vector.
      skip: Bool[], per worker: whether the gradient is left out.
      present: Bool[], per worker: whether this worker takes part; None if all do.
    """
    if present is not None:
        skip = skip | ~present
    # With this bound, sums over the workers stay finite, and so do the rounded sums.
    bound = float(jnp.finfo(layout.dtype).max) / (2 * parts.workers.count())
    step = Step(
        state.step,
        parts.workers,
        layout,
        support=parts.sparsifier.support,
        lossless=parts.sparsifier.lossless,
        dropped=jnp.asarray(skip),
        present=present,
        mean_square=lambda: gradient.mean_square(skip),
    )
    vector, residual = gradient.add_to(
        parts.memory, state.memory.per_worker, state.step, skip=skip, bound=bound
    )
    if present is not None:
        vector = jnp.where(present, vector, 0)
    exchange, arrived = parts.exchange, state.exchange
    if exchange.receive is not None:
        vector, arrived = exchange.receive(vector, arrived, step)
    # A late exchange may have added rounding errors to an absent worker's vector.
    shown = vector if present is None else jnp.where(present, vector, 0)
    choice, chosen = parts.sparsifier.select(shown, state.sparsifier, step)
    delivery, exchanged = exchange.apply(shown, choice, arrived, step)
    residual = parts.memory.settle(vector, delivery, with_first(residual, vector))
    mean, seen = delivery.mean, delivery.report
    if present is not None:
        old = jax.tree.map(lambda x: x[0], state.memory.per_worker)
        residual = keep_waiting(residual, old, present)
        if not exchange.lag:
            here = parts.workers.gather(present)
            mean, seen = among_present(mean, here), without_gaps(seen, here)
    adapted = _adapt(parts, chosen, seen, step)
    return mean, SparsifyState(
        step=state.step + 1,
        memory=PerWorker(residual),
        sparsifier=adapted,
        exchange=exchanged,
        report=delivery.report,
        structure=state.structure,
    )
