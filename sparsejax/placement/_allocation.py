"""Allocates state where it belongs: rows on their devices, or this worker's view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from sparsejax._workers import Workers, mesh_worker_count
from sparsejax.placement._markers import add_worker_axis, state_specs


def allocate(make: Callable[..., Any], workers: Workers, *args: Any) -> Any:
    """Runs `make(worker_count, *args)`, which returns one worker's state, where due.

    `make` returns marked leaves without their leading axis. Inside the bound axis the
    result is this worker's view [1, ...]; outside it is the global state [w, ...],
    every row allocated on the device it belongs to.

    Raises:
      ValueError: if the axis is neither bound nor part of the mesh that is set.
    """
    if workers.bound():
        return add_worker_axis(make(workers.count(), *args), workers)
    count = mesh_worker_count(workers.axis_name)
    if count is None:
        raise ValueError(
            f"init: no axis {workers.axis_name!r} here, so the number of workers is "
            f"unknown. Either set the mesh first, `with jax.set_mesh(mesh): "
            f"tx.init(params)` (or `sparsejax.init(tx, params, mesh)`), or call "
            f"`tx.init` inside `jax.shard_map`. If the workers' axis has another name, "
            f"say so to both sides: `axis_name=` of the recipe, and of `simulate`, "
            f"`wire_bytes` and the like."
        )

    def local(*args):
        return add_worker_axis(make(count, *args))

    specs = state_specs(jax.eval_shape(local, *args), workers.axis_name)
    # A shard_map and not zeros([w, ...]): it shards the rows on Auto and Explicit
    # meshes alike, traced or not, and no device ever holds them all.
    sharded = jax.shard_map(
        local, in_specs=P(), out_specs=specs, axis_names=set(workers.axes)
    )
    return jax.jit(sharded)(*args)
