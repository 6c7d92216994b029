"""State that differs per worker: its marker, its shardings, its allocation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from sparsejax._nesting import refuse_wrappers
from sparsejax._workers import AxisName, Workers, mesh_worker_count


class PerWorker(NamedTuple):
    """Marks state that differs per worker.

    Every leaf has a leading worker axis: [w, ...] globally, sharded over the axis, and
    [1, ...] on each worker, inside `jax.shard_map`.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> state = sparsejax.PerWorker(jnp.zeros((8, 3)))
      >>> sparsejax.state_specs(state).per_worker == jax.P("data")
      True
    """

    per_worker: Any


def map_per_worker(f: Callable[[Any], Any], tree: Any) -> Any:
    """Applies `f` to every leaf that is marked `PerWorker`, and to no other."""

    def is_marker(node):
        return isinstance(node, PerWorker)

    return jax.tree.map(
        lambda node: PerWorker(jax.tree.map(f, node[0])) if is_marker(node) else node,
        tree,
        is_leaf=is_marker,
    )


def add_worker_axis(state: Any, workers: Workers | None = None) -> Any:
    """Gives marked leaves their leading axis of 1. With `workers`, types them local."""

    def add(leaf):
        leaf = leaf[None]
        return workers.localize(leaf) if workers else leaf

    return map_per_worker(add, state)


def drop_worker_axis(state: Any, workers: Workers) -> Any:
    """Takes the leading axis of 1 from marked leaves.

    Raises:
      ValueError: if a leading axis is not 1: the global state [w, ...] came in whole.
    """

    def drop(leaf):
        if leaf.ndim == 0 or leaf.shape[0] != 1:
            raise ValueError(
                f"per-worker state must have a leading axis of 1 inside the axis "
                f"{workers.axis_name!r}, but has shape {leaf.shape}. Pass the state "
                f"through `jax.shard_map` with `in_specs` and `out_specs` of "
                f"`sparsejax.state_specs(state, {workers.axis_name!r})`. If that was "
                f"done, the state is of another number of workers: see "
                f"`sparsejax.resize_workers`."
            )
        return leaf[0]

    return map_per_worker(drop, state)


def state_specs(
    state: Any, axis_name: AxisName = "data", *, shard_axis: AxisName = "model"
) -> Any:
    """The `PartitionSpec` of every leaf of an optimizer state.

    Leaves marked `PerWorker` are sharded over `axis_name` along their leading axis,
    leaves marked `PerShard` over `shard_axis`, leaves that carry both marks along one
    axis for each; all others are replicated. The result serves as in_specs and
    out_specs of `jax.shard_map`, and gives the shardings of a checkpoint.

    Args:
      state: any pytree that holds optimizer states: arrays, or the result of
        `jax.eval_shape`. The marker is also found where flax nnx has turned the
        state into nested dicts.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      shard_axis: the mesh axis of the model's shards, see `sparsejax.per_shard`.

    Returns:
      A pytree of the same structure, with a `PartitionSpec` for each leaf.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> tx = optax.chain(sparsejax.micro(0.1), optax.sgd(0.1))
      >>> state = sparsejax.init(tx, {"w": jnp.zeros(100)}, mesh)
      >>> specs = sparsejax.state_specs(state, "data")
      >>> specs[0].memory.per_worker == P("data"), specs[0].step == P()
      (True, True)
    """
    axes = {"per_worker": axis_name, "per_shard": shard_axis}

    def spec(path, _):
        return P(*(axes[mark] for mark in _marks(path)))

    return jax.tree_util.tree_map_with_path(spec, state)


def _marks(path: Any) -> list[str]:
    """The markers around the leaf at `path`: one for each of its leading axes."""
    names = (getattr(k, "name", getattr(k, "key", None)) for k in path)
    # Once each, in the order in which the marks were put on.
    return [n for n in dict.fromkeys(names) if n in ("per_worker", "per_shard")]


def worker_axis(path: Any) -> int | None:
    """Which axis of the leaf at `path` is that of the workers; None if it has none."""
    marks = _marks(path)
    return marks.index("per_worker") if "per_worker" in marks else None


def allocate(make: Callable[..., Any], workers: Workers, *args: Any) -> Any:
    """Runs `make(worker_count, *args)`, which returns one worker's state, where due.

    `make` returns marked leaves without their leading axis. Inside the bound axis the
    result is this worker's view [1, ...]; outside it is the global state [w, ...],
    every row allocated on the device it belongs to.

    Raises:
      ValueError: if the axis is neither bound nor part of the mesh that is set.
    """
    if workers.bound():
        return add_worker_axis(make(workers.count(), *args), workers)
    count = mesh_worker_count(workers.axis_name)
    if count is None:
        raise ValueError(
            f"init: no axis {workers.axis_name!r} here, so the number of workers is "
            f"unknown. Either set the mesh first, `with jax.set_mesh(mesh): "
            f"tx.init(params)` (or `sparsejax.init(tx, params, mesh)`), or call "
            f"`tx.init` inside `jax.shard_map`. If the workers' axis has another name, "
            f"say so to both sides: `axis_name=` of the recipe, and of `simulate`, "
            f"`wire_bytes` and the like."
        )

    def local(*args):
        return add_worker_axis(make(count, *args))

    specs = state_specs(jax.eval_shape(local, *args), workers.axis_name)
    # A shard_map and not zeros([w, ...]): it shards the rows on Auto and Explicit
    # meshes alike, traced or not, and no device ever holds them all.
    sharded = jax.shard_map(
        local, in_specs=P(), out_specs=specs, axis_names=set(workers.axes)
    )
    return jax.jit(sharded)(*args)


def init(tx: optax.GradientTransformation, params: Any, mesh: jax.sharding.Mesh) -> Any:
    """`tx.init(params)` on `mesh`: the global optimizer state.

    Args:
      tx: a transformation that holds sparsejax ones.
      params: pytree of parameters.
      mesh: a mesh with the axis that the transformation exchanges over.

    Returns:
      The state; leaves marked `PerWorker` are [w, ...], sharded over the axis.

    Raises:
      ValueError: if the mesh lacks the axis, or inside `jax.jit` (where meshes cannot
        be set: set it outside and call `tx.init`).

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> tx = sparsejax.exdyna(density=0.1)
      >>> state = sparsejax.init(tx, {"w": jnp.zeros(100)}, mesh)
      >>> state.memory.per_worker.shape
      (8, 100)
    """
    with jax.set_mesh(mesh):
        return tx.init(params)


def per_worker(
    tx: optax.GradientTransformation, *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on each worker's own updates, with state that differs per worker.

    For what comes before a sparsifier, such as local momentum: the state of a plain
    optax transformation would be taken for replicated.

    Args:
      tx: any optax transformation.
      axis_name: the mesh axis of the workers.

    Returns:
      The same transformation; its state is marked `PerWorker`.

    Raises:
      ValueError: from `init`, where the number of workers is unknown.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(
      ...     sparsejax.per_worker(optax.trace(decay=0.9)),
      ...     sparsejax.exdyna(density=0.01),
      ...     optax.sgd(0.1),
      ... )
    """
    tx = optax.with_extra_args_support(tx)
    workers = Workers(axis_name)

    def init(params):
        refuse_wrappers("init")
        return allocate(lambda _, p: PerWorker(tx.init(p)), workers, params)

    def update(updates, state, params=None, **extra_args):
        refuse_wrappers("update")
        workers.require_bound("per_worker")
        inner = drop_worker_axis(state, workers).per_worker
        updates, inner = tx.update(updates, inner, params, **extra_args)
        return updates, add_worker_axis(PerWorker(inner), workers)

    return optax.GradientTransformationExtraArgs(init, update)
