"""Properties of choices that a sparsifier declares: `support` and `lossless`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import sparsejax
from sparsejax._transform import SparsifyTransformation
from sparsejax.testing._programs import example_params, run
from sparsejax.testing._traces import trace_update, traces
from sparsejax.testing._values import first_line, flat, require


def check_choices(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """Choices are as `Sparsifier.support` and `Sparsifier.lossless` declare.

    Agreed choices are proven to be equal on all workers, as in `check_replicated`,
    choices of everything have no indices, and lossless choices deliver every
    coordinate that is not zero. Only transformations of `sparsejax.sparsify` alone
    are checked, and no chains.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      params: see `check_contract`.

    Raises:
      AssertionError: with the declaration that does not hold.
    """
    if not isinstance(tx, SparsifyTransformation):
        return
    params = example_params() if params is None else params
    if tx.parts.sparsifier.support in ("agreed", "everything"):
        _check_support(tx, params, workers)
    # A late exchange delivers no choice in its own step.
    if tx.parts.sparsifier.lossless and not tx.parts.exchange.lag:
        _check_lossless(tx, params, workers)


def _check_support(tx: SparsifyTransformation, params: Any, workers: int) -> None:
    exchange, agreed = tx.parts.exchange, tx.parts.sparsifier.support == "agreed"
    slots = []

    def apply(vector, choice, state, step):
        delivery, state = exchange.apply(vector, choice, state, step)
        if choice.indices is None:
            return delivery, state
        slots.append(choice.indices.size)
        if not agreed:
            return delivery, state
        # `vmap` refuses a mean that depends on anything not proven to be equal.
        mark = jnp.sum(choice.indices).astype(delivery.mean.dtype)
        return delivery._replace(mean=delivery.mean + mark), state

    marked = tx.with_parts(exchange=exchange._replace(apply=apply))
    with traces(marked, params, workers):
        try:
            trace_update(marked, params, workers)
        except ValueError as error:
            require(
                not agreed or "out_axes" not in str(error),
                "agreed choices are equal on all workers",
                f"the trace says {first_line(error)}",
                "`select` computes indices from this worker's own vector or rank: "
                'declare `support="overlapping"`, or compute them from replicated '
                "state, `step.index` and collectives of `step.workers`",
            )
            raise
    require(
        agreed or not slots,
        "a choice of everything has no indices",
        f"`select` returns {slots[0] if slots else 0} indices",
        "return `indices=None`, or declare another `support`",
    )


def _check_lossless(tx: SparsifyTransformation, params: Any, workers: int) -> None:
    for drawn, _, state in run(tx, 2, params, workers):
        needed = int(np.any(flat(drawn, (workers,)), axis=0).sum())
        sent = int(sparsejax.report(state).sent)
        require(
            sent >= needed,
            "a lossless sparsifier delivers every coordinate that is not zero",
            f"{needed} coordinates are not zero, and {sent} were delivered",
            "`demand` counts fewer coordinates than qualified, or the exchange does "
            "not average whole vectors where `demand` exceeds the slots, as "
            "`exchanges.hashed_owners` does",
        )
