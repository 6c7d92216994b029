"""All workers' parts of a batch by `jax.vmap`, for models that name the whole mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sparsejax._workers import Workers, mesh_axis_sizes


def by_vmap(
    run: Callable[..., Any], split: Sequence[bool], workers: Workers
) -> Callable[[Any], Any]:
    """`run` on each worker's part, mapped by `jax.vmap` instead of `jax.shard_map`.

    The axes of the mesh stay automatic, so that a model may open a `jax.shard_map` of
    the whole mesh; `spmd_axis_name` adds the workers' axis to its specs, as the first.

    Args:
      run: `((args, kwargs)) -> tree` of one worker.
      split: for each of `args`, whether the workers split it along its first axis.
      workers: the axis, of the mesh that is set.

    Returns:
      A function of the global arguments; each leaf of its results is [w, ...].

    Raises:
      ValueError: if axes of the mesh are not automatic.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f'value_and_grad: by="vmap" needs automatic axes, and the mesh has '
            f"{mesh.axis_types}. Make the mesh with `axis_types=(AxisType.Auto, ...)`."
        )
    sizes = tuple(mesh_axis_sizes()[axis] for axis in workers.axes)

    def cut(x):
        x = x.reshape(*sizes, x.shape[0] // workers.mesh_count(), *x.shape[1:])
        return _sharded(x, workers.axes)

    def join(x):
        x = x.reshape(workers.mesh_count(), *x.shape[len(sizes) :])
        return _sharded(x, (workers.axes,))

    mapped = run
    for axis in reversed(workers.axes):
        mapped = jax.vmap(
            mapped,
            in_axes=(([0 if s else None for s in split], None),),
            axis_name=axis,
            spmd_axis_name=axis,
        )

    def call(arrays):
        args, kwargs = arrays
        args = [
            jax.tree.map(cut, a) if s else a for a, s in zip(args, split, strict=True)
        ]
        return jax.tree.map(join, mapped((args, kwargs)))

    return call


def _sharded(x: Any, axes: Sequence[Any]) -> Any:
    """Shards the first axes of `x` over the workers; other axes stay as they are."""
    rest = (P.UNCONSTRAINED,) * (x.ndim - len(axes))
    return jax.lax.with_sharding_constraint(x, P(*axes, *rest))
