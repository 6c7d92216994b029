"""Traces of a transformation, and the property that an error of a trace contradicts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import sparsejax
from sparsejax.testing._programs import gradients
from sparsejax.testing._values import first_line, require_same_types

_OTHER_TYPES = (
    "a function of a part returns other shapes or dtypes than `init`, `details` or "
    "`sparsejax.parts` say"
)


def require_kept_types(after: Any, before: Any) -> None:
    """Raises AssertionError unless an update kept the types of the state.

    Args:
      after: the state after an update.
      before: the state after `init`.
    """
    when = ("after an update", "after `init`")
    require_same_types(after, before, "the state keeps its types", when, _OTHER_TYPES)


def trace_update(tx: optax.GradientTransformation, params: Any, workers: int) -> None:
    """Traces `init` and `update`, simulated; nothing runs."""
    simulated = sparsejax.simulate(tx, workers=workers)
    state = jax.eval_shape(simulated.init, params)
    drawn = gradients(0, workers, params)
    jax.eval_shape(simulated.update, drawn, state, params)


def shapes_of(tree: Any) -> Any:
    """The `jax.ShapeDtypeStruct` of each leaf."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree
    )


@contextlib.contextmanager
def traces(
    tx: optax.GradientTransformation, params: Any, workers: int
) -> Iterator[None]:
    """Turns an error of a simulated trace of `tx` into an AssertionError.

    Args:
      tx: the transformation that is traced in the context.
      params: the parameters of that trace.
      workers: the number of workers of that trace.

    Raises:
      AssertionError: with the error, and the property that it contradicts.
    """
    try:
        yield
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(_named(error, tx, params, workers)) from error


def _named(
    error: Exception, tx: optax.GradientTransformation, params: Any, workers: int
) -> str:
    text, first = str(error), first_line(error)
    if "out_axes" in text:
        # Trees that differ, and values that do, fail in the same place.
        if "tree prefix" in text:
            _require_kept_structure(tx, params, workers)
        return (
            f"updates and replicated state are equal on all workers: the trace "
            f"says {first}; `Delivery.mean`, the report, or state that is not "
            f"marked `PerWorker` is computed from this worker's own values without "
            f"a collective."
        )
    if isinstance(error, NameError) and "axis" in text:
        return (
            f"the transformation exchanges over the axis 'data': the trace says "
            f"{first}; checks bind this axis alone, so make the transformation with "
            f'`axis_name="data"`, and let parts call `step.workers` instead of '
            f"naming an axis."
        )
    return (
        f"`init` and `update` trace: got {type(error).__name__}, {first}; a part "
        f"returns an array of another shape, or a record with other fields, than "
        f"`sparsejax.parts` says."
    )


def _require_kept_structure(
    tx: optax.GradientTransformation, params: Any, workers: int
) -> None:
    """AssertionError with the leaf that an update adds to the state, or drops."""
    inner, seen = optax.with_extra_args_support(tx), []

    def update(updates, state, params=None, **extra_args):
        updates, after = inner.update(updates, state, params, **extra_args)
        seen.append(shapes_of((after, state)))
        return updates, after

    watched = optax.GradientTransformationExtraArgs(inner.init, update)
    with contextlib.suppress(Exception):
        trace_update(watched, params, workers)
    for after, before in seen:
        require_kept_types(after, before)
