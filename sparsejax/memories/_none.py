"""No memory: coordinates that are not delivered are lost."""

from __future__ import annotations

from sparsejax.parts import Memory


def none() -> Memory:
    """Carries nothing: the vector is the gradient, and the state is empty.

    Example:
      >>> none().init(3)
      ()
    """

    def init(n):
        del n
        return ()

    def accumulate(gradient, residual):
        return gradient, residual

    def settle(vector, delivery, residual):
        del vector, delivery
        return residual

    return Memory(init, accumulate, settle)
