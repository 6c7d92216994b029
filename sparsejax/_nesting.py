"""Refuses optax wrappers that give silently wrong results around a sparsifier."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

_FIXES = {
    "MultiSteps": (
        "`optax.MultiSteps` accumulates local gradients in a state that has to be "
        "equal on all workers, and exchanges in every microstep. Average the "
        "gradients of the microbatches before the one `update` of a step: "
        "`sparsejax.value_and_grad(loss, ..., microbatches=4)`, or `jax.lax.scan` in a "
        "loop of your own."
    ),
    "apply_if_finite": (
        "`optax.apply_if_finite` tests only this worker's gradient, so some workers "
        "would take part in the exchange and others would not. Remove the wrapper: "
        '`nonfinite="drop"` (the default) leaves out workers whose gradient is not '
        "finite. To guard the steps after the exchange, wrap only those: "
        "`optax.chain(sparsejax.exdyna(...), optax.apply_if_finite(...))`."
    ),
    "conditionally_transform": (
        "In skipped steps `optax.conditionally_transform` returns the gradients "
        "unchanged, and they differ between workers here. Wrap only the "
        "transformations after the recipe: `optax.chain(sparsejax.exdyna(...), "
        "optax.conditionally_transform(...))`."
    ),
    "conditionally_mask": (
        "In skipped steps `optax.conditionally_mask` drops the gradients, and the "
        "exchange runs in a branch. Wrap only the transformations after the recipe: "
        "`optax.chain(sparsejax.exdyna(...), optax.conditionally_mask(...))`."
    ),
    "sam": (
        "`optax.contrib.sam` updates both of its optimizers in each step and mixes "
        "their states. Put the recipe before it: "
        "`optax.chain(sparsejax.exdyna(...), optax.contrib.sam(...))`."
    ),
    "mechanize": (
        "`optax.contrib.mechanize` reads the gradients itself, and they differ between "
        "workers here. Put the recipe before it: "
        "`optax.chain(sparsejax.exdyna(...), optax.contrib.mechanize(...))`."
    ),
    "tree_map_params": (
        "`optax.tree_map_params` calls `init` with a placeholder, and the state of a "
        "recipe belongs to one tree: its residual is a flat vector for each worker. "
        "Map the state of the transformations after the recipe, "
        "`optax.tree_map_params(optax.adam(1e-3), f, opt_state[1])`. "
        "`sparsejax.state_specs(opt_state)` gives the shardings of the whole state."
    ),
}
# Wrappers that work, as long as they do not call `init` within an update.
_RESETS = {
    "lookahead.<locals>.update_fn": (
        "`optax.lookahead(..., reset_state=True)` would lose the residual at each "
        "synchronisation. Leave `reset_state` out."
    ),
}


def refuse_wrappers(caller: str) -> None:
    """Raises ValueError if an optax wrapper that is named above is calling.

    The wrappers pass state and gradients on unchanged, so the arguments of a
    transformation do not reveal a wrapper. The frames of the call do.
    """
    for frame in calling_frames():
        qualified = frame.f_code.co_qualname
        name = qualified.split(".")[0]
        fix = _FIXES.get(name) or (caller == "init" and _RESETS.get(qualified))
        if fix and frame.f_globals.get("__name__", "").startswith("optax."):
            raise ValueError(f"{caller}: inside `optax.{name}`. {fix}")


def calling_frames() -> Iterator[FrameType]:
    """The Python stack from the caller outwards.

    `init` and `update` run as Python only while jax traces them, so a compiled step
    does not pay for a search of the stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
