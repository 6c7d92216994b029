"""State that differs per shard of a model: a second manual axis beside the workers'."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec as P

from sparsejax._checks import path_name
from sparsejax._nesting import refuse_wrappers
from sparsejax._workers import (
    AxisName,
    Workers,
    sharded_axes,
    spec_axes,
    without_axes,
)
from sparsejax.placement._markers import add_shard_axis, drop_shard_axis, state_specs


def per_shard(
    tx: optax.GradientTransformation,
    *,
    axis_name: AxisName = "data",
    shard_axis: AxisName = "model",
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on each model shard's own part, with state that differs per shard.

    For parameters that are sharded over a second axis of `jax.shard_map`. The workers
    that hold the same shard of the model sparsify this shard separately. All state of
    `tx` is marked `PerShard`, including thresholds, reports and moments, since all of
    it differs between shards. A transformation of the whole tree, such as clipping by
    the global norm, sees one shard only.

    Args:
      tx: a transformation that holds sparsejax ones, possibly chained with others.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      shard_axis: the mesh axis of the model's shards, or a tuple of axes.

    Returns:
      The same transformation on local shards. `init` outside `jax.shard_map` takes the
      sharded parameters, and reads their shardings.

    Raises:
      ValueError: from `init`, if a leaf is not sharded over `shard_axis`, or if its
        sharding is unknown (traced values on an automatic mesh); from `update`, if a
        leaf is typed equal on all shards and so belongs to another group.
      NameError: from `update`, if an axis is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
      >>> sharding = NamedSharding(mesh, P(None, "model"))
      >>> params = {"w": jax.device_put(jnp.zeros((10, 6)), sharding)}
      >>> tx = sparsejax.per_shard(optax.chain(sparsejax.exdyna(0.1), optax.adam(1e-3)))
      >>> state = sparsejax.init(tx, params, mesh)
      >>> state.per_shard[0].memory.per_worker.shape  # two shards, four workers
      (2, 4, 30)
    """
    tx = optax.with_extra_args_support(tx)
    shards = Workers(shard_axis)
    both = (*Workers(axis_name).axes, *shards.axes)

    def init(params):
        if shards.bound():
            return add_shard_axis(tx.init(params), shards)
        _require_mesh(both)
        specs = jax.tree_util.tree_map_with_path(
            lambda path, leaf: _spec(path, leaf, shards), params
        )

        def mapped(out_specs, **options):
            return jax.shard_map(
                lambda params: add_shard_axis(tx.init(params), shards),
                in_specs=(specs,),
                out_specs=out_specs,
                axis_names=set(both),
                **options,
            )

        # Gives the structure only, with local shapes. Unchecked, since per-worker parts
        # vary over more axes than these specs name.
        shapes = jax.eval_shape(mapped(P(shard_axis), check_vma=False), params)
        made = mapped(state_specs(shapes, axis_name, shard_axis=shard_axis))
        return jax.jit(made)(params)

    def update(updates, state, params=None, **extra_args):
        refuse_wrappers("update")
        _require_bound(shards)
        _check_sharded(updates, shards)
        inner = drop_shard_axis(state, shards)
        updates, inner = tx.update(updates, inner, params, **extra_args)
        return updates, add_shard_axis(inner, shards)

    return optax.GradientTransformationExtraArgs(init, update)


def _require_mesh(axes: tuple[str, ...]) -> None:
    if Workers(axes).mesh_count() is None:
        raise ValueError(
            f"per_shard: no axes {axes!r} here. Set a mesh that has them first, `with "
            f"jax.set_mesh(mesh): tx.init(params)` (or `sparsejax.init(tx, params, "
            f"mesh)`), or call `tx.init` inside `jax.shard_map`. `wire_bytes` reads "
            f"them from the shardings of the parameters: pass placed ones."
        )


def _require_bound(shards: Workers) -> None:
    if not shards.bound() and shards.mesh_count():
        raise NameError(
            f"per_shard: the axis {shards.axis_name!r} is not bound here. `per_shard` "
            f"is for `jax.shard_map` loops that bind it. Under plain `jax.jit` leave "
            f"`per_shard` out: a recipe reads from `tx.init(params)` how parameters "
            f"are sharded."
        )
    shards.require_bound("per_shard")


def _spec(path: Any, leaf: Any, shards: Workers) -> P:
    """The spec of a parameter, restricted to the axes of the shards."""
    axes = set(shards.axes)
    if not axes & sharded_axes(leaf):
        raise ValueError(
            f"per_shard: init: the parameter `{path_name(path)}` "
            f"is not known to be sharded over {shards.axis_name!r}. Place the "
            f"parameters first (`jax.device_put` with their shardings) and call `init` "
            f"outside `jax.jit`, or call it inside `jax.shard_map`. A parameter that "
            f"all shards share belongs to a group of its own: `optax.partition`, with "
            f"`per_shard` only around the transformation of the sharded ones."
        )
    known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    spec = (leaf if known else jax.typeof(leaf)).sharding.spec
    return without_axes(spec, set(spec_axes(spec)) - axes)


def _check_sharded(updates: Any, shards: Workers) -> None:
    """Raises ValueError for leaves that are equal on all shards of the model."""
    if not shards.typed():
        return
    equal = [
        f"`{path_name(path)}`"
        for path, leaf in jax.tree_util.tree_leaves_with_path(updates)
        if not shards.is_local(leaf)
    ]
    if equal:
        raise ValueError(
            f"per_shard: the gradients {', '.join(equal)} are typed as equal on all "
            f"shards of {shards.axis_name!r}, and would drift apart. Give the "
            f"parameters that all shards share a transformation of their own, outside "
            f"`per_shard`: `optax.partition`."
        )
