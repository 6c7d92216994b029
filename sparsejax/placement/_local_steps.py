"""One worker's optimizer steps between two exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax._workers import Workers, alone, vary_like
from sparsejax.placement._gradients import value_and_grad
from sparsejax.vectors._rounding import holds_float32


def local_steps(
    loss_fn: Callable[..., Any],
    inner: optax.GradientTransformationExtraArgs,
    workers: Workers,
    steps: int,
    **options: Any,
) -> Callable[..., tuple[Any, Any, Any]]:
    """Returns a function that takes one worker's steps, where the axis is bound.

    Args:
      loss_fn: `(params, batch, *per_step, **shared) -> loss`.
      inner: the optimizer.
      workers: the axis.
      steps: H, the number of steps.
      **options: options of `value_and_grad`.

    Returns:
      `(params, state, batches, per_step, shared, present) -> (losses, (state, aux),
      delta)`, with leaves [H, ...] of `batches`, `per_step`, `losses` and `aux`.
      `delta` is minus the sum of all updates, in float32 or wider. The state is the old
      one if `delta` is not finite, or if `present` is False; None means present.
    """
    differentiate = value_and_grad(loss_fn, **options)

    def run(params, state, batches, per_step, shared, present):
        def step(carry, given):
            delta, state = carry
            batch, per_step = given
            here = jax.tree.map(_minus, params, delta)
            out, grads = differentiate(here, batch, *per_step, **shared)
            loss, aux = out if options["has_aux"] else (out, ())
            more = {"value": loss, "grad": grads}
            with alone():
                updates, state = inner.update(grads, state, here, **more)
            # Updates are subtracted one by one: with H = 1 and plain SGD of rate 1
            # `delta` is the gradient, bit for bit.
            delta = jax.tree.map(lambda d, u: d - u.astype(d.dtype), delta, updates)
            return workers.localize((delta, state)), (loss, aux)

        start = workers.localize(jax.tree.map(_zeros, params))
        carry, given = (start, workers.localize(state)), (batches, per_step)
        (delta, new), (losses, aux) = _scan(step, carry, given, steps)
        # Moments would keep the NaN of a broken step forever.
        whole = _is_finite(delta)
        if present is not None:
            whole &= present
        state = jax.tree.map(lambda a, b: jnp.where(whole, a, b), new, state)
        return losses, (state, aux), delta

    return run


def _scan(step: Callable[..., Any], carry: Any, given: Any, steps: int) -> Any:
    """`jax.lax.scan`; no loop for one step: products in loops round differently."""
    if steps > 1:
        return jax.lax.scan(step, carry, given)
    carry, out = step(carry, jax.tree.map(lambda x: x[0], given))
    return carry, jax.tree.map(lambda x: jnp.asarray(x)[None], out)


def _minus(parameter: Any, delta: Any) -> Any:
    """The parameter, rounded once: `delta` has the wider dtype."""
    return (parameter.astype(delta.dtype) - delta).astype(parameter.dtype)


def _zeros(parameter: Any) -> Any:
    # `jnp.promote_types` would refuse bfloat16 under strict promotion.
    dtype = parameter.dtype if holds_float32(parameter.dtype) else jnp.float32
    return vary_like(jnp.zeros(parameter.shape, dtype), parameter)


def _is_finite(tree: Any) -> Any:
    """Bool[]: whether the sum of all coordinates is finite, as recipes test it."""
    leaves = jax.tree.leaves(tree)
    widest = max((x.dtype for x in leaves), key=lambda d: d.itemsize, default=None)
    return jnp.isfinite(sum(jnp.sum(x, dtype=widest) for x in leaves))
