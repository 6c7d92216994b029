"""How parameters are sharded over other axes than the workers'."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from sparsejax._checks import path_name
from sparsejax._workers import Workers, mesh_axis_sizes, spec_axes, without_axes

# The fix for parameters that are sharded over the workers' own axis.
SHARD_IN_ISLANDS = (
    "use a mesh of two axes such as ('replica', 'fsdp'), shard parameters over "
    "'fsdp', and exchange between replicas, `axis_name='replica'`."
)

_GIVEN: contextvars.ContextVar[dict[str, P] | None] = contextvars.ContextVar(
    "param_specs", default=None
)


def param_specs(params: Any, workers: Workers) -> Any:
    """The `PartitionSpec` of every parameter, without axes of size 1.

    Known from `with_param_specs`, from placed arrays and structs with a sharding, and
    from the types of explicit axes. Traced values on automatic axes do not show it.

    Raises:
      ValueError: if the sharding is unknown, and the mesh has another axis; for a
        parameter that is sharded over the workers' axis.
    """
    sizes = mesh_axis_sizes()

    def of(path, leaf):
        spec = _known_spec(path, leaf)
        if spec is None:
            _refuse_unknown(path, sizes, workers)
            return P()
        own = [a for a in spec_axes(spec) if a in workers.axes and sizes.get(a, 2) > 1]
        if own:
            _refuse_own(path, own, workers)
        return _useful(spec, sizes, workers)

    return jax.tree_util.tree_map_with_path(of, params)


def shard_like_parameters(params: Any, workers: Workers) -> Callable[[Any], Any]:
    """A function that shards optimizer state over other axes as its parameters are.

    A moment is recognised by its path, which ends with its parameter's path, and by its
    shape. Otherwise each device of an island would start with the moments of the whole
    model, until the first step has sharded them.

    Args:
      params: the parameters, outside of the workers' axis.
      workers: the axis.
    """
    sizes = mesh_axis_sizes()
    specs = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        spec = _useful(_known_spec(path, leaf) or P(), sizes, workers)
        if spec_axes(spec):
            specs[path] = (jnp.shape(leaf), spec)

    def place(path, leaf):
        for i in range(len(path)):
            shape, spec = specs.get(path[i:], (None, P()))
            if shape == jnp.shape(leaf):
                return _constrained(leaf, spec)
        return leaf

    return lambda state: jax.tree_util.tree_map_with_path(place, state)


def _constrained(x: Any, spec: P) -> Any:
    """`x`, sharded by `spec` on automatic axes; explicit axes are in its type."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = all(types[axis] == AxisType.Auto for axis in spec_axes(spec))
    return jax.lax.with_sharding_constraint(x, spec) if auto else x


def _known_spec(path: Any, leaf: Any) -> P | None:
    """The spec from `with_param_specs` or from the leaf; None if it is unknown."""
    given = _GIVEN.get() or {}
    name = path_name(path)
    return given[name] if name in given else _spec_of(leaf)


def _spec_of(leaf: Any) -> P | None:
    """The spec of a leaf; None if it is unknown."""
    if isinstance(leaf, jax.core.Tracer):
        typed = getattr(jax.typeof(leaf), "sharding", None)
        if typed is None or AxisType.Explicit not in typed.mesh.axis_types:
            return None
        return typed.spec
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.ShapeDtypeStruct) and sharding is None:
        return None
    return sharding.spec if isinstance(sharding, NamedSharding) else P()


def _useful(spec: P, sizes: dict[str, int], workers: Workers) -> P:
    """`spec` without the axes that shard nothing, and without the workers' one."""
    dropped = {a for a in spec_axes(spec) if sizes.get(a, 1) == 1} | set(workers.axes)
    entries = list(without_axes(spec, dropped))
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def _refuse_unknown(path: Any, sizes: dict[str, int], workers: Workers) -> None:
    """Raises ValueError if a parameter may be sharded over another axis."""
    others = [a for a, size in sizes.items() if a not in workers.axes and size > 1]
    if others:
        raise ValueError(
            f"init: the parameter `{path_name(path)}` is a traced value or a bare "
            f"shape, so its sharding over {others} is unknown. Call `init` "
            f"outside of `jax.jit` on placed parameters, or pass their shardings: "
            f"`sparsejax.with_param_specs(tx, specs)`, or `sparsejax.init(tx, params, "
            f"mesh, param_specs=specs)`, with a `PartitionSpec` for each parameter "
            f"(`P()` where it is replicated)."
        )


def _refuse_own(path: Any, own: list[str], workers: Workers) -> None:
    raise ValueError(
        f"init: the parameter `{path_name(path)}` is sharded over {own}, the workers' "
        f"own axis, so that no worker has all of it. For parameters in shards, "
        f"{SHARD_IN_ISLANDS}"
    )


@contextlib.contextmanager
def given_specs(params: Any, specs: Any) -> Iterator[None]:
    """Lets `param_specs` find the `specs` of `params`, by path, in this context."""

    def is_spec(node):
        return isinstance(node, P | NamedSharding)

    full = jax.tree.map(
        lambda spec, below: jax.tree.map(lambda _: spec, below),
        specs,
        params,
        is_leaf=is_spec,
    )
    found = {
        path_name(path): spec.spec if isinstance(spec, NamedSharding) else spec
        for path, spec in jax.tree_util.tree_leaves_with_path(full, is_leaf=is_spec)
    }
    token = _GIVEN.set(found)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def with_param_specs(
    tx: optax.GradientTransformation, specs: Any
) -> optax.GradientTransformationExtraArgs:
    """`tx`, with the shardings of its parameters.

    For `init` inside `jax.jit` on automatic axes, where parameters do not show them.
    Wrap the whole chain: recipes inside find their parameters by path, even inside
    `optax.partition` and `optax.masked`.

    Args:
      tx: a transformation that holds sparsejax ones.
      specs: a tree of `PartitionSpec`s or `NamedSharding`s, with the structure of the
        parameters, or a prefix of it.

    Returns:
      The same transformation.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> auto = (AxisType.Auto,) * 2
      >>> mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=auto)
      >>> tx = optax.chain(sparsejax.exdyna(0.1), optax.adam(1e-3))
      >>> tx = sparsejax.with_param_specs(tx, {"w": P(None, "model"), "b": P()})
      >>> with jax.set_mesh(mesh):
      ...     state = jax.jit(tx.init)({"w": jnp.zeros((10, 6)), "b": jnp.zeros(6)})
    """
    tx = optax.with_extra_args_support(tx)

    def init(params):
        with given_specs(params, specs):
            return tx.init(params)

    return optax.GradientTransformationExtraArgs(init, tx.update)
