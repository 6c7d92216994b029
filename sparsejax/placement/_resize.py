"""`resize_workers`: the same training on another number of workers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax._layout import Structure, bare
from sparsejax._workers import AxisName
from sparsejax.parts import Report
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
    """An optimizer state of the old workers, for the workers of `mesh`.

    What a worker has not sent yet is gradient that the model has not seen. With w old
    and v new workers, every new residual is the mean of the old ones,

        residual'_r = (1/w) sum_s residual_s    for r = 1 .. v

    so that the mean pending gradient, and with it what will be delivered, is the same.

    Args:
      tx: the transformation that made `state`; it is initialised anew on `mesh`.
      state: its state for all old workers: placed arrays, or numpy arrays as restored
        from a checkpoint. That of a `jax.pmap` has a leading axis on every leaf.
      params: the parameters, shaped as when `state` was made.
      mesh: the mesh to go on with; it may have more workers than the old one, or fewer.
      workers: in the place of `mesh`, for `jax.pmap`: how many workers there are. The
        result is one worker's state, [1, ...], which `flax.jax_utils.replicate` copies:
        save it in the place of `unreplicate(state)`, which has one worker's residual.
      axis_name: with `workers`, the axis of the `jax.pmap`.

    Returns:
      The state, placed on `mesh`. Per-worker floating-point leaves: the mean of the old
      rows; other per-worker leaves: kept where all workers agree. The rest is kept
      where its shape does not depend on the number of workers, such as moments and step
      counts, and starts anew where it does, such as the bounds of parts. With as many
      workers on `mesh` as before, everything is kept.

    Raises:
      ValueError: if `state` is not a state of `tx` for such parameters, or is the view
        of one worker of several.

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
    marks = marks_of_leaves(fresh)
    old = _without_copies(jax.tree.leaves(state), jax.tree.leaves(fresh), marks)
    _check_all_workers(old, fresh, marks)
    same = mesh is not None and all(
        np.shape(a) == np.shape(b) for a, (_, b) in zip(old, new, strict=True)
    )

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
    """Raises ValueError if the two have other leaves; nnx may have boxed some."""

    def names(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return [jax.tree_util.keystr(bare(path)) for path, _ in leaves]

    def structures(tree):
        nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Structure))
        return [node for node in nodes if isinstance(node, Structure)]

    given, made = names(state), names(fresh)
    if (given, structures(state)) == (made, structures(fresh)):
        return
    others = sorted(set(given) ^ set(made))
    difference = f"they differ in {', '.join(others)}" if others else "shapes differ"
    raise ValueError(
        f"resize_workers: the state is none of this transformation for these "
        f"parameters: {difference}. Pass the `tx` and `params` that it was made with, "
        f"and of flax's states the optimizer state alone. A checkpoint that was "
        f"restored without a target is made of dicts and lists: restore it with one."
    )


def _without_copies(
    old: list[Any], new: list[Any], marks: list[tuple[Mark, ...]]
) -> list[Any]:
    """The leaves of a state of `jax.pmap`, [w, ...] each, as those of a mesh."""
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
    """Raises ValueError if there are fewer rows than workers in the reports."""
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
                f"{max(counts)} workers: it is the view of one worker, as "
                f"`flax.jax_utils.unreplicate` and `out_axes=None` of `jax.pmap` give. "
                f"What the others have not sent is lost in it. Pass the state of all "
                f"workers, [w, 1, ...], as `jax.pmap` with `out_axes=0` returns it; of "
                f"`jax.shard_map`, return it with `out_specs` of "
                f"`sparsejax.state_specs(state)`."
            )


def _mean_rows(old: Any, new: jax.Array, axis: int, path: Any) -> jax.Array:
    """As `new`, each row the mean over the rows of `old`, summed in float64.

    What cannot be averaged, such as counters, is kept if all rows agree.
    """
    rest = [shape[:axis] + shape[axis + 1 :] for shape in (np.shape(old), new.shape)]
    if rest[0] != rest[1]:
        raise ValueError(
            f"resize_workers: `{jax.tree_util.keystr(path)}` has the shape "
            f"{np.shape(old)}, and {new.shape} on the new mesh: only the number of "
            f"workers, axis {axis}, may differ."
        )
    value = _fetch(old)
    if jax.dtypes.issubdtype(new.dtype, np.floating):
        mean = np.mean(value.astype(np.float64), axis=axis, keepdims=True)
    else:
        mean = np.take(value, [0], axis=axis)
        if not (value == mean).all():
            return new
    rows = np.broadcast_to(mean.astype(new.dtype), new.shape)
    # By shard: no device, and not the host either, ever holds all rows.
    return jax.make_array_from_callback(new.shape, new.sharding, lambda i: rows[i])


def _place(old: Any, new: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """`old` where `new` is, or on all devices if `new` is not on the mesh."""
    if not isinstance(new, jax.Array):
        return old
    placed = isinstance(new.sharding, NamedSharding) and new.sharding.mesh == mesh
    anywhere = placed or mesh is None
    sharding = new.sharding if anywhere else NamedSharding(mesh, P())
    if jax.dtypes.issubdtype(new.dtype, jax.dtypes.extended):
        return jax.device_put(old, sharding)
    value = _fetch(old).astype(new.dtype)
    return jax.make_array_from_callback(new.shape, sharding, lambda i: value[i])


def _fetch(x: Any) -> np.ndarray:
    if (
        isinstance(x, jax.Array)
        and isinstance(x.sharding, NamedSharding)
        and not x.is_fully_addressable
    ):
        # Rows of other processes: gathered on every host.
        everywhere = NamedSharding(x.sharding.mesh, P())
        x = jax.jit(lambda x: x, out_shardings=everywhere)(x).addressable_data(0)
    return np.asarray(x)
