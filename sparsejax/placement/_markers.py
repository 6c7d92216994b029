"""State that differs per worker, or per shard: markers, shardings, allocation."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import PartitionSpec as P

from sparsejax._workers import AxisName, Workers, sharded_axes


class PerWorker(NamedTuple):
    """Marks state that differs per worker.

    Every leaf has a leading worker axis: [w, ...] globally, sharded over the axis, and
    [1, ...] on each worker, inside `jax.shard_map`. The functions of a part
    (`sparsejax.parts`) see one worker's state, without this axis: `init` returns
    `PerWorker(leaf)` with the leaf of one worker, and `sparsify` adds the axis.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> state = sparsejax.PerWorker(jnp.zeros((8, 3)))
      >>> sparsejax.state_specs(state).per_worker == jax.P("data")
      True
    """

    per_worker: Any


class PerShard(NamedTuple):
    """Marks state that differs per shard of the model.

    Every leaf has a leading axis: [m, ...] globally, sharded over the axis of the m
    model shards, and [1, ...] inside `jax.shard_map`. Per-worker leaves carry both
    marks, and both axes: [m, w, ...].

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> state = sparsejax.PerShard(jnp.zeros((2, 3)))
      >>> sparsejax.state_specs(state).per_shard == jax.P("model")
      True
    """

    per_shard: Any


_MARKERS = (PerWorker, PerShard)

# "per_worker", "per_shard", or the axes over which a group of leaves is sharded.
Mark = str | tuple[str, ...]


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
    """Removes the leading axis of 1 from marked leaves.

    Raises:
      ValueError: if a leading axis is not 1, such as in the global state [w, ...].
    """

    def drop(leaf):
        if leaf.ndim == 0 or leaf.shape[0] != 1:
            raise ValueError(
                f"per-worker state must have a leading axis of 1 inside the axis "
                f"{workers.axis_name!r}, but has shape {leaf.shape}. Pass the state "
                f"through `jax.shard_map` with `in_specs` and `out_specs` of "
                f"`sparsejax.state_specs(state, {workers.axis_name!r})`. If that was "
                f"done, the state was made for another number of workers: see "
                f"`sparsejax.resize_workers`."
            )
        return leaf[0]

    return map_per_worker(drop, state)


def add_shard_axis(state: Any, shards: Workers | None = None) -> PerShard:
    """Marks all of `state` `PerShard`, with a leading axis of 1.

    With `shards`, types the state as different per shard.
    """

    def add(leaf):
        leaf = leaf[None]
        return shards.localize(leaf) if shards else leaf

    return PerShard(jax.tree.map(add, state))


def drop_shard_axis(state: PerShard, shards: Workers) -> Any:
    """The state of this shard, without its leading axis of 1."""
    return shards.localize(jax.tree.map(lambda leaf: leaf[0], state.per_shard))


def state_specs(
    state: Any, axis_name: AxisName = "data", *, shard_axis: AxisName = "model"
) -> Any:
    """The `PartitionSpec` of every leaf of an optimizer state.

    Leaves marked `PerWorker` are sharded over `axis_name` along their leading axis,
    leaves marked `PerShard` over `shard_axis`, and leaves with both marks along one
    axis for each. All other leaves are replicated. Use the result as in_specs and
    out_specs of `jax.shard_map`, and for the shardings of a checkpoint.

    Args:
      state: any pytree that holds optimizer states: arrays, or the result of
        `jax.eval_shape`. If flax nnx, or a checkpoint restored without a target, has
        turned the whole state into nested dicts, markers are found by name: a dict of
        one entry named `per_worker` or `per_shard` is a marker. The state of an
        ensemble, `jax.vmap(tx.init)(params)`, has the members' axis first, which is
        not sharded.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      shard_axis: the mesh axis of the model's shards, see `sparsejax.per_shard`.

    Returns:
      A pytree of the same structure, with a `PartitionSpec` for each leaf.

    Raises:
      TypeError: if `state` is a transformation.
      ValueError: if `PerShard` marks some leaves of the state, but not all that are
        sharded over `shard_axis`.

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
    if isinstance(state, optax.GradientTransformation):
        raise TypeError(
            "state_specs: got a transformation, expected its state, such as "
            "`sparsejax.init(tx, params, mesh)`."
        )
    axes: dict[Any, AxisName] = {"per_worker": axis_name, "per_shard": shard_axis}
    marks = marks_of_leaves(state)
    if shard_axis:
        _check_shards(state, marks, Workers(shard_axis))
    # The mark of a group is a tuple of its axes.
    members = (None,) * _member_axes(state, marks)
    specs = [
        P(*members, *(axes.get(mark, mark) for mark in around)) if around else P()
        for around in marks
    ]
    return jax.tree.unflatten(jax.tree.structure(state), specs)


def _member_axes(state: Any, marks: list[tuple[Mark, ...]]) -> int:
    """The number of leading axes that `jax.vmap(tx.init)` added to `report.sent`, [].

    Only shapes show it, since a mapped state has the structure of a single one.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return max(
        (
            getattr(leaf, "ndim", 0) - len(around)
            for (path, leaf), around in zip(leaves, marks, strict=True)
            if [_key(entry) for entry in path[-2:]] == ["report", "sent"]
        ),
        default=0,
    )


def _check_shards(state: Any, marks: list[tuple[Mark, ...]], shards: Workers) -> None:
    """Raises ValueError if `PerShard` marks some sharded leaves, but not all."""
    if not any("per_shard" in around for around in marks):
        return
    leaves = jax.tree_util.tree_leaves_with_path(state)
    for (path, leaf), around in zip(leaves, marks, strict=True):
        known = isinstance(leaf, jax.Array) and sharded_axes(leaf)
        if "per_shard" not in around and known and known & set(shards.axes):
            raise ValueError(
                f"state_specs: `{jax.tree_util.keystr(path)}` is sharded over "
                f"{shards.axis_name!r}, but not marked `PerShard`. Wrap the whole "
                f"chain, `sparsejax.per_shard(optax.chain(...))`, and pass the "
                f"optimizer state without the parameters."
            )


def marks_of_leaves(tree: Any) -> list[tuple[Mark, ...]]:
    """The markers around each leaf: one for each leading axis, in their order.

    A mark is "per_worker", "per_shard", or the axes of the shards of a group of a
    `ShardedState`. Markers are found by type. If `tree` has no marker by type, they are
    found by name; otherwise names are ignored, since parameters may have such names.
    """
    found = _typed_marks(tree, ())
    return found if any(found) else _named_marks(tree)


def _typed_marks(tree: Any, around: tuple[Mark, ...]) -> list[tuple[Mark, ...]]:
    found = []
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, _MARKERS)
    )
    for path, node in nodes:
        if isinstance(node, _MARKERS):
            mark = _mark(node._fields[0], path)
            # A marker inside a marker of the same kind adds no axis.
            inside = around if mark in around else (*around, mark)
            found += _typed_marks(node[0], inside)
        else:
            found.append(around)
    return found


def _mark(name: str, above: Any) -> Mark:
    """The mark of a marker at the path `above`."""
    groups, group = [None, None, *map(_key, above)][-2:]
    if name == "per_shard" and groups == "groups":
        return tuple(str(group).split(","))
    return name


def _key(entry: Any) -> Any:
    """The name of an attribute, or the key of a dict, in a path."""
    return getattr(entry, "name", getattr(entry, "key", None))


def _named_marks(tree: Any) -> list[tuple[Mark, ...]]:
    names = {name for marker in _MARKERS for name in marker._fields}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    entries = collections.defaultdict(set)
    for path in paths:
        for i, key in enumerate(path):
            entries[path[:i]].add(key)

    def marks(path):
        return dict.fromkeys(
            _mark(key.key, path[:i])
            for i, key in enumerate(path)
            if isinstance(key, jax.tree_util.DictKey)
            and key.key in names
            and len(entries[path[:i]]) == 1
        )

    return [tuple(marks(path)) for path in paths]
