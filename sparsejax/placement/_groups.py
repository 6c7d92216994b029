"""Leaves in groups, by the axes that they are sharded over.

A leaf that is replicated over an axis of the model has to stay equal on all shards. In
one vector with sharded leaves the thresholds would differ per shard, so each group is
a vector of its own, with a residual and a sparsifier's state of its own.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from sparsejax._checks import path_name
from sparsejax._workers import Workers, mesh_axis_sizes, spec_axes
from sparsejax.placement._markers import add_shard_axis, drop_shard_axis
from sparsejax.placement._specs import param_specs

# The name of the group of leaves that no axis shards.
REPLICATED = "replicated"


@jax.tree_util.register_static
class Sharding(NamedTuple):
    """How each parameter is sharded: a pytree without leaves, kept in the state.

    Attributes:
      text: a literal dict from the path of a parameter to the entries of its spec and
        its shape. A string, so that any serialiser can write it.
    """

    text: str = "{}"

    @classmethod
    def of(cls, params: Any, specs: Any) -> Self:
        """Makes the record from parameters and their `PartitionSpec`s."""
        leaves = jax.tree_util.tree_leaves_with_path(params)
        treedef: Any = jax.tree.structure(params)
        entries = map(tuple, treedef.flatten_up_to(specs))
        return cls(
            repr(
                {
                    path_name(path): (spec, tuple(jnp.shape(leaf)))
                    for (path, leaf), spec in zip(leaves, entries, strict=True)
                }
            )
        )

    def specs(self) -> dict[str, P]:
        """The `PartitionSpec` of each parameter, by path."""
        known = ast.literal_eval(self.text)
        return {name: P(*entries) for name, (entries, _) in known.items()}

    def size(self) -> int:
        """The number of coordinates of all parameters."""
        known = ast.literal_eval(self.text)
        return sum(math.prod(shape) for _, shape in known.values())


class ShardedState(NamedTuple):
    """A state for each group of leaves, where some parameters are sharded.

    Attributes:
      groups: the state of each group's vector, by the axes of the group, such as
        "model" or "fsdp,model", or "replicated". States of shards are marked
        `PerShard` and have a leading axis for the shards.
      sharding: static, how each parameter is sharded.
    """

    groups: dict[str, Any]
    sharding: Sharding


def init(
    start: Callable[..., Any], params: Any, workers: Workers
) -> Any | ShardedState:
    """Returns a `ShardedState`, or the plain state if no parameter is sharded.

    Args:
      start: `(tree, shard_axes) -> state`; the tree has the shapes of one shard.
      params: the parameters.
      workers: the axis, which is not bound.
    """
    workers.require_mesh("init")
    specs = param_specs(params, workers)
    sharding = Sharding.of(params, specs)
    by_path = sharding.specs()
    groups = _in_groups(params, by_path)
    if set(groups) <= {REPLICATED}:
        return start(params)

    def shard(name, leaf):
        shape = _shard_shape(jnp.shape(leaf), by_path[name])
        return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))

    return ShardedState(
        {
            group: start(
                {name: shard(name, x) for name, x in leaves.items()}, _axes(group)
            )
            for group, leaves in groups.items()
        },
        sharding,
    )


def update(one: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Returns an update that runs `one` for each group of a `ShardedState`.

    Raises:
      NameError: from the function, where an axis of a group is not bound.
    """

    def every(updates, state, params=None, **extra_args):
        if not isinstance(state, ShardedState):
            return one(updates, state, params, **extra_args)
        specs = state.sharding.specs()
        check_names(updates, specs)
        groups = _in_groups(updates, specs)
        new, states = {}, {}
        for group, leaves in groups.items():
            shards = Workers(_axes(group)) if _axes(group) else None
            inner = state.groups[group]
            if shards:
                _require_bound(shards)
                inner = drop_shard_axis(inner, shards)
            new[group], made = one(leaves, inner, **extra_args)
            states[group] = add_shard_axis(made, shards) if shards else made
        return _out_of_groups(new, updates), state._replace(groups=states)

    return every


def check_names(tree: Any, specs: dict[str, P]) -> None:
    """Raises ValueError if `tree` has other leaves than those that have `specs`."""
    names = {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
    if others := sorted(names ^ set(specs)):
        raise ValueError(
            f"the gradients have another structure than the tree that `init` got: only "
            f"one of the two has {', '.join(f'`{name}`' for name in others)}. Call "
            f"`tx.init` with a tree of the same structure and shapes as the gradients."
        )


def _require_bound(shards: Workers) -> None:
    if not shards.bound():
        raise NameError(
            f"update: this state was made for plain `jax.jit`, with parameters that "
            f"are sharded over {shards.axes}. Inside a `jax.shard_map` loop bind those "
            f"axes too, with `sparsejax.state_specs(state)` as in_specs, or wrap the "
            f"chain in `sparsejax.per_shard`."
        )


def _group_name(spec: P) -> str:
    """The name of the group of leaves that `spec` shards: the axes of `spec`."""
    return ",".join(sorted(spec_axes(spec))) or REPLICATED


def _axes(name: str) -> tuple[str, ...]:
    """The axes of a group."""
    return () if name == REPLICATED else tuple(name.split(","))


def _in_groups(tree: Any, specs: dict[str, P]) -> dict[str, dict[str, Any]]:
    """The leaves of `tree`, by group and then by path."""
    groups: dict[str, dict[str, Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        groups.setdefault(_group_name(specs[name]), {})[name] = leaf
    return dict(sorted(groups.items()))


def _out_of_groups(groups: dict[str, dict[str, Any]], tree: Any) -> Any:
    """A tree like `tree`, made of leaves by group and path."""
    found = {name: leaf for group in groups.values() for name, leaf in group.items()}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: found[path_name(path)], tree
    )


def _shard_shape(shape: tuple[int, ...], spec: P) -> tuple[int, ...]:
    """The shape of one shard.

    Raises:
      ValueError: if the shards of an axis would differ in size.
    """
    sizes = mesh_axis_sizes()
    entries = [*spec, *[None] * (len(shape) - len(spec))]

    def part(size, entry):
        parts = math.prod(sizes[axis] for axis in spec_axes([entry]))
        if size % parts:
            raise ValueError(
                f"init: a parameter of shape {shape} is sharded as {spec}, but {size} "
                f"is not a multiple of {parts}. Pad the parameter, or shard another "
                f"axis of it."
            )
        return size // parts

    return tuple(part(size, entry) for size, entry in zip(shape, entries, strict=True))
