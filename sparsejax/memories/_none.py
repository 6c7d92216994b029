"""No memory: what is not delivered is lost."""

from __future__ import annotations

from collections.abc import Callable

from sparsejax._base import Memory


def none(scale: Callable[[int], float] | None = None) -> Memory:
    """Carries nothing: the vector is the gradient, and there is no state.

    Args:
      scale: maps n to a factor for every gradient, such as the one that makes random
        selection unbiased; by default 1.

    Example:
      >>> none().init(3)
      ()
    """

    def init(n):
        del n
        return ()

    def accumulate(gradient, residual):
        if scale is not None:
            gradient = gradient * scale(gradient.size)
        return gradient, residual

    def settle(vector, delivery, residual):
        del vector, delivery
        return residual

    return Memory(init, accumulate, settle)
