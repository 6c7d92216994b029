"""One worker's loss and gradient: weights, and microbatches one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sparsejax._checks import path_name
from sparsejax._workers import Workers, vary_like


def local_value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...],
    has_aux: bool,
    *,
    workers: Workers,
    weighted: bool,
    microbatches: int,
    batch_argnums: tuple[int, ...],
) -> Callable[..., tuple[Any, Any, Any]]:
    """Returns a function that returns `(loss, aux, gradients)` of this worker.

    Averaged over the workers with equal weights, loss and gradients are the global
    batch's: with `weighted` the weights of all workers are summed, and each part is
    scaled by its share.

    Args:
      fun: `(*args) -> loss`; with `weighted`, `(loss, weight)` instead of the loss;
        with `has_aux`, a pair of that result and aux.
      argnums: see `jax.value_and_grad`.
      has_aux: whether `fun` returns auxiliary values; those from microbatches get a
        new leading axis.
      workers: the workers' axis.
      weighted: whether the loss comes with a weight.
      microbatches: into how many parts a batch is split.
      batch_argnums: which arguments are split.
    """

    def split_off_aux(*args, **kwargs):
        out = fun(*args, **kwargs)
        loss, aux = out if has_aux else (out, ())
        loss, weight = _loss_and_weight(loss) if weighted else (loss, ())
        return loss, (weight, aux)

    differentiate = jax.value_and_grad(split_off_aux, argnums, has_aux=True)

    def once(args, kwargs):
        (loss, (weight, aux)), gradients = differentiate(*args, **kwargs)
        if weighted:
            loss, gradients = _weigh((loss, gradients), weight)
        return (loss, gradients, weight), aux

    def in_parts(args, kwargs):
        split = _split([args[i] for i in batch_argnums], microbatches)

        def take(split):
            some = list(args)
            for i, part in zip(batch_argnums, split, strict=True):
                some[i] = part
            return some

        def add(total, part):
            made, aux = once(take(part), kwargs)
            return jax.tree.map(jnp.add, total, made), aux

        first = [jax.tree.map(lambda x: x[0], s) for s in split]
        shapes, _ = jax.eval_shape(lambda: once(take(first), kwargs))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        # Typed as the values that a microbatch adds to them.
        zeros = jax.tree.map(vary_like, zeros, shapes)
        total, aux = jax.lax.scan(add, zeros, split)
        if not weighted:
            total = jax.tree.map(lambda x: x / microbatches, total)
        return total, aux

    def run(*args, **kwargs):
        total, aux = (once if microbatches == 1 else in_parts)(args, kwargs)
        loss, gradients, weight = total
        if weighted:
            everybody = workers.sum(weight)
            share = jnp.where(everybody > 0, workers.count() / everybody, 0.0)
            loss, gradients = _weigh((loss, gradients), share)
        return loss, aux, gradients

    return run


def _loss_and_weight(out: Any) -> tuple[Any, Any]:
    """Splits the result of a weighted loss into loss and weight.

    Raises:
      TypeError: if the result is not a pair.
    """
    if not (isinstance(out, tuple | list) and len(out) == 2):
        raise TypeError(
            "value_and_grad: with `weighted=True` the loss is a pair `(mean, weight)`, "
            "such as the mean over this batch's tokens and their number."
        )
    loss, weight = out
    dtype = jnp.float64 if jnp.result_type(loss) == jnp.float64 else jnp.float32
    return loss, jax.lax.stop_gradient(jnp.asarray(weight, dtype))


def _weigh(tree: Any, weight: Any) -> Any:
    """`weight` times all leaves; 0 if the weight is 0, since leaves may be NaN then."""

    def weigh(x):
        return jnp.where(weight != 0, x * weight.astype(x.dtype), jnp.zeros_like(x))

    return jax.tree.map(weigh, tree)


def _split(batches: Sequence[Any], parts: int) -> list[Any]:
    """Every leaf [b, ...] as [parts, b / parts, ...].

    Raises:
      ValueError: if `parts` does not divide b.
    """

    def split(path, x):
        if x.ndim == 0 or x.shape[0] % parts:
            raise ValueError(
                f"value_and_grad: microbatches={parts} does not divide the first axis "
                f"of this worker's part of the batch, `{path_name(path)}` of shape "
                f"{x.shape}."
            )
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])

    return [jax.tree_util.tree_map_with_path(split, batch) for batch in batches]
