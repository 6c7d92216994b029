"""The collectives of a transformation's traced step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from sparsejax._checks import check_count, matching_axis
from sparsejax._local_gradient import wrap
from sparsejax._workers import AxisName, Workers, spec_axes, without_axes
from sparsejax.placement._markers import PerShard
from sparsejax.placement._specs import with_param_specs
from sparsejax.planning._arguments import (
    check_shapes,
    check_transformation,
    refuse_arrays,
)
from sparsejax.planning._collectives import Operation

# jax's primitives. A checked shard_map traces to those named "invariant".
_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
    "psum_scatter": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
}


def trace(
    tx: Any,
    params: Any,
    workers: int | tuple[int, ...],
    axis_name: AxisName,
) -> tuple[Operation, ...]:
    """The collectives of one `tx.update`; arguments and errors as in `wire_bytes`.

    For a `Rounds`, the collectives of its exchange, each run `1 / steps` times.
    """
    if hasattr(tx, "outer"):
        whole = trace(tx.outer, params, workers, axis_name)
        return tuple(o._replace(times=o.times / tx.steps) for o in whole)
    check_transformation(tx)
    check_shapes(params)
    sizes = workers if isinstance(workers, tuple) else (workers,)
    for size in sizes:
        refuse_arrays(workers=size)
    sizes = tuple(check_count("workers", size) for size in sizes)
    axes = Workers(axis_name).axes
    if len(sizes) != len(axes):
        raise ValueError(
            f"workers: got {workers}, expected one number for each axis of {axes}."
        )
    leaves, treedef = jax.tree.flatten(params)
    shapes = tuple(
        jax.ShapeDtypeStruct(
            jnp.shape(p), jnp.result_type(p), sharding=getattr(p, "sharding", None)
        )
        for p in leaves
    )
    # With 64-bit types enabled the trace is different.
    default = jnp.result_type(float)
    try:
        hash(tx)
    except TypeError:  # Methods of an object that cannot be hashed are legal.
        traced = _traced.__wrapped__
    else:
        traced = _traced
    with matching_axis(axis_name, "`predict` or `wire_bytes`"):
        return traced(tx, treedef, shapes, sizes, axes, default)


# Predictions for several links share a trace, which takes as long as tracing the step.
@functools.lru_cache(maxsize=256)
def _traced(
    tx: optax.GradientTransformation,
    treedef: Any,
    shapes: tuple[jax.ShapeDtypeStruct, ...],
    sizes: tuple[int, ...],
    axes: tuple[str, ...],
    default: np.dtype,
) -> tuple[Operation, ...]:
    params = treedef.unflatten(shapes)
    known = dict(zip(axes, sizes, strict=True))
    specs = jax.tree.map(lambda p: _shard_spec(p, axes), params)
    for leaf, spec in zip(shapes, jax.tree.leaves(specs), strict=True):
        known |= {name: leaf.sharding.mesh.shape[name] for name in spec_axes(spec)}
    mesh = AbstractMesh(
        tuple(known.values()), tuple(known), axis_types=(AxisType.Auto,) * len(known)
    )

    def shaped(*leading):
        return jax.tree.map(
            lambda p: jax.ShapeDtypeStruct((*leading, *p.shape), p.dtype), params
        )

    # The axis of shards is bound only in loops that contain `per_shard`.
    bound = set(known) == set(axes) or _holds_per_shard(tx, shaped(), mesh, specs)
    program = _bound(tx, mesh, axes, specs) if bound else _plain(tx, specs)
    # The mesh of the context has no effect.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ()) if bound else mesh):
        jaxpr = jax.make_jaxpr(program)(shaped(math.prod(sizes)), shaped())
    return tuple(_walk(jaxpr.jaxpr, known, "", 1))


def _bound(
    tx: optax.GradientTransformation, mesh: AbstractMesh, axes: tuple[str, ...], specs
) -> Callable[..., Any]:
    """The update `(gradients [w, ...], params)` with all axes of the mesh bound."""

    def step(gradients, params):
        local = jax.tree.map(lambda g: g[0], gradients)
        updates, _ = tx.update(local, tx.init(params), params)
        # A frozen leaf's zeros are typed as its local gradient is.
        return jax.tree.map(lambda u: u[None], updates)

    by_worker = jax.tree.map(lambda spec: P(axes, *spec), specs)
    return jax.shard_map(
        step, mesh=mesh, in_specs=(by_worker, specs), out_specs=by_worker
    )


def _plain(tx: optax.GradientTransformation, specs: Any) -> Callable[..., Any]:
    """The update of plain `jax.jit`, where each group of leaves is sent by itself."""
    told = with_param_specs(tx, specs)

    def step(gradients, params):
        _, state = told.update(wrap(gradients), told.init(params), params)
        return state

    return step


def _holds_per_shard(
    tx: optax.GradientTransformation, params: Any, mesh: AbstractMesh, specs: Any
) -> bool:
    """Whether `per_shard` is around a part of `tx`."""
    init = jax.shard_map(
        tx.init, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        state = jax.eval_shape(init, params)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, PerShard))
    return any(isinstance(node, PerShard) for node in nodes)


def _shard_spec(leaf: Any, worker_axes: tuple[str, ...]) -> P:
    """The sharding of a parameter over other axes than the workers'."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None) or ()
    return without_axes(spec, set(worker_axes))


def _walk(
    jaxpr: Any, sizes: dict[str, int], branch: str, times: int
) -> Iterator[Operation]:
    conditionals, before = 0, None
    for eqn in jaxpr.eqns:
        kind = _KINDS.get(eqn.primitive.name)
        if kind:
            names = eqn.params.get("axes", eqn.params.get("axis_name"))
            # The leaves of one `psum` follow each other, and XLA combines them.
            joined = kind == "all-reduce" and before == (kind, names)
            before = (kind, names)
            names = names if isinstance(names, tuple) else (names,)
            workers = math.prod(sizes.get(name, 1) for name in names)
            measured = eqn.outvars if kind == "all-gather" else eqn.invars
            size = sum(v.aval.size * v.aval.dtype.itemsize for v in measured)
            yield Operation(kind, size, workers, branch, times, joined)
            continue
        before = None
        if eqn.primitive.name == "cond":
            for i, closed in enumerate(eqn.params["branches"]):
                inside = f"{branch}cond{conditionals}[{i}]"
                yield from _walk(closed.jaxpr, sizes, inside, times)
            conditionals += 1
        else:
            repeats = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from _walk(inner, sizes, branch, times * repeats)
