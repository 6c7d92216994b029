"""`resize_workers`: continues a training run on another number of workers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax._layout import Structure, bare
from sparsejax._workers import AxisName
from sparsejax.parts import Report
from sparsejax.placement._groups import ShardedState
from sparsejax.placement._in_flight import returned
from sparsejax.placement._init import init
from sparsejax.placement._markers import Mark, marks_of_leaves


def resize_workers(
    tx: optax.GradientTransformation,
    state: Any,
    params: Any,
    mesh: jax.sharding.Mesh | None = None,
    *,
    workers: int | None = None,
    axis_name: AxisName = "data",
) -> Any:
    """Converts an optimizer state of the old workers for the workers of `mesh`.

    The residuals hold gradients that the model has not seen yet. With w old and v new
    workers, every new residual is the mean of the old residuals,

        residual'_r = (1/w) sum_s residual_s    for r = 1 .. v

    so the mean pending gradient, and later its delivery, stays the same.

    Args:
      tx: the transformation that made `state`; `tx.init` runs again on `mesh`.
      state: the state of `tx` for all old workers: placed arrays, or numpy arrays from
        a checkpoint. A state of `jax.pmap` has a leading axis on every leaf.
      params: the parameters, with the same shapes as when `state` was made.
      mesh: the new mesh, with more or fewer workers than the old mesh.
      workers: the number of workers for `jax.pmap`, instead of `mesh`. The result is
        the state of one worker, [1, ...], which `flax.jax_utils.replicate` copies. Save
        this state instead of `unreplicate(state)`, which has the residual of one worker
        only.
      axis_name: with `workers`, the axis of the `jax.pmap`.

    Returns:
      The state, placed on `mesh`. Per-worker floating-point leaves are the mean of the
      old rows; of signed integers, such as counters, the largest is kept; other
      per-worker leaves are kept if all workers agree. Among replicated leaves, those
      whose shape does not depend on the number of workers, such as moments and step
      counts, are kept; others, such as the bounds of parts, start again. If the number
      of workers is the same as before, everything is kept.

    Raises:
      ValueError: if `state` is not a state of `tx` for such parameters, or if `state`
        is the view of one out of several workers.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, sparsejax
      >>> eight = jax.make_mesh((8,), ("data",))
      >>> four = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> tx, params = sparsejax.exdyna(density=0.1), {"w": jnp.zeros(100)}
      >>> state = sparsejax.init(tx, params, eight)
      >>> sparsejax.resize_workers(tx, state, params, four).memory.per_worker.shape
      (4, 100)
    """
    fresh = init(tx, params, mesh, workers=workers, axis_name=axis_name)
    new = jax.tree_util.tree_leaves_with_path(fresh)
    _check_same(state, fresh)
    made: Any = jax.tree.structure(fresh)
    marks = marks_of_leaves(fresh)
    old = _without_copies(jax.tree.leaves(state), jax.tree.leaves(fresh), marks)
    _check_all_workers(old, fresh, marks)
    same = mesh is not None and all(
        np.shape(a) == np.shape(b) for a, (_, b) in zip(old, new, strict=True)
    )
    if not same:
        old = jax.tree.leaves(returned(made.unflatten(old), fresh, _fetch))

    def carried(path, old, new, marks):
        if not same and "per_worker" in marks:
            return _mean_rows(old, new, marks.index("per_worker"), path)
        if np.shape(old) != np.shape(new):
            return new
        return _place(old, new, mesh)

    carried_leaves = [
        carried(path, a, b, around)
        for a, (path, b), around in zip(old, new, marks, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(state), carried_leaves)


def _check_same(state: Any, fresh: Any) -> None:
    """Raises ValueError if both have different leaves; nnx may have boxed some."""

    def names(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return [jax.tree_util.keystr(bare(path)) for path, _ in leaves]

    def structures(tree):
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Structure))
        return [node for node in nodes if isinstance(node, Structure)]

    given, made = names(state), names(fresh)
    if (given, structures(state)) == (made, structures(fresh)):
        return
    sharded = [_is_sharded(tree) for tree in (state, fresh)]
    if sharded[0] != sharded[1] or (all(sharded) and given == made):
        raise ValueError(
            "resize_workers: the state was made for parameters that are sharded in "
            "another way over the other axes of the mesh. Only the number of workers "
            "may change: pass parameters placed on `mesh` with as many shards as "
            "before, or start again with `sparsejax.init`."
        )
    others = sorted(set(given) ^ set(made))
    difference = f"they differ in {', '.join(others)}" if others else "shapes differ"
    raise ValueError(
        f"resize_workers: this state was not made by this transformation for these "
        f"parameters: {difference}. Pass the `tx` and `params` that made the state, "
        f"and only the optimizer state of a flax state. A checkpoint that was restored "
        f"without a target consists of dicts and lists: restore it with a target."
    )


def _is_sharded(tree: Any) -> bool:
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ShardedState))
    return any(isinstance(node, ShardedState) for node in nodes)


def _without_copies(
    old: list[Any], new: list[Any], marks: list[tuple[Mark, ...]]
) -> list[Any]:
    """Converts leaves of a `jax.pmap` state, [w, ...] each, to leaves for a mesh."""
    if not all(np.ndim(a) == np.ndim(b) + 1 for a, b in zip(old, new, strict=True)):
        return old

    def joined(leaf, around):
        if "per_worker" in around:
            return _fetch(leaf)[:, 0]
        return leaf[0]

    return [joined(leaf, around) for leaf, around in zip(old, marks, strict=True)]


def _check_all_workers(
    old: list[Any], fresh: Any, marks: list[tuple[Mark, ...]]
) -> None:
    """Raises ValueError if the state has fewer rows than the reports have workers."""
    typed = jax.tree.unflatten(jax.tree.structure(fresh), old)
    nodes = jax.tree.leaves(typed, is_leaf=lambda x: isinstance(x, Report))
    counts = {np.shape(x.demand)[-1] for x in nodes if isinstance(x, Report)}
    for leaf, around in zip(old, marks, strict=True):
        if not counts or "per_worker" not in around:
            continue
        rows = np.shape(leaf)[around.index("per_worker")]
        if rows not in counts:
            raise ValueError(
                f"resize_workers: the state has {rows} of the residuals of "
                f"{max(counts)} workers. It is the view of one worker, such as from "
                f"`flax.jax_utils.unreplicate`, `out_axes=None` of `jax.pmap` or "
                f"`out_specs=P()` of `jax.shard_map`, and lacks the pending gradients "
                f"of the others. Pass the state of all workers: `jax.pmap` returns it "
                f"with `out_axes=0`, and `jax.shard_map` with `out_specs` of "
                f"`sparsejax.state_specs(state)`."
            )


def _mean_rows(old: Any, new: jax.Array, axis: int, path: Any) -> jax.Array:
    """An array like `new` whose rows are the mean of the rows of `old`."""
    rest = [shape[:axis] + shape[axis + 1 :] for shape in (np.shape(old), new.shape)]
    if rest[0] != rest[1]:
        raise ValueError(
            f"resize_workers: `{jax.tree_util.keystr(path)}` has the shape "
            f"{np.shape(old)}, and {new.shape} on the new mesh: only the number of "
            f"workers, axis {axis}, may differ."
        )
    mean = _one_row(old, axis)
    if mean is None:
        return new
    rows = np.broadcast_to(mean.astype(new.dtype), new.shape)
    # Made shard by shard, so neither a device nor the host holds all rows.
    return jax.make_array_from_callback(new.shape, new.sharding, lambda i: rows[i])


def _one_row(old: Any, axis: int) -> np.ndarray | None:
    """One row, of length 1 along `axis`, for all rows of `old`; or None.

    Floating-point rows are averaged. Of signed integers, which are counters, the
    largest is kept: with a smaller one, optimizers would correct the bias of their
    moments again. Others, such as the words of random keys, are kept if all rows agree.
    """
    floating = jax.dtypes.issubdtype(old.dtype, np.floating)
    if _in_other_processes(old):
        # On the devices, so that no host has to hold the rows of all workers.
        combine = [jnp.mean] if floating else [jnp.max, jnp.min]
        everywhere = NamedSharding(old.sharding.mesh, P())
        reduced = jax.jit(
            lambda x: [f(x, axis=axis, keepdims=True) for f in combine],
            out_shardings=everywhere,
        )(old.astype(jnp.float32) if floating else old)
        rows = [np.asarray(x.addressable_data(0)) for x in reduced]
    elif floating:
        wide = np.asarray(old).astype(np.float64)
        rows = [np.mean(wide, axis=axis, keepdims=True)]
    else:
        value = np.asarray(old)
        rows = [f(value, axis=axis, keepdims=True) for f in (np.max, np.min)]
    signed = floating or jax.dtypes.issubdtype(old.dtype, np.signedinteger)
    return rows[0] if signed or (rows[0] == rows[-1]).all() else None


def _place(old: Any, new: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """Places `old` like `new`, or on all devices if `new` is not on the mesh."""
    if not isinstance(new, jax.Array):
        return old
    placed = isinstance(new.sharding, NamedSharding) and new.sharding.mesh == mesh
    if placed or mesh is None:
        sharding = new.sharding
    else:
        sharding = NamedSharding(mesh, P())
    if jax.dtypes.issubdtype(new.dtype, jax.dtypes.extended):
        return jax.device_put(old, sharding)
    value = _fetch(old).astype(new.dtype)
    return jax.make_array_from_callback(new.shape, sharding, lambda i: value[i])


def _in_other_processes(x: Any) -> bool:
    return (
        isinstance(x, jax.Array)
        and isinstance(x.sharding, NamedSharding)
        and not x.is_fully_addressable
    )


def _fetch(x: Any) -> np.ndarray:
    if _in_other_processes(x):
        # Gathers the rows of other processes on every host.
        everywhere = NamedSharding(x.sharding.mesh, P())
        x = jax.jit(lambda x: x, out_shardings=everywhere)(x).addressable_data(0)
    return np.asarray(x)
