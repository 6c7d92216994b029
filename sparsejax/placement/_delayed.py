"""`delayed`: exchanges that travel while the next step computes."""

from __future__ import annotations

import optax

from sparsejax._transform import SparsifyTransformation


def delayed(
    tx: optax.GradientTransformation, *, steps: int | None = None
) -> SparsifyTransformation:
    """The same method, whose exchange runs while the next step computes.

    Each step sends one message. The state contains its bytes when the step begins, so
    the exchange can start before the backward pass and end after it. No gradient mass
    is lost: updates + values in flight + mean residual = sum of mean gradients.

    - Pairs arrive one step late: values leave the residual when they are chosen, and
      the update of a step is the mean of the choices of the step before.
    - Values at common coordinates (`exdyna`, `micro`, `deft`, `cltk`, `random_k`)
      arrive two steps late: the indices travel first. The values follow, beside the
      indices of the next step, and leave the residual when all workers know their
      indices. One all-reduce carries both. At 1 %, with eight workers, it takes about
      1.5 times the bytes of the messages without delay, 1.2 times with `cltk`.

    With `sparsejax.rounds` the delay is one or two rounds instead of steps.

    After the last step, one update without any worker delivers the values in flight:
    `tx.update(gradients, state, params, present=jnp.zeros(workers, bool))`; its
    gradients do not matter. `sparsejax.resize_workers` returns the values in flight to
    the residuals.

    Args:
      tx: a transformation made by a recipe or by `sparsejax.sparsify`, whose exchange
        is `pairs`, or `union` or `leader` with 32 bits: such as `sparsejax.topk(0.01)`
        or `sparsejax.exdyna(0.01)`. Transformations around a recipe stay around the
        delayed one.
      steps: the expected delay; raises if the exchange has another. `None` accepts any.

    Returns:
      The method. Reports describe the delivered step.

    Raises:
      TypeError: if `tx` is not the result of a recipe alone, but for example a chain.
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
    return tx.with_parts(exchange=exchange)
