"""`delayed`: exchanges that travel while the next step computes."""

from __future__ import annotations

import optax

from sparsejax._transform import SparsifyTransformation


def delayed(
    tx: optax.GradientTransformation, *, steps: int | None = None
) -> SparsifyTransformation:
    """The same method, whose exchange hides behind the computation of the next step.

    Each step sends one message, whose bytes lie in the state when the step begins, so
    that the exchange can start before the backward pass and end behind it. The sum of
    updates, of what is on its way and of the mean residual is that of mean gradients.

    - Pairs arrive one step late: values leave the residual when they are chosen, and
      the update of a step is the mean of the choices of the step before.
    - Values at common coordinates (`exdyna`, `micro`, `deft`, `cltk`) arrive two steps
      late: first the indices travel, and then, beside the indices of the next step, the
      values, which leave the residual when all workers know the indices. One
      all-reduce carries both, and so takes more bytes than the two messages without
      delay: half as many again at 1 %.

    With `sparsejax.rounds` the exchange is as many rounds late.

    At the end of a training one update with nobody present delivers what is on its way:
    `tx.update(gradients, state, params, present=jnp.zeros(workers, bool))`, whose
    gradients do not matter. `sparsejax.resize_workers` returns it to the residuals.

    Args:
      tx: of a recipe, or of `sparsejax.sparsify`, through `pairs`, or in 32 bits
        through `union` or `leader`: such as `sparsejax.topk(0.01)` or
        `sparsejax.exdyna(0.01)`. Transformations around a recipe stay around the
        delayed one.
      steps: the delay, as a check: that of the exchange, or `None`.

    Returns:
      The method. Reports are those of the delivered step.

    Raises:
      TypeError: if `tx` is not of a recipe alone, but a chain, say.
      ValueError: if the exchange has no late form, or another delay.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax
      >>> tx = optax.chain(sparsejax.delayed(sparsejax.topk(0.5)), optax.sgd(1.0))
      >>> tx, params = sparsejax.simulate(tx, workers=2), jnp.zeros(4)
      >>> state = tx.init(params)
      >>> first = jnp.array([[4.0, 1, 0, 0], [2.0, 0, 1, 6]])
      >>> for gradients in (first, jnp.zeros((2, 4))):
      ...     updates, state = tx.update(gradients, state, params)
      ...     print(updates)
      [-0. -0. -0. -0.]
      [-3.  -0.5 -0.  -3. ]

    References:
      Liu, Mu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, and
      Douillard et al., "Streaming DiLoCo", 2025, overlap rounds in the same way.
    """
    if not isinstance(tx, SparsifyTransformation):
        raise TypeError(
            "delayed: expected the transformation of a recipe alone, such as "
            "`sparsejax.topk(0.01)`. Inside a chain wrap the recipe: `optax.chain("
            "sparsejax.delayed(sparsejax.topk(0.01)), optax.sgd(0.1))`."
        )
    parts = tx.parts
    if parts.exchange.later is None:
        raise ValueError(
            f"delayed: `{parts.exchange.name}` has no late form. Methods that send "
            f"pairs have one, such as `sparsejax.topk(0.01)`, and methods that average "
            f"at common coordinates in 32 bits, such as `sparsejax.exdyna(0.01)` "
            f"without `value_bits`."
        )
    exchange = parts.exchange.later(parts.sparsifier, parts.workers)
    if steps not in (None, exchange.lag):
        raise ValueError(
            f"steps: got {steps}, but `{parts.exchange.name}` delivers "
            f"{exchange.lag} {'step' if exchange.lag == 1 else 'steps'} late. Leave "
            f"`steps` out."
        )
    return tx.through(exchange)
