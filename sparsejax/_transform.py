"""`sparsify`: a sparsifier, an exchange and a memory as one optax transformation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax import _xla
from sparsejax._checks import check_part
from sparsejax._layout import Layout, Structure
from sparsejax._nesting import refuse_wrappers
from sparsejax._workers import AxisName, Workers, sharded_axes, varying_axes
from sparsejax.parts import Exchange, Memory, Report, Sparsifier
from sparsejax.placement._allocation import allocate
from sparsejax.placement._markers import (
    PerWorker,
    add_worker_axis,
    drop_worker_axis,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Int

NONFINITE_POLICIES = ("drop", "propagate")


class SparsifyState(NamedTuple):
    """State of `sparsify`. Replicated, except what is marked `PerWorker`.

    Attributes:
      step: Int32[], how many updates were made.
      memory: PerWorker, the residual: float32 [w, n] globally, [1, n] on a worker.
      sparsifier: state of the sparsifier.
      exchange: state of the exchange.
      report: Report of the last step; zeros after `init`.
      structure: static, which tree the state was made for.

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


def sparsify(
    sparsifier: Sparsifier,
    *,
    exchange: Exchange,
    memory: Memory,
    axis_name: AxisName = "data",
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Composes the three parts of a method; the recipes are made with it.

    In each step every worker accumulates its gradient on what it kept, selects, takes
    part in the exchange, and keeps what the exchange did not deliver.

    Args:
      sparsifier: chooses what this worker would like to send.
      exchange: delivers it, and decides what was delivered.
      memory: what a worker carries to the next step.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      nonfinite: "drop": a worker whose gradient is not finite, or so large that its sum
        is not, adds none of it in that step, the mean still divides by the number of
        workers, and `report.dropped` says who it was. "propagate": the whole update
        of that step is NaN and all residuals keep their values. Either way what is
        accumulated is cut at `3.4e38 / (2 w)`, so that no sum over the w workers
        overflows.

    Returns:
      A transformation whose `update` takes this worker's **local** gradients and
      returns the **same** averaged updates on every worker. It must be called inside
      `jax.shard_map` (or `sparsejax.simulate`).

    Raises:
      TypeError: if a part is none, such as a function that was not called.
      ValueError: if the exchange cannot deliver what the sparsifier chooses, or for
        an unknown `nonfinite`.

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
    if sparsifier.support not in exchange.accepts:
        raise ValueError(
            f"exchange: `{exchange.name}` cannot deliver {sparsifier.support} choices, "
            f"only {' or '.join(sorted(exchange.accepts))} ones. Pick an exchange that "
            f"accepts this sparsifier."
        )
    if nonfinite not in NONFINITE_POLICIES:
        raise ValueError(
            f"nonfinite: got {nonfinite!r}, expected one of {NONFINITE_POLICIES}."
        )
    workers = Workers(axis_name)

    def init(params):
        refuse_wrappers("init")
        _check_whole("init", params, workers)
        layout = Layout.of(params)

        def make(worker_count):
            return SparsifyState(
                step=jnp.zeros((), jnp.int32),
                memory=PerWorker(memory.init(layout.n)),
                sparsifier=sparsifier.init(layout, worker_count),
                exchange=exchange.init(layout, worker_count),
                report=exchange.report(layout, worker_count),
                structure=layout.structure,
            )

        return allocate(make, workers)

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        refuse_wrappers("update")
        workers.require_bound("update")
        layout = Layout.of(updates)
        state.structure.check(layout.structure)
        _check_whole("update", updates, workers)
        _check_local(updates, workers, state)
        local = drop_worker_axis(state, workers)
        kept = state.memory.per_worker
        # Rows [1, m], as the residual is stored: see `_xla`.
        gradient = _xla.prepare(layout.rows(updates), kept)
        # Not finite if an element is not. Not `max`: XLA:CPU loses NaN in it.
        total = sum(jnp.sum(row, dtype=jnp.float32) for row in gradient)
        dropped = jnp.logical_not(jnp.isfinite(total))
        # Then sums over the workers stay finite, and so do the roundings of them.
        bound = float(jnp.finfo(jnp.float32).max) / (2 * workers.count())

        def healthy(skip, dropped):
            def used(row):
                return jnp.where(skip, 0.0, row.astype(jnp.float32))

            vector, residual = _xla.accumulate(
                memory, gradient, used, kept, state.step, bound
            )
            vector, residual = jax.tree.map(lambda row: row[0], (vector, residual))
            payload, chosen = sparsifier.select(
                vector, local.sparsifier, state.step, workers, layout
            )
            payload = payload._replace(dropped=dropped)
            if exchange.needs_gradient_square:
                # The number is dropped, and not the rows: those would be copied.
                square = sum(
                    jnp.sum(jnp.square(row.astype(jnp.float32))) for row in gradient
                )
                square = jnp.where(skip, 0.0, square / max(layout.n, 1))
                payload = payload._replace(gradient_square=square)
            delivery, exchanged = exchange.apply(
                vector,
                payload,
                local.exchange,
                state.step,
                workers,
                layout,
            )
            residual = memory.settle(vector, delivery, residual)
            adapted = sparsifier.adapt(chosen, delivery.report, state.step, layout)
            return delivery.mean, SparsifyState(
                state.step + 1,
                PerWorker(residual),
                adapted,
                exchanged,
                delivery.report,
                state.structure,
            )

        def poisoned(who):
            report = exchange.report(layout, workers.count())._replace(dropped=who)
            nan = jnp.full((layout.n,), jnp.nan, jnp.float32)
            return nan, local._replace(step=state.step + 1, report=report)

        if nonfinite == "drop":
            mean, new = healthy(dropped, dropped)
        else:
            who = workers.gather(dropped)
            mean, new = workers.cond(
                jnp.any(who),
                poisoned,
                lambda who: healthy(False, jnp.zeros_like(dropped)),
                who,
            )
        return layout.unflatten(mean), add_worker_axis(new, workers)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_whole(caller: str, tree: Any, workers: Workers) -> None:
    """Raises ValueError for leaves that are sharded over an axis of another kind."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = sharded_axes(leaf) - set(workers.axes)
        if axes:
            raise ValueError(
                f"{caller}: the leaf `{jax.tree_util.keystr(path) or '(root)'}` is "
                f"sharded over {sorted(axes)}, an automatic axis to this "
                f"transformation: to flatten it would gather it on every device. Name "
                f"the axis in the `axis_names` of `jax.shard_map`, so that each shard "
                f"is sparsified by itself, and wrap the transformation in "
                f"`sparsejax.per_shard(tx, shard_axis={sorted(axes)[0]!r})`."
            )


def _check_local(updates: Any, workers: Workers, state: SparsifyState) -> None:
    """Raises ValueError for gradients that vary over too few axes, or too many."""
    if not workers.typed():
        return
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    reduced = [
        f"`{jax.tree_util.keystr(path) or '(root)'}`"
        for path, leaf in leaves
        if not workers.is_local(leaf)
    ]
    if reduced:
        raise ValueError(
            f"update: the gradients {', '.join(reduced)} are typed as equal on all "
            f"workers of axis {workers.axis_name!r}, so they are already reduced: "
            f"under `check_vma=True`, `jax.grad` with respect to replicated "
            f"parameters sums over the workers. Differentiate with "
            f"`sparsejax.value_and_grad`, or with respect to "
            f"`sparsejax.localize(params)`, and do not `pmean` the gradients."
        )
    known = set(workers.axes) | varying_axes(state.step)
    for path, leaf in leaves:
        more = sorted(varying_axes(leaf) - known)
        if more:
            raise ValueError(
                f"update: the gradient `{jax.tree_util.keystr(path) or '(root)'}` also "
                f"varies over {more}, which `axis_name={workers.axis_name!r}` does not "
                f"name. If those are workers too, average over them first, "
                f"`jax.lax.pmean(grads, {more[0]!r})`, or exchange over all of them, "
                f"`axis_name={(*workers.axes, *more)!r}`. If they hold shards of the "
                f"model, use `sparsejax.per_shard(tx, shard_axis={more[0]!r})`."
            )
