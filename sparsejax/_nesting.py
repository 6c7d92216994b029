"""Refuses optax wrappers that give silently wrong results around a sparsifier."""

from __future__ import annotations

import sys

_FIXES = {
    "MultiSteps": (
        "`optax.MultiSteps` accumulates local gradients in a state that has to be "
        "equal on all workers, and exchanges in every microstep. Average the "
        "gradients of the microbatches before the one `update` of a step, with "
        "`jax.lax.scan`."
    ),
    "apply_if_finite": (
        "`optax.apply_if_finite` tests only this worker's gradient, so some workers "
        "would take part in the exchange and others would not. Remove the wrapper: "
        '`nonfinite="drop"` (the default) leaves out workers whose gradient is not '
        "finite. To guard the steps after the exchange, wrap only those: "
        "`optax.chain(sparsejax.exdyna(...), optax.apply_if_finite(...))`."
    ),
}


def refuse_wrappers(caller: str) -> None:
    """Raises ValueError if an optax wrapper in `_FIXES` is calling.

    The wrappers pass state and gradients on unchanged, so the arguments of a
    transformation do not reveal a wrapper. This function searches the Python stack for
    the wrappers' frames instead. `init` and `update` run as Python only while jax
    traces them, so a compiled step pays nothing.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_qualname.split(".")[0]
        if name in _FIXES and frame.f_globals.get("__name__", "").startswith("optax."):
            raise ValueError(f"{caller}: inside `optax.{name}`. {_FIXES[name]}")
        frame = frame.f_back
