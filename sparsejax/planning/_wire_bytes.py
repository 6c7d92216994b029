"""`wire_bytes`: bytes on the wire, from the collectives of the traced step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optax

from sparsejax._workers import AxisName
from sparsejax.planning._collectives import WireBytes, received, summarise
from sparsejax.planning._traced import trace

if TYPE_CHECKING:
    from sparsejax.placement._rounds import Rounds


def wire_bytes(
    tx: optax.GradientTransformation | Rounds,
    params: Any,
    *,
    workers: int | tuple[int, ...],
    axis_name: AxisName = "data",
) -> WireBytes:
    """Bytes that each worker receives per step, from the traced update.

    All message sizes are static, so nothing has to run: any machine can count the bytes
    for any number of workers.

    Parameters sharded over other axes than the workers' count shard by shard, and the
    bytes are those that each device receives over the workers' axis: in a step of plain
    `jax.jit`, or of a `jax.shard_map` loop if `tx` contains `per_shard`.

    Args:
      tx: a transformation that holds sparsejax ones; or a `sparsejax.Rounds`, whose
        bytes are spread over its local steps. One without collectives, such as
        `optax.sgd`, receives no bytes.
      params: pytree of arrays or `jax.ShapeDtypeStruct`s with the shapes of the
        gradients. For a sharded model, pass placed parameters, or structs with
        `sharding=`.
      workers: number of workers; one number per axis if `axis_name` is a tuple.
      axis_name: the mesh axis of the workers, or a tuple of axes.

    Returns:
      The bytes in total, by collective and by branch. An all-reduce of S bytes counts
      2 (w-1)/w S, an all-gather and an all-to-all (w-1)/w S, a permute S.

    Raises:
      NameError: if `tx` exchanges over another axis than `axis_name`.
      TypeError: if `tx` is not a transformation, or is a simulated one; if `params` is
        a number or has leaves without a shape; if a number of workers is not an int.
      ValueError: if a number of workers is less than 1; if `workers` and `axis_name`
        differ in length, or `axis_name` contains an axis twice.

    Example:
      >>> import jax.numpy as jnp, sparsejax
      >>> params = {"w": jnp.zeros(10_000)}
      >>> dense = sparsejax.wire_bytes(sparsejax.dense(), params, workers=4)
      >>> sparse = sparsejax.wire_bytes(sparsejax.micro(0.01), params, workers=4)
      >>> print(f"{100 * sparse.total / dense.total:.1f} % of dense")
      1.2 % of dense
    """
    return summarise(map(received, trace(tx, params, workers, axis_name)))
