"""`resize_workers`: the same training on another number of workers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax._layout import Structure, bare
from sparsejax.placement._init import init
from sparsejax.placement._markers import marks_of_leaves


def resize_workers(
    tx: optax.GradientTransformation,
    state: Any,
    params: Any,
    mesh: jax.sharding.Mesh,
) -> Any:
    """An optimizer state of the old workers, for the workers of `mesh`.

    What a worker has not sent yet is gradient that the model has not seen. With w old
    and v new workers, every new residual is the mean of the old ones,

        residual'_r = (1/w) sum_s residual_s    for r = 1 .. v

    so that the mean pending gradient, and with it what will be delivered, is the same.

    Args:
      tx: the transformation that made `state`; it is initialised anew on `mesh`.
      state: its state for the old workers: placed arrays, or numpy arrays as restored
        from a checkpoint.
      params: the parameters, shaped as when `state` was made.
      mesh: the mesh to go on with; it may have more workers than the old one, or fewer.

    Returns:
      The state, placed on `mesh`. Per-worker floating-point leaves: the mean of the old
      rows; other per-worker leaves: kept where all workers agree. The rest is kept
      where its shape does not depend on the number of workers, such as moments and step
      counts, and starts anew where it does, such as the bounds of parts. With as many
      workers as before, everything is kept.

    Raises:
      ValueError: if `state` is not a state of `tx` for such parameters.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, sparsejax
      >>> eight = jax.make_mesh((8,), ("data",))
      >>> four = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> tx, params = sparsejax.exdyna(density=0.1), {"w": jnp.zeros(100)}
      >>> state = sparsejax.init(tx, params, eight)
      >>> sparsejax.resize_workers(tx, state, params, four).memory.per_worker.shape
      (4, 100)
    """
    fresh = init(tx, params, mesh)
    new = jax.tree_util.tree_leaves_with_path(fresh)
    old = jax.tree.leaves(state)
    _check_same(state, fresh)
    same = all(np.shape(a) == np.shape(b) for a, (_, b) in zip(old, new, strict=True))

    def carried(path, old, new, marks):
        if not same and "per_worker" in marks:
            return _mean_rows(old, new, marks.index("per_worker"), path)
        if np.shape(old) != np.shape(new):
            return new
        return _place(old, new, mesh)

    marks = marks_of_leaves(fresh)
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


def _place(old: Any, new: Any, mesh: jax.sharding.Mesh) -> Any:
    """`old` where `new` is, or on all devices if `new` is not on the mesh."""
    if not isinstance(new, jax.Array):
        return old
    placed = isinstance(new.sharding, NamedSharding) and new.sharding.mesh == mesh
    sharding = new.sharding if placed else NamedSharding(mesh, P())
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
