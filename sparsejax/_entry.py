"""Checks of calls of `init` and `update`: their place, and their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax._checks import as_present, path_name
from sparsejax._layout import Layout, check_leaves
from sparsejax._nesting import calling_frames, refuse_wrappers
from sparsejax._workers import Workers, settle_axes, sharded_axes, varying_axes
from sparsejax.parts import Exchange
from sparsejax.placement._markers import drop_worker_axis

# The predicate's name in the functions of jax that trace branches.
_PREDICATES = {"cond": "pred", "switch": "index"}


def check_init(params: Any, workers: Workers) -> None:
    """Checks a call of `init`.

    Raises:
      TypeError: if a parameter is not real floating point.
      ValueError: for a call inside an optax wrapper, or for sharded leaves.
    """
    refuse_wrappers("init")
    check_leaves(params)
    if workers.bound():
        _check_whole("init", params, workers)


def enter(
    updates: Any,
    state: Any,
    workers: Workers,
    first: Callable[[Layout, int], Any],
    extra_args: dict[str, Any],
) -> tuple[Layout, Any, Any]:
    """Checks the arguments of `update`; returns layout, gradients and own state.

    The gradients are typed as equal along mesh axes of size 1. The state comes without
    its leading axis. `two_views` calls `update` only where the axis is bound.

    Raises:
      TypeError: if a gradient is not real floating point.
      ValueError: for a state of another tree, method, or number of workers, or with
        messages of another size in flight; for gradients that are sharded or already
        reduced; in a branch that only some workers enter; for a loss, `value=`, that
        differs between workers.
    """
    _check_branches(workers)
    _check_agreed(extra_args, workers)
    layout = Layout.of(updates)
    made = jax.eval_shape(lambda: first(layout, workers.count()))
    _check_made(state, made)
    local = drop_worker_axis(state, workers)
    _check_sizes(local, made)
    _check_whole("update", updates, workers)
    if workers.typed():
        known = frozenset(workers.axes) | varying_axes(state.step)
        updates = settle_axes(updates, known)
        _check_local(updates, workers, known)
    return layout, updates, local


def present_of(extra_args: dict[str, Any], exchange: Exchange) -> Any:
    """This worker's `present=`, an argument of `update`: Bool[], or None.

    Raises:
      TypeError, ValueError: see `sparsejax._checks.as_present`.
      ValueError: if an absent worker's zeros would change the mean.
    """
    present = extra_args.get("present")
    if present is None:
        return None
    if not exchange.abstains:
        raise ValueError(
            f"present: `{exchange.name}` sends a sign for every coordinate, so an "
            f"absent worker would vote too. Use a method that sends values, such as "
            f"`sparsejax.exdyna`."
        )
    return as_present(present, ())


def refuse_wide(layout: Layout) -> None:
    """Raises TypeError for float64 gradients: vectors and residuals are float32."""
    wide = [
        f"`{path or '(root)'}`"
        for (path, _), dtype in zip(layout.leaves, layout.dtypes, strict=True)
        if dtype == jnp.float64
    ]
    raise TypeError(
        f"update: the gradients {', '.join(wide)} are float64, and this method "
        f"accumulates and sends float32: the other bits would be lost. Cast them "
        f"before the recipe, `sparsejax.per_worker(optax.stateless(lambda "
        f"grads, _: optax.tree.cast(grads, 'float32')))`, make the parameters "
        f"float32, or use `sparsejax.dense()`, which averages in float64."
    )


def _check_made(state: Any, expected: Any) -> None:
    """Raises ValueError unless `state` has the structure of the `expected` state."""
    if isinstance(state, type(expected)):
        state.structure.check(expected.structure)
    given: Any = jax.tree.structure(state)
    if given == jax.tree.structure(expected):
        return
    had, wanted = (
        {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (state, expected)
    )
    others = ", ".join(f"`{name}`" for name in sorted(had ^ wanted)) or "their types"
    raise ValueError(
        f"update: the state was not made by this transformation: they differ in "
        f"{others}. Pass a state of its `init`. A checkpoint that was restored without "
        f"a target is made of dicts and lists: restore it with a target."
    )


def _check_sizes(state: Any, expected: Any) -> None:
    """Raises ValueError unless the exchange's state has the sizes of `expected`."""
    paths = jax.tree_util.tree_leaves_with_path(state.exchange)
    for (path, given), made in zip(
        paths, jax.tree.leaves(expected.exchange), strict=True
    ):
        if jnp.shape(given) != made.shape:
            raise ValueError(
                f"update: `{path_name(path)}` of the exchange's state has shape "
                f"{jnp.shape(given)}, and this transformation makes {made.shape}: the "
                f"state has messages in flight that were made with another density "
                f"or capacity. Deliver them by one update of the transformation that "
                f"made them, with no worker present."
            )


def _check_whole(caller: str, tree: Any, workers: Workers) -> None:
    """Raises ValueError for leaves sharded over other axes than the workers'."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        axes = sharded_axes(leaf) - set(workers.axes)
        if axes:
            raise ValueError(
                f"{caller}: the leaf `{path_name(path)}` is "
                f"sharded over {sorted(axes)}, an axis that is automatic here. "
                f"Flattening the leaf would gather it on every device. Name "
                f"the axis in the `axis_names` of `jax.shard_map`, so that each shard "
                f"is sparsified by itself, and wrap the transformation in "
                f"`sparsejax.per_shard(tx, shard_axis={sorted(axes)[0]!r})`."
            )


def _check_branches(workers: Workers) -> None:
    """Raises ValueError inside a `jax.lax.cond` whose predicate differs per worker.

    Some workers would wait in the exchange for the others: the program would hang. The
    predicate is not an argument of the branch, so it is read from the frame of `cond`.
    This works only where types are checked.
    """
    for frame in calling_frames():
        name = frame.f_code.co_name
        module = frame.f_globals.get("__name__", "")
        if name in _PREDICATES and module.startswith("jax._src.lax.control_flow"):
            found = frame.f_locals.get(_PREDICATES[name])
            # One of several axes is enough: the exchange needs all of them.
            if isinstance(found, jax.Array) and varying_axes(found) & set(workers.axes):
                raise ValueError(
                    f"update: inside a `jax.lax.{name}` whose predicate "
                    f"differs between workers: those that skip the exchange would let "
                    f"the others wait forever. Let all workers agree on it, "
                    f"`jax.lax.pmax(predicate.astype(int), {workers.axis_name!r}) > "
                    f"0`, or call `update` outside of the branch."
                )


def _check_agreed(extra_args: dict[str, Any], workers: Workers) -> None:
    """Raises ValueError if the loss in the extra arguments differs between workers."""
    value = extra_args.get("value")
    if isinstance(value, jax.Array) and varying_axes(value) & set(workers.axes):
        raise ValueError(
            f"update: `value` differs between workers, but transformations after the "
            f"recipe, such as `optax.contrib.reduce_on_plateau`, have to decide alike: "
            f"pass the mean, `value=jax.lax.pmean(loss, {workers.axis_name!r})`."
        )


def _check_local(updates: Any, workers: Workers, known: frozenset[str]) -> None:
    """Raises ValueError for gradients that vary over too few axes, or too many."""
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    reduced = [
        f"`{path_name(path)}`" for path, leaf in leaves if not workers.is_local(leaf)
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
    for path, leaf in leaves:
        more = sorted(varying_axes(leaf) - known)
        if more:
            raise ValueError(
                f"update: the gradient `{path_name(path)}` also "
                f"varies over {more}, which `axis_name={workers.axis_name!r}` does not "
                f"name. If those are workers too, average over them first, "
                f"`jax.lax.pmean(grads, {more[0]!r})`, or exchange over all of them, "
                f"`axis_name={(*workers.axes, *more)!r}`. If they hold shards of the "
                f"model, use `sparsejax.per_shard(tx, shard_axis={more[0]!r})`."
            )
