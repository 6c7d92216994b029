"""`init` on a mesh, and state that differs per worker."""

from __future__ import annotations

from typing import Any

import jax
import optax

from sparsejax._checks import check_count
from sparsejax._nesting import refuse_wrappers
from sparsejax._views import over_rows
from sparsejax._workers import AxisName, Workers
from sparsejax.placement._allocation import allocate
from sparsejax.placement._markers import (
    PerWorker,
    add_worker_axis,
    drop_worker_axis,
)
from sparsejax.placement._specs import shard_like_parameters, with_param_specs


def init(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: jax.sharding.Mesh | None = None,
    *,
    param_specs: Any = None,
    workers: int | None = None,
    axis_name: AxisName = "data",
) -> Any:
    """`tx.init(params)` on `mesh`: the global optimizer state.

    Args:
      tx: a transformation that holds sparsejax ones.
      params: pytree of parameters.
      mesh: a mesh with the axis that the transformation exchanges over.
      param_specs: how parameters are sharded, a tree of `PartitionSpec`s; only where
        the parameters do not show it, see `sparsejax.with_param_specs`.
      workers: the number of workers for `jax.pmap`, instead of `mesh`. The result is
        one worker's state, [1, ...], which `flax.jax_utils.replicate` copies.
      axis_name: with `workers`, the axis of the `jax.pmap`.

    Returns:
      The state; leaves marked `PerWorker` are [w, ...], sharded over the axis, or
      [1, ...] with `workers`.

    Raises:
      TypeError: if the arguments are not a transformation, parameters and a mesh.
      NameError: if the mesh lacks the axis.
      ValueError: inside `jax.jit`, unless the mesh was set outside.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> tx = sparsejax.exdyna(density=0.1)
      >>> state = sparsejax.init(tx, {"w": jnp.zeros(100)}, mesh)
      >>> state.memory.per_worker.shape
      (8, 100)
    """
    if param_specs is not None:
        tx = with_param_specs(tx, param_specs)
    if workers is not None and mesh is None:
        return _init_of_one(tx, params, check_count("workers", workers), axis_name)
    # No test of the type: `optax.MultiSteps` and the like are other classes.
    if not (hasattr(tx, "init") and isinstance(mesh, jax.sharding.Mesh)):
        raise TypeError(
            f"init: got a {type(tx).__name__}, a {type(params).__name__} and a "
            f"{type(mesh).__name__}, expected a transformation, parameters and a "
            f"`jax.sharding.Mesh`: `sparsejax.init(tx, params, mesh)`."
        )
    try:
        context = jax.set_mesh(mesh)
    except ValueError:  # Inside `jax.jit` no mesh can be set.
        if jax.sharding.get_abstract_mesh() != mesh.abstract_mesh:
            raise ValueError(
                "init: inside `jax.jit` no mesh can be set. Set it outside, `with "
                "jax.set_mesh(mesh): jax.jit(tx.init)(params)`."
            ) from None
        return tx.init(params)
    with context:
        return tx.init(params)


def _init_of_one(
    tx: optax.GradientTransformation, params: Any, count: int, axis_name: AxisName
) -> Any:
    """One worker's state [1, ...] of `count` workers, as from `tx.init` inside."""

    def local(_):
        return tx.init(params)

    # The axis of the `vmap` sets the number of workers; all of them start alike.
    mapped = jax.vmap(local, axis_name=axis_name, axis_size=count, in_axes=None)
    # Compiled as a whole: one operation at a time takes seconds.
    return jax.jit(lambda: jax.tree.map(lambda x: x[0], mapped(0.0)))()


def per_worker(
    tx: optax.GradientTransformation, *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    """Runs `tx` on each worker's own updates, with state that differs per worker.

    For transformations before a sparsifier, such as momentum: the state of a plain
    optax transformation would be treated as replicated.

    Args:
      tx: any optax transformation.
      axis_name: the mesh axis of the workers.

    Returns:
      The same transformation; its state is marked `PerWorker`.

    Raises:
      NameError: from `init`, where the number of workers is unknown.

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
        sharded = shard_like_parameters(params, workers)
        return allocate(lambda _, p: PerWorker(sharded(tx.init(p))), workers, params)

    def update(updates, state, params=None, **extra_args):
        refuse_wrappers("update")
        if not workers.bound():
            updates, inner = mapped(updates, state.per_worker, params, **extra_args)
            return updates, PerWorker(inner)
        inner = drop_worker_axis(state, workers).per_worker
        updates, inner = tx.update(updates, inner, params, **extra_args)
        return updates, add_worker_axis(PerWorker(inner), workers)

    mapped = over_rows(tx.update, workers)
    return optax.GradientTransformationExtraArgs(init, update)
