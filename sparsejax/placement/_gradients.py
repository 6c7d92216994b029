"""Local gradients inside `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from sparsejax._workers import AxisName, Workers, varying_axes


def localize(tree: Any, *, axis_name: AxisName = "data") -> Any:
    """The same values, typed as differing per worker. Idempotent.

    Under `check_vma=True`, `jax.grad` with respect to *replicated* parameters sums over
    the workers; with respect to localised ones it gives each worker's own gradient.
    Differentiate the loss of this worker's part of the batch: a `pmean` inside the loss
    divides its gradient by the number of workers, which `value_and_grad` notices and
    this function cannot.

    Args:
      tree: pytree of arrays, replicated or per worker.
      axis_name: the mesh axis of the workers, or a tuple of axes.

    Returns:
      The tree, per worker.

    Raises:
      NameError: if the axis is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> def gradient(w, x):
      ...     return jax.grad(lambda w: jnp.mean(w * x))(sparsejax.localize(w))[None]
      >>> specs = dict(in_specs=(P(), P("data")), out_specs=P("data"))
      >>> x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("data")))
      >>> print(jax.jit(jax.shard_map(gradient, mesh=mesh, **specs))(2.0, x))
      [0. 1. 2. 3. 4. 5. 6. 7.]
    """
    workers = Workers(axis_name)
    workers.require_bound("localize")
    return workers.localize(tree)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    axis_name: AxisName = "data",
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` of each worker's own loss, not summed over workers.

    Args:
      fun: the loss of this worker's part of the batch, averaged over that part.
      argnums: which arguments to differentiate; they are localised first.
      has_aux: whether `fun` returns `(loss, aux)`.
      axis_name: the mesh axis of the workers, or a tuple of axes.

    Returns:
      A function with the arguments of `fun` that returns `(loss, gradients)`, both per
      worker: average the loss with `jax.lax.pmean` to log it.

    Raises:
      NameError: when called where the axis is not bound.
      ValueError: when the loss is typed as equal on all workers: a `pmean` inside
        it divides the gradients by the number of workers, which nothing can see later;
        or when the loss varies over further axes: the gradients of parameters that
        are equal there would be summed over them.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> def step(w, x):
      ...     loss, grad = sparsejax.value_and_grad(lambda w: jnp.mean(w * x))(w)
      ...     return jax.lax.pmean(loss, "data"), grad[None]
      >>> specs = dict(in_specs=(P(), P("data")), out_specs=(P(), P("data")))
      >>> x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("data")))
      >>> loss, grads = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(2.0, x)
      >>> print(loss, grads)
      7.0 [0. 1. 2. 3. 4. 5. 6. 7.]
    """
    workers = Workers(axis_name)
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def wrapped(*args, **kwargs):
        workers.require_bound("value_and_grad")
        if not args:
            raise TypeError(
                "value_and_grad: pass the arguments to differentiate by position; "
                "only others may be given by keyword."
            )
        chosen = {p % len(args) for p in positions}
        args = [workers.localize(a) if i in chosen else a for i, a in enumerate(args)]
        value, grads = jax.value_and_grad(fun, argnums, has_aux)(*args, **kwargs)
        loss = value[0] if has_aux else value
        if workers.typed() and not workers.is_local(loss):
            raise ValueError(
                f"value_and_grad: the loss is equal on all workers of axis "
                f"{axis_name!r}, so its gradient is already divided by or summed over "
                f"them. Return the loss of this worker's part of the batch, without a "
                f"`pmean` or `psum`, and average it afterwards for logging."
            )
        _check_other_axes(loss, [args[i] for i in sorted(chosen)], workers)
        return value, grads

    return wrapped


def _check_other_axes(loss: Any, parameters: Any, workers: Workers) -> None:
    """Raises ValueError if a gradient is summed over axes that nobody named."""
    others = varying_axes(loss) - set(workers.axes)
    summed = sorted(
        axis
        for axis in others
        if any(axis not in varying_axes(p) for p in jax.tree.leaves(parameters))
    )
    if summed:
        raise ValueError(
            f"value_and_grad: the loss also varies over {summed}, which `axis_name="
            f"{workers.axis_name!r}` does not name, so the gradients would be summed "
            f"over it. Name all axes, `axis_name={(*workers.axes, *summed)!r}`, and "
            f"average the gradients over those that the transformation does not "
            f"exchange over, `jax.lax.pmean(grads, {summed[0]!r})`; a loss over "
            f"shards of a model has to be equal on all of them (`jax.lax.psum`)."
        )
