"""Properties of a memory: the leaves of its residual, and that it works alone."""

from __future__ import annotations

from typing import Any

import jax
import optax

import sparsejax
from sparsejax._transform import SparsifyTransformation
from sparsejax.testing._programs import example_params
from sparsejax.testing._traces import shapes_of, trace_update, traces
from sparsejax.testing._values import (
    coordinates,
    first_line,
    named_memory_leaves,
    require,
    sparsify_states,
    type_name,
)


def check_memory(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """Each leaf of the residual is float32[n], and a memory calls no collective.

    Collectives are noticed in a transformation of `sparsejax.sparsify` alone, not in a
    chain.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      params: see `check_contract`.

    Raises:
      AssertionError: naming the leaf, or the function that calls a collective.
    """
    params = example_params() if params is None else params
    with traces(tx, params, workers):
        state = jax.eval_shape(sparsejax.simulate(tx, workers=workers).init, params)
    require_memory_leaves(state)
    if isinstance(tx, SparsifyTransformation):
        _require_alone(tx, params, workers)


def require_memory_leaves(state: Any) -> None:
    """Raises AssertionError unless the leaves of each residual are float32 [w, n].

    Args:
      state: a state with the axis of the workers, or its shapes.
    """
    for node in sparsify_states(state):
        n = coordinates(node)
        for name, leaf in named_memory_leaves(node):
            found = type_name(leaf, axis=1)
            require(
                found == f"float32[{n}]",
                "each leaf of a memory's residual is float32[n]",
                f"`{name}` is {found}, and n is {n}",
                "the first leaf is the gradient that waits, and further leaves have a "
                "value for each of its coordinates; a count of steps is `step.index`, "
                "or state of the sparsifier",
            )


def _require_alone(tx: SparsifyTransformation, params: Any, workers: int) -> None:
    """Raises AssertionError if a function of the memory names the workers' axis."""
    calls: dict[str, Any] = {}

    def noted(name, function):
        def noting(*args):
            calls[name] = (function, shapes_of(args))
            return function(*args)

        return noting

    memory = tx.parts.memory
    spied = memory._replace(
        accumulate=noted("accumulate", memory.accumulate),
        settle=noted("settle", memory.settle),
    )
    watched = tx.with_parts(memory=spied)
    with traces(watched, params, workers):
        trace_update(watched, params, workers)
    for name, (function, shapes) in calls.items():
        try:  # No axis is bound here, so a collective has no workers.
            jax.eval_shape(function, *shapes)
        except NameError as error:
            raise AssertionError(
                f"a memory calls no collective: `Memory.{name}` raises "
                f"{first_line(error)} where no axis is bound; let the exchange find "
                f"values that workers share, and pass them on in `Delivery`."
            ) from error
