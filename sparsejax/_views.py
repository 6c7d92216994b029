"""The two views of an `update`: one worker's, and everybody's.

Where the workers' axis is bound, values are one worker's. Where it is not, values that
differ per worker have a leading axis [w], sharded over the workers' axis. There an
update opens a `jax.shard_map` over all axes of the mesh, so that each device works on
the shards that it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from sparsejax import _xla
from sparsejax._checks import as_present, path_name
from sparsejax._local_gradient import LocalGradient, wrap
from sparsejax._nesting import refuse_wrappers
from sparsejax._workers import Workers, mesh_axis_sizes, spec_axes, without_axes
from sparsejax.placement import _groups as groups
from sparsejax.placement._markers import PerWorker, marks_of_leaves, state_specs

Update = Callable[..., tuple[Any, Any]]


def two_views(update: Update, workers: Workers) -> Update:
    """Makes an `update` that exchanges, written for one worker, work in both views.

    Where some parameters are sharded, each group of leaves is updated by itself.

    Args:
      update: `(updates, state, params, **extra) -> (updates, state)` of one vector,
        axis bound.
      workers: the axis.
    """

    grouped = groups.update(update)

    def both(updates, state, params=None, **extra_args):
        refuse_wrappers("update")
        if workers.bound():

            def own(updates, state):
                return grouped(updates, state, params, **extra_args)

            return _xla.always_compiled(own)(updates, state)
        workers.require_mesh("update")
        rows = _rows(updates, workers)
        _check_workers(state, workers)
        specs = _param_specs(rows, state)
        by_worker = jax.tree.map(lambda spec: P(workers.axes, *spec), specs)
        states = state_specs(state, workers.axis_name)
        present = extra_args.get("present")
        if present is not None:
            present = as_present(present, (workers.mesh_count(),))
            present = workers.spread(present)

        def mine(rows, state, present):
            rows, present = jax.tree.map(lambda row: row[0], (rows, present))
            return grouped(rows, state, present=present)

        mapped = jax.shard_map(
            mine,
            in_specs=(by_worker, states, P(workers.axes)),
            out_specs=(specs, states),
            axis_names=set(mesh_axis_sizes()),
        )
        return _xla.always_compiled(mapped)(rows, state, present)

    return both


def over_rows(update: Update, workers: Workers) -> Update:
    """Makes an `update` that does not exchange work in both views.

    Where the axis is not bound, `update` is mapped over the workers' rows, and the
    compiler keeps gradients and states sharded over all other axes as before.

    Args:
      update: `(updates, state, params, **extra) -> (updates, state)`; states [1, ...]
        where the axis is bound, and without a leading axis where it is not.
      workers: the axis.
    """

    def both(updates, state, params=None, **extra_args):
        if workers.bound():
            return update(updates, state, params, **extra_args)
        refuse_wrappers("update")
        workers.require_mesh("update")
        mapped = jax.vmap(
            lambda row, state: update(row, state, params, **extra_args),
            spmd_axis_name=workers.axes,
        )
        new, state = mapped(_rows(updates, workers), state)
        return wrap(new), state

    return both


def _without_unit_axes(rows: Any, workers: Workers) -> Any:
    """Rows without axes of size 1 in their type: the state does not name such axes."""
    spec, sizes = workers.explicit_spec(rows), mesh_axis_sizes()
    unit = {a for a in spec_axes(spec[1:] if spec else ()) if sizes[a] == 1}
    if not unit:
        return rows
    return jax.sharding.reshard(rows, P(spec[0], *without_axes(spec[1:], unit)))


def _rows(updates: Any, workers: Workers) -> Any:
    """The rows [w, ...] of all gradients.

    Raises:
      ValueError: for a gradient that is not marked as local, or has other than w rows.
    """
    count = workers.mesh_count()

    def rows(path, leaf):
        found = marked(path, leaf)
        if found.shape[:1] != (count,):
            raise ValueError(
                f"update: the gradient `{path_name(path)}` has rows of the shape "
                f"{found.shape}, and the mesh has {count} workers. Set the mesh that "
                f"the gradients were computed on."
            )
        return _without_unit_axes(found, workers)

    def marked(path, leaf):
        if isinstance(leaf, LocalGradient):
            return leaf.rows
        if isinstance(leaf, PerWorker):
            return leaf.per_worker
        raise ValueError(
            f"update: the gradient `{path_name(path)}` is an ordinary array. Under "
            f"plain `jax.jit` the compiler averages the gradients of `jax.grad` before "
            f"any transformation sees them: differentiate with "
            f"`sparsejax.value_and_grad(loss_fn)(params, batch)`. If it is zero since "
            f"the parameter is frozen by a transformation before the recipe, put "
            f"the recipe into `optax.partition`, with `optax.set_to_zero()` for frozen "
            f"parameters. If another recipe comes before this one, it has averaged the "
            f"gradient already: use one recipe for each parameter."
        )

    return jax.tree_util.tree_map_with_path(
        rows, updates, is_leaf=lambda x: isinstance(x, PerWorker)
    )


def _check_workers(state: Any, workers: Workers) -> None:
    """Raises ValueError for a state of another number of workers than the mesh has."""
    count = workers.mesh_count()
    for leaf, marks in zip(jax.tree.leaves(state), marks_of_leaves(state), strict=True):
        if "per_worker" not in marks:
            continue
        found = leaf.shape[marks.index("per_worker")]
        if found != count:
            raise ValueError(
                f"update: the state has rows of {found} workers, and the mesh has "
                f"{count}. `sparsejax.resize_workers` converts the state of another "
                f"number of workers; `tx.init(params)` makes a state for the mesh that "
                f"is set."
            )


def _param_specs(rows: Any, state: Any) -> Any:
    """How each parameter is sharded over other axes, as recorded by `init`."""
    if not isinstance(state, groups.ShardedState):
        return jax.tree.map(lambda _: P(), rows)
    known = state.sharding.specs()
    groups.check_names(rows, known)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: known[path_name(path)], rows
    )
