"""Every worker's loss and gradient, where no axis is bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sparsejax import _local_gradient, _xla
from sparsejax._checks import path_name
from sparsejax._workers import Workers, mesh_axis_sizes, sharded_axes, spec_axes
from sparsejax.placement._loss_program import constrained_axes, divides_by_all
from sparsejax.placement._specs import SHARD_IN_ISLANDS
from sparsejax.placement._vmapped import by_vmap


def everybody(
    local: Callable[..., tuple[Any, Any, Any]],
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    workers: Workers,
    batch_argnums: tuple[int, ...],
    by: str = "shard_map",
    caller: str = "value_and_grad",
) -> tuple[Any, Any, Any]:
    """Runs `local`, which returns `(loss, aux, gradients)`, on each worker's part.

    Opens a `jax.shard_map` over the workers' axes only: all other axes of the mesh stay
    automatic. Types are not checked in it: with checked types, any loop in the
    loss that starts from a constant raises.

    Args:
      local: the function of one worker.
      args: its arguments.
      kwargs: its keyword arguments, equal on all workers.
      workers: the axis, of the mesh that is set.
      batch_argnums: positions of the arguments that are split along their first axis.
      by: "shard_map", or "vmap" for models that name the whole mesh.
      caller: for error messages.

    Returns:
      The mean loss Float[]; aux with a leading axis [w]; every gradient leaf as a
      `LocalGradient`.

    Raises:
      ValueError: without a mesh that has the axis; for a batch that the number of
        workers does not divide; for other arguments that are sharded over the axis.
    """
    workers.require_mesh(caller)
    batches = [i in batch_argnums for i in range(len(args))]
    for i, split in enumerate(batches):
        check = _check_batch if split else _check_shared
        check(args[i], i, workers)
        _refuse_gathered(args[i], i, workers)
    args = [
        _spread(a, workers) if split else a
        for a, split in zip(args, batches, strict=True)
    ]
    arrays, rest = _arrays((args, kwargs))

    def run(arrays):
        args, kwargs = _joined(arrays, rest)
        return jax.tree.map(jnp.asarray, local(*args, **kwargs))

    mapping = by_vmap if by == "vmap" else _by_shard_map
    loss, aux, gradients = mapping(run, batches, workers)(arrays)
    return jnp.mean(loss), aux, _local_gradient.wrap(gradients)


def _by_shard_map(run: Any, split: list[bool], workers: Workers) -> Any:
    """`run` on each worker's part, with the results of all along a leading axis [w]."""
    axis = P(workers.axes)
    return jax.shard_map(
        lambda arrays: jax.tree.map(lambda x: x[None], run(arrays)),
        in_specs=(([axis if s else P() for s in split], P()),),
        out_specs=axis,
        axis_names=set(workers.axes),
        check_vma=False,
    )


def looked_at(fun: Callable[..., Any], workers: Workers) -> Callable[..., Any]:
    """`fun`, traced once and checked before it runs.

    Raises:
      ValueError: from the function, if its loss is a local sum over a `psum`, if it
        constrains an array to be sharded over the workers' axis, or if it opens a
        `jax.shard_map` of the whole mesh where that axis is manual already.
    """

    def checked(*args, **kwargs):
        arrays, rest = _arrays((args, kwargs))
        leaves, treedef = jax.tree.flatten(arrays)

        def flat(*leaves):
            args, kwargs = _joined(treedef.unflatten(leaves), rest)
            return fun(*args, **kwargs)

        try:
            program, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        except ValueError as error:
            if "context mesh" not in str(error):
                raise
            raise ValueError(
                f"value_and_grad: the loss names the whole mesh, while the axis "
                f"{workers.axis_name!r} is manual inside. Leave `mesh=` out of its "
                f'`jax.shard_map`, or pass `by="vmap"` to `value_and_grad`.'
            ) from error
        own = sorted(constrained_axes(program.jaxpr) & set(workers.axes))
        if own:
            raise ValueError(
                f"value_and_grad: the loss constrains an array to be sharded over "
                f"{own}. Inside the loss each worker has its own part, so leave that "
                f"axis out: `jax.lax.with_sharding_constraint(x, P(None, 'model'))`."
            )
        if program.jaxpr.outvars and divides_by_all(
            program.jaxpr, frozenset(workers.axes)
        ):
            raise ValueError(
                f"value_and_grad: the loss is a local sum divided by a `psum` over "
                f"{workers.axis_name!r}, so that its value and gradient are 1/w of the "
                f"global ones. Return `(mean, weight)` of this worker's part, "
                f"and pass `weighted=True`."
            )
        made = jax.extend.core.jaxpr_as_fun(program)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    return checked


def _arrays(tree: Any) -> tuple[Any, Any]:
    """`tree` with its arrays alone, and with everything else alone; None elsewhere."""

    def is_array(x):
        return isinstance(x, jax.Array | np.ndarray | np.generic)

    arrays = jax.tree.map(lambda x: x if is_array(x) else None, tree)
    rest = jax.tree.map(lambda x: None if is_array(x) else x, tree)
    return arrays, rest


def _joined(arrays: Any, rest: Any) -> Any:
    """The tree that `_arrays` took apart."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, arrays, rest, is_leaf=lambda x: x is None
    )


def _check_batch(batch: Any, position: int, workers: Workers) -> None:
    """Raises ValueError unless the workers can split every array of a batch."""
    count = workers.mesh_count()
    for path, leaf in jax.tree_util.tree_leaves_with_path(_arrays(batch)[0]):
        if leaf.ndim == 0 or leaf.shape[0] % count:
            raise ValueError(
                f"value_and_grad: argument {position}, `{path_name(path)}`, has the "
                f"shape {leaf.shape}, and its first axis is split over {count} "
                f"workers. Pad it to a multiple of {count} and give each example a "
                f"weight (`weighted=True`), or name the arguments that are batches, "
                f"`batch_argnums=`."
            )


def _check_shared(tree: Any, position: int, workers: Workers) -> None:
    """Raises ValueError for arrays that are sharded over the workers' own axis."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(_arrays(tree)[0]):
        own = sharded_axes(leaf) & set(workers.axes)
        if own:
            raise ValueError(
                f"value_and_grad: argument {position}, `{path_name(path)}`, is sharded "
                f"over {sorted(own)}, the workers' own axis. If it is a batch, use "
                f"`batch_argnums=`. Parameters have to be equal on all workers: for "
                f"parameters in shards, {SHARD_IN_ISLANDS}"
            )


def _refuse_gathered(tree: Any, position: int, workers: Workers) -> None:
    """Raises ValueError for shards on explicit axes that jax would gather whole."""
    if not _xla.explicit_shards_are_gathered():
        return
    sizes = mesh_axis_sizes()
    for path, leaf in jax.tree_util.tree_leaves_with_path(_arrays(tree)[0]):
        # Types show explicit axes only.
        spec = getattr(getattr(jax.typeof(leaf), "sharding", None), "spec", None)
        axes = set(spec_axes(spec or ())) - set(workers.axes)
        others = sorted(a for a in axes if sizes.get(a, 2) > 1)
        if others:
            raise ValueError(
                f"value_and_grad: argument {position}, `{path_name(path)}`, is sharded "
                f"over {others}, and jax {jax.__version__} would gather it whole on "
                f"every device: axes of type `Explicit` beside the workers' one need "
                f"jax 0.11. Update jax, or make the mesh with `axis_types="
                f"(AxisType.Auto, ...)`."
            )


def _spread(batch: Any, workers: Workers) -> Any:
    """Shards a batch on explicit axes over the workers, along its first axis."""

    return jax.tree.map(
        lambda x: workers.spread(x) if isinstance(x, jax.Array) else x, batch
    )
