"""Clipping by one norm that all workers agree on, before a recipe."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from sparsejax._checks import check_number
from sparsejax._local_gradient import LocalGradient
from sparsejax._workers import AxisName, Workers
from sparsejax.placement._markers import PerWorker

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def clip_by_global_norm(
    max_norm: float, *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    """Scales the gradients of all workers by one factor; use it before a recipe.

    Let `g_r` be the gradient of worker r, over all parameters. The norm is the root
    mean square of the workers' norms,

        norm = sqrt(mean_r |g_r|^2),    g_r <- g_r min(1, max_norm / norm)

    which is at least the norm of the mean gradient, and equal if all workers have the
    same gradient. So the averaged gradient is never longer than `max_norm`, and the
    factor costs one message of a number per worker.

    After a recipe, `optax.clip_by_global_norm` would treat coordinates that waited as
    outliers. Before it, `sparsejax.per_worker(optax.clip_by_global_norm(...))` scales
    each worker by itself, so workers with long gradients count less.

    Workers whose gradient is not finite do not count: the recipe leaves them out.

    In a `jax.shard_map` loop with a second axis for shards of the model, the norm
    covers one shard. Under plain `jax.jit` it covers the whole gradient.

    Args:
      max_norm: the largest norm of the averaged gradient.
      axis_name: the mesh axis of the workers, or a tuple of axes.

    Returns:
      A transformation of local gradients, without state.

    Raises:
      TypeError: if `max_norm` is not a number.
      ValueError: if `max_norm` is not positive.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> tx = optax.chain(
      ...     sparsejax.clip_by_global_norm(1.0), sparsejax.topk(0.1), optax.sgd(0.1)
      ... )
      >>> clip = sparsejax.simulate(sparsejax.clip_by_global_norm(5.0), workers=2)
    """
    max_norm = check_number(
        "max_norm", max_norm, lambda x: 0 < x < math.inf, "a finite number above 0"
    )
    workers = Workers(axis_name)

    def init(params):
        del params
        return optax.EmptyState()

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        if workers.bound():
            norms = workers.gather(_norm(jax.tree.leaves(updates)))
            factor = _factor(norms, max_norm)
            return jax.tree.map(lambda g: g * factor.astype(g.dtype), updates), state
        workers.require_mesh("update")
        leaves, treedef = jax.tree.flatten(
            updates, is_leaf=lambda x: isinstance(x, PerWorker)
        )
        rows = [_rows(leaf) for leaf in leaves]
        factor = _factor(jax.vmap(_norm)(rows), max_norm)
        scaled = [
            _like(leaf, row * factor.astype(row.dtype))
            for leaf, row in zip(leaves, rows, strict=True)
        ]
        return treedef.unflatten(scaled), state

    return optax.GradientTransformationExtraArgs(init, update)


def _rows(leaf: Any) -> Float[Array, "w ..."]:
    if isinstance(leaf, PerWorker):
        return leaf.per_worker
    if isinstance(leaf, LocalGradient):
        return leaf.rows
    raise ValueError(
        "clip_by_global_norm: this gradient is averaged already. Under plain `jax.jit` "
        "differentiate with `sparsejax.value_and_grad`; after a recipe leave the "
        "clipping out."
    )


def _like(leaf: Any, rows: Float[Array, "w ..."]) -> Any:
    return PerWorker(rows) if isinstance(leaf, PerWorker) else LocalGradient(rows)


def _norm(leaves: list[Float[Array, "..."]]) -> Float[Array, ""]:
    """The norm of one worker's gradient, without overflow of its squares."""
    if not any(leaf.size for leaf in leaves):
        return jnp.zeros((), jnp.float32)
    wide = [leaf.astype(jnp.float32) for leaf in leaves if leaf.size]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in wide]))
    unit = _positive(largest)
    squares = [jnp.sum(jnp.square(leaf / unit)) for leaf in wide]
    return unit * jnp.sqrt(jnp.sum(jnp.stack(squares)))


def _factor(norms: Float[Array, " w"], max_norm: float) -> Float[Array, ""]:
    """The factor for the norms of all workers."""
    known = jnp.isfinite(norms)
    norms = jnp.where(known, norms, 0.0)
    unit = _positive(jnp.max(norms))
    count = jnp.maximum(jnp.sum(known, dtype=jnp.float32), 1.0)
    # Relative to the largest norm, whose square might overflow.
    relative = jnp.sqrt(jnp.sum(jnp.square(norms / unit)) / count)
    return jnp.minimum(1.0, max_norm / _positive(relative) / unit)


def _positive(x: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.maximum(x, jnp.finfo(jnp.float32).tiny)
