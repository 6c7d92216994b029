"""Refuses optax wrappers that are silently wrong around a sparsifier."""

from __future__ import annotations

import sys

_FIXES = {
    "MultiSteps": (
        "`optax.MultiSteps` keeps a sum of local gradients in a state that is taken "
        "for equal on all workers, and exchanges in every microstep. Average the "
        "gradients of the microbatches before the one `update` of a step, with "
        "`jax.lax.scan`."
    ),
    "apply_if_finite": (
        "`optax.apply_if_finite` looks at this worker's gradient alone, so that some "
        "workers would take part in the exchange and others would not. Leave it out: "
        '`nonfinite="drop"` (the default) leaves out the workers whose gradient is not '
        "finite. For what comes after the exchange, wrap only that: "
        "`optax.chain(sparsejax.exdyna(...), optax.apply_if_finite(...))`."
    ),
}


def refuse_wrappers(caller: str) -> None:
    """Raises ValueError if an optax wrapper in `_FIXES` is calling.

    A transformation is not told what it is wrapped in, and the wrappers hand its state
    and its gradients on unchanged: nothing in the arguments gives them away. So the
    Python stack is searched for their frames. `init` and `update` run as Python only
    while jax traces them, so that a compiled step pays nothing.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_qualname.split(".")[0]
        if name in _FIXES and frame.f_globals.get("__name__", "").startswith("optax."):
            raise ValueError(f"{caller}: inside `optax.{name}`. {_FIXES[name]}")
        frame = frame.f_back
