"""Rounds of local steps: each worker trains alone, then their sums are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sparsejax._checks import as_present, check_count, path_name
from sparsejax._report import reports
from sparsejax._workers import AxisName, Workers
from sparsejax.parts._absence import present_number
from sparsejax.placement._allocation import allocate
from sparsejax.placement._everybody import everybody, looked_at
from sparsejax.placement._local_steps import local_steps
from sparsejax.placement._markers import (
    PerWorker,
    add_worker_axis,
    drop_worker_axis,
)
from sparsejax.placement._specs import shard_like_parameters


class RoundsState(NamedTuple):
    """State of a training run in `rounds`.

    Attributes:
      inner: PerWorker, the state of the inner optimizer: leaves [w, ...] globally,
        [1, ...] on a worker.
      outer: the state of the outer transformation; `sparsejax.report` finds the facts
        of the last exchange in it.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> outer = optax.chain(sparsejax.dense(), optax.sgd(1.0))
      >>> training = sparsejax.rounds(jnp.dot, optax.adam(0.1), outer, steps=4)
      >>> state = sparsejax.init(training, jnp.zeros(5), jax.make_mesh((8,), ("data",)))
      >>> state.inner.per_worker[0].mu.shape
      (8, 5)
    """

    inner: PerWorker
    outer: Any


class Rounds(NamedTuple):
    """Training in rounds of local steps, made by `rounds`.

    Attributes:
      init: `(params) -> RoundsState`. `sparsejax.init` and `sparsejax.resize_workers`
        accept the whole record instead of a transformation.
      step: `(params, state, batches, *per_step, present=None, **shared)`. Returns the
        new parameters, the state and the losses, and with `has_aux` auxiliary values:
        see `rounds`.
      outer: the outer transformation.
      steps: local steps in a round.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax
      >>> outer = optax.chain(sparsejax.exdyna(0.01), optax.sgd(1.0))
      >>> sparsejax.rounds(jnp.dot, optax.sgd(0.1), outer, steps=30).steps
      30
    """

    init: Callable[[Any], RoundsState]
    step: Callable[..., Any]
    outer: optax.GradientTransformation
    steps: int


def rounds(
    loss_fn: Callable[..., Any],
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    steps: int,
    has_aux: bool = False,
    axis_name: AxisName = "data",
    microbatches: int = 1,
    by: str = "shard_map",
) -> Rounds:
    """Local training: `steps` optimizer steps on each worker, then one exchange.

    In a round worker r starts from the shared parameters `params`, takes H steps of
    `inner` on its own batches, and hands the sum of its updates to `outer` as if that
    were a gradient:

        delta_r = -sum over the H steps of the updates of `inner` on worker r
        params' = params + outer.update(delta_1 .. delta_w)

    If `outer` is a recipe and `optax.sgd(1.0)`, the parameters move by the mean of the
    sums. The state of `inner` stays on its worker and counts local steps, as learning
    rate schedules do. The sum is kept in float32, instead of a difference of
    parameters, which would be mostly zero in bfloat16. A worker whose sum is not finite
    takes no part in the exchange (see `nonfinite` of the recipe), and keeps its inner
    state from before the round.

    One call of `step` is one round. Where the axis is not bound, under plain
    `jax.jit` with a mesh that is set, batches are global; inside `jax.shard_map` they
    are this worker's.

    Args:
      loss_fn: `(params, batch, *per_step, **shared) -> loss`, the loss of one worker's
        batch, averaged over that batch.
      inner: the optimizer of the local steps. Its updates get `value=` and `grad=`.
      outer: a recipe, and the optimizer after it.
      steps: H, local steps in a round.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      microbatches: see `sparsejax.value_and_grad`.
      by: see `sparsejax.value_and_grad`.

    Returns:
      `Rounds`, with `init(params)` and `step(params, state, batches, *per_step,
      present=None, **shared)`. Leaves of `batches` are [H, w b, ...], or [H, b, ...]
      where the axis is bound; leaves of `per_step`, such as random keys, are [H, ...]
      and equal on all workers; `shared` is equal in all steps too. `present`, Bool[w],
      or Bool[] where the axis is bound, leaves workers out of a round. The step returns
      `(params, state, losses)`, with `has_aux` `(params, state, losses, aux)`: losses
      are Float[H], the mean over the workers present, or this worker's where the axis
      is bound; `aux` is [w, H, ...], or [H, ...].

    Raises:
      ValueError: if `outer` holds no recipe, or `inner` holds one; for batches of
        another number of steps; and see `sparsejax.value_and_grad`.

    Example:
      DiLoCo with a sparse exchange:

      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch @ params - 1.0) ** 2)
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> training = sparsejax.rounds(
      ...     loss_fn,
      ...     optax.adamw(1e-2),
      ...     optax.chain(sparsejax.exdyna(density=0.5), outer),
      ...     steps=10,
      ... )
      >>> batches, params = jnp.ones((10, 16, 3)), jnp.zeros(3)
      >>> with jax.set_mesh(jax.make_mesh((8,), ("data",))):
      ...     state = training.init(params)
      ...     params, state, losses = jax.jit(training.step)(params, state, batches)
      >>> losses.shape
      (10,)

    References:
      Stich, "Local SGD Converges Fast and Communicates Little", 2018. Douillard et al.,
      "DiLoCo", 2023.
    """
    workers, steps = Workers(axis_name), check_count("steps", steps)
    inner = optax.with_extra_args_support(inner)
    outer = optax.with_extra_args_support(outer)
    options = {"has_aux": has_aux, "axis_name": axis_name, "microbatches": microbatches}

    def init(params):
        sharded = shard_like_parameters(params, workers)
        made = allocate(lambda _, p: sharded(_start(inner, p)), workers, params)
        return RoundsState(made, _with_recipe(outer.init(params)))

    def step(params, state, batches, *per_step, present=None, **shared):
        _check_steps(batches, steps, "batches")
        _check_steps(per_step, steps, "per_step")
        bound = workers.bound()
        if not bound:
            workers.require_mesh("rounds")
        if present is not None:
            shape = () if bound else (workers.mesh_count(),)
            present = as_present(present, shape)
        # Where the axis is not bound, types do not show mistakes in the loss.
        fun = loss_fn if bound else looked_at(loss_fn, workers)
        alone = local_steps(fun, inner, workers, steps, **options)
        if bound:
            own = drop_worker_axis(state.inner, workers).per_worker
            losses, (own, aux), delta = alone(
                params, own, batches, per_step, shared, present
            )
            kept = add_worker_axis(PerWorker(own), workers)
        else:

            def of_rows(params, rows, batches, per_step, shared):
                own, here = jax.tree.map(lambda x: x[0], rows)
                batches = _steps_first(batches)
                losses, kept, delta = alone(
                    params, own, batches, per_step, shared, here
                )
                return jnp.mean(losses), (losses, *kept), delta

            rows = (state.inner.per_worker, present)
            _, (losses, rows, aux), delta = everybody(
                of_rows,
                [params, rows, _steps_first(batches), per_step, shared],
                {},
                workers=workers,
                batch_argnums=(1, 2),
                by=by,
                caller="rounds",
            )
            kept = PerWorker(rows)
            here = None if present is None else workers.spread(present)
            losses = mean_loss(losses, here)
        # Without the argument `outer` may be any optax transformation.
        absent = {} if present is None else {"present": present}
        updates, outer_state = outer.update(delta, state.outer, params, **absent)
        params = optax.apply_updates(params, updates)
        made = (params, RoundsState(kept, outer_state), losses)
        return (*made, aux) if has_aux else made

    return Rounds(init, step, outer, steps)


def mean_loss(losses: Any, present: Any) -> Any:
    """The mean over the workers of losses [w, H], or over those present."""
    if present is None:
        return jnp.mean(losses, axis=0)
    total = jnp.sum(jnp.where(present[:, None], losses, 0), axis=0)
    return total / present_number(present).astype(total.dtype)


def _start(inner: optax.GradientTransformation, params: Any) -> PerWorker:
    """The first inner state of a worker.

    Raises:
      ValueError: if the inner optimizer exchanges.
    """
    state = inner.init(params)
    if reports(state):
        raise ValueError(
            "rounds: the inner optimizer holds a recipe, which would exchange in every "
            "local step. Put the recipe into `outer`, `optax.chain(sparsejax.exdyna("
            "0.01), optax.sgd(1.0))`."
        )
    return PerWorker(state)


def _with_recipe(state: Any) -> Any:
    """The outer state, if it contains a recipe's state.

    Raises:
      ValueError: if it does not, so that workers would drift apart.
    """
    if not reports(state):
        raise ValueError(
            "rounds: the outer transformation holds no recipe, so nothing would "
            "average the workers' sums of updates. Put one first, "
            "`optax.chain(sparsejax.dense(), optax.sgd(1.0))`, or a sparse one."
        )
    return state


def _check_steps(tree: Any, steps: int, name: str) -> None:
    """Raises ValueError unless every leaf is [steps, ...]."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.shape(leaf)[:1] != (steps,):
            raise ValueError(
                f"rounds: {name}, `{path_name(path)}`, has the shape "
                f"{jnp.shape(leaf)}, and a round has steps={steps} local steps: the "
                f"first axis should have one entry for each, such as "
                f"`jnp.stack(batches_of_the_round)`. "
                f"Values that are equal in all steps are passed by keyword."
            )


def _steps_first(batches: Any) -> Any:
    """Swaps [H, b, ...] and [b, H, ...]: workers split the first axis."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batches)
