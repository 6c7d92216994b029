"""Gradients that are not summed over workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from sparsejax._checks import check_count
from sparsejax._workers import AxisName, Workers, varying_axes
from sparsejax.placement._everybody import everybody, looked_at
from sparsejax.placement._loss import local_value_and_grad
from sparsejax.placement._markers import PerWorker


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


def worker_key(key: Any, *, axis_name: AxisName = "data") -> Any:
    """A random key of this worker's own: `key` folded with the worker's index.

    Use it inside a loss, so that each worker drops different units.

    Args:
      key: a key, equal on all workers.
      axis_name: the mesh axis of the workers, or a tuple of axes.

    Returns:
      A key, per worker.

    Raises:
      NameError: if the axis is not bound; inside the loss of `value_and_grad` it is.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> def loss_fn(params, batch, key):
      ...     key = sparsejax.worker_key(key)
      ...     kept = jax.random.bernoulli(key, 0.9, batch.shape)
      ...     return jnp.mean(params * batch * kept)
    """
    workers = Workers(axis_name)
    workers.require_bound("worker_key")
    return jax.random.fold_in(key, workers.index())


def rows(gradients: Any) -> Any:
    """All workers' rows of the gradients from `value_and_grad`, where no axis is bound.

    Use it for your own code between gradient and recipe, and to return gradients from
    `jax.jit`. `update` of a recipe takes these rows too.

    Args:
      gradients: a tree with a `LocalGradient` at each leaf.

    Returns:
      The tree with `PerWorker(Float[w, ...])` at each leaf.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> with jax.set_mesh(mesh):
      ...     x = jax.device_put(jnp.arange(8.0), jax.P("data"))
      ...     gradient = sparsejax.value_and_grad(lambda w, x: jnp.mean(w * x))
      ...     loss, grad = gradient(2.0, x)
      >>> print(sparsejax.rows(grad).per_worker)
      [0. 1. 2. 3. 4. 5. 6. 7.]
    """
    return jax.tree.map(lambda leaf: PerWorker(leaf.rows), gradients)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    axis_name: AxisName = "data",
    batch_argnums: int | Sequence[int] = 1,
    weighted: bool = False,
    microbatches: int = 1,
    by: str = "shard_map",
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` of each worker's own loss, not summed over workers.

    Where the axis is not bound, under plain `jax.jit` with a mesh that is set, each
    worker gets its part of the batch, and the axis is bound inside the loss. Where it
    is bound, inside `jax.shard_map`, the arguments are this worker's already.

    Args:
      fun: the loss of this worker's part of the batch, averaged over that part.
      argnums: which arguments to differentiate.
      has_aux: whether `fun` returns `(loss, aux)`.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      batch_argnums: the arguments that the workers split along the first axis; all
        others are equal on all workers.
      weighted: whether `fun` returns `(mean, weight)` instead of the loss, such as the
        mean over the tokens that count and their number. The result is the gradient of
        the weighted mean over all workers; a weight of 0 is legal.
      microbatches: into how many parts a worker splits its part of the batch; they
        are computed one after another, which saves memory, and averaged.
      by: how the loss runs on all workers where the axis is not bound. "vmap" is for
        models that name the whole mesh, such as by a `jax.shard_map` of their own. It
        needs automatic axes; for convolutions XLA then gathers all workers' batches.

    Returns:
      A function with the arguments of `fun` that returns `(loss, gradients)`, or
      `((loss, aux), gradients)`.

      - Axis bound: all per worker; average the loss with `jax.lax.pmean` to log it.
      - Not bound: the mean loss; aux with a leading axis [w]; and gradients that
        stay on their workers, as `LocalGradient`s, which only recipes accept.

      Auxiliary values of microbatches have a further leading axis [microbatches].

    Raises:
      NameError: if the axis is neither bound nor one of the mesh that is set.
      TypeError: without positional arguments; if a weighted loss is not a pair.
      ValueError: for an unknown `by`; if the number of workers, or of
        microbatches, does not divide a batch; if parameters are sharded over the
        workers' axis; for a loss that is divided by a sum over the workers, or that
        names the whole mesh. Where the axis is bound: if the loss is typed as equal
        on all workers, since a `pmean` inside divides the gradients by the number
        of workers; or if it varies over axes that `axis_name` does not name.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> tx = optax.chain(sparsejax.exdyna(density=0.5), optax.sgd(0.1))
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch @ params) ** 2)
      >>> @jax.jit
      ... def step(params, state, batch):
      ...     loss, grads = sparsejax.value_and_grad(loss_fn)(params, batch)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state, loss
      >>> with jax.set_mesh(jax.make_mesh((8,), ("data",))):
      ...     params, batch = jax.device_put((jnp.ones(3), jnp.ones((16, 3))), jax.P())
      ...     params, state, loss = step(params, tx.init(params), batch)
      >>> print(loss)
      9.0
    """
    if by not in ("shard_map", "vmap"):
        raise ValueError(
            f'value_and_grad: by: got {by!r}, expected "shard_map" or "vmap".'
        )
    workers = Workers(axis_name)
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    batches = (batch_argnums,) if isinstance(batch_argnums, int) else batch_argnums
    options = {
        "workers": workers,
        "weighted": weighted,
        "microbatches": check_count("microbatches", microbatches),
    }

    def wrapped(*args, **kwargs):
        if not args:
            raise TypeError(
                "value_and_grad: pass the arguments to differentiate by position; "
                "only others may be given by keyword."
            )
        split = tuple(sorted({p % len(args) for p in batches if p < len(args)}))
        bound = workers.bound()
        local = local_value_and_grad(
            fun if bound else looked_at(fun, workers),
            argnums,
            has_aux,
            batch_argnums=split,
            **options,
        )
        if bound:
            chosen = sorted({p % len(args) for p in positions})
            args = [
                workers.localize(a) if i in chosen else a for i, a in enumerate(args)
            ]
            loss, aux, grads = local(*args, **kwargs)
            _check_loss(loss, [args[i] for i in chosen], workers)
        else:
            loss, aux, grads = everybody(
                local, list(args), kwargs, workers=workers, batch_argnums=split, by=by
            )
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def _check_loss(loss: Any, parameters: list[Any], workers: Workers) -> None:
    """Raises ValueError if types show that the gradient is not this worker's own."""
    if workers.typed() and not workers.is_local(loss):
        raise ValueError(
            f"value_and_grad: the loss is equal on all workers of axis "
            f"{workers.axis_name!r}, so its gradient is already divided by or summed "
            f"over them. Return the loss of this worker's part of the batch, without a "
            f"`pmean` or `psum`, and average it afterwards for logging."
        )
    _check_other_axes(loss, parameters, workers)


def _check_other_axes(loss: Any, parameters: Any, workers: Workers) -> None:
    """Raises ValueError if a gradient is summed over axes that `workers` lacks."""
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
            f"over them. Name all axes, `axis_name={(*workers.axes, *summed)!r}`, and "
            f"average the gradients over those that the transformation does not "
            f"exchange over, `jax.lax.pmean(grads, {summed[0]!r})`; a loss over "
            f"shards of a model has to be equal on all of them (`jax.lax.psum`)."
        )
