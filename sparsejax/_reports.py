"""Finding reports in nested optimizer states."""

from __future__ import annotations

from typing import Any

import jax

from sparsejax._base import Report


def reports(opt_state: Any) -> dict[str, Report]:
    """All reports in an optimizer state, by their path.

    Args:
      opt_state: any nesting of optax states.

    Returns:
      A dict from path (as `jax.tree_util.keystr` writes it) to `Report`; empty if there
      is none.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> tx = optax.chain(sparsejax.dense(), optax.sgd(0.1))
      >>> state = sparsejax.init(tx, jnp.zeros(3), jax.make_mesh((8,), ("data",)))
      >>> list(sparsejax.reports(state))
      ['[0].report']
    """
    found, _ = jax.tree_util.tree_flatten_with_path(
        opt_state, is_leaf=lambda node: isinstance(node, Report)
    )
    return {
        jax.tree_util.keystr(path): node
        for path, node in found
        if isinstance(node, Report)
    }


def report(opt_state: Any) -> Report:
    """The one report in an optimizer state: what happened in the last step.

    Args:
      opt_state: any nesting of optax states with one sparsejax transformation.

    Returns:
      The `Report`; zeros before the first step. Replicated.

    Raises:
      ValueError: if there is no report, or more than one.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> tx = optax.chain(sparsejax.exdyna(density=0.01), optax.sgd(0.1))
      >>> state = sparsejax.init(tx, jnp.zeros(500), jax.make_mesh((8,), ("data",)))
      >>> int(sparsejax.report(state).sent)
      0
    """
    found = reports(opt_state)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise ValueError(
            "report: no sparsejax state in there. Pass the optimizer state of a "
            "transformation that holds a sparsejax recipe."
        )
    raise ValueError(
        f"report: {len(found)} sparsejax states in there ({', '.join(found)}). Use "
        f"`sparsejax.reports(opt_state)` for all of them by path."
    )
