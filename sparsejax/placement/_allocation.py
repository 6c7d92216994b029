"""Allocates state where it belongs: rows on their devices, or this worker's view."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from sparsejax._workers import Workers
from sparsejax.placement._markers import add_shard_axis, add_worker_axis, state_specs


def allocate(
    make: Callable[..., Any],
    workers: Workers,
    *args: Any,
    shard_axes: tuple[str, ...] = (),
) -> Any:
    """Runs `make(worker_count, *args)` for each worker, on the worker's device.

    `make` returns marked leaves without their leading axis. Inside the bound axis the
    result is this worker's view [1, ...]; outside it is the global state [w, ...],
    every row allocated on the device it belongs to.

    Args:
      make: returns the state of one worker.
      workers: the axis.
      *args: arrays, replicated.
      shard_axes: axes of the model over which all of the state differs; outside only.

    Raises:
      NameError: outside, if no mesh with the axis is set.
    """
    if workers.bound():
        return add_worker_axis(make(workers.count(), *args), workers)
    workers.require_mesh("init")
    count = workers.mesh_count()

    def local(*args):
        state = add_worker_axis(make(count, *args))
        return add_shard_axis(state) if shard_axes else state

    specs = state_specs(
        jax.eval_shape(local, *args), workers.axis_name, shard_axis=shard_axes
    )
    # A shard_map and not zeros([w, ...]): it shards the rows on Auto and Explicit
    # meshes alike, traced or not, and no device ever holds them all.
    sharded = jax.shard_map(
        local, in_specs=P(), out_specs=specs, axis_names={*workers.axes, *shard_axes}
    )
    return jax.jit(sharded)(*args)
