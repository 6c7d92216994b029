"""Gradients that every worker keeps to itself, where no axis is bound."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Float

_FIX = (
    "Put a recipe before it, `optax.chain(sparsejax.exdyna(0.01), ...)`: the "
    "recipe takes local gradients and returns averaged updates. A transformation that "
    "belongs before the recipe, such as clipping or local momentum, runs on each "
    "worker's own gradient as `sparsejax.per_worker(...)`. Leaves that `optax.masked` "
    "leaves out need a recipe too: `optax.partition`, with `sparsejax.dense()` for "
    "them. `sparsejax.rows(gradients)` "
    "gives all workers' rows, [w, ...]."
)


class LocalGradientError(ValueError):
    """A local gradient was passed to an operation for averaged gradients."""


class _NoSuchAttribute(LocalGradientError, AttributeError):
    """A `LocalGradientError` for which `hasattr` returns False."""


class LocalGradient:
    """One gradient leaf of all workers, the input of a recipe.

    It has the shape and dtype of its parameter, and holds one row for each worker. A
    transformation that is not made for it would treat the rows as one gradient, so
    every operation raises, except scaling by a number. It is not a pytree node:
    `jax.jit` cannot return it, and `scan` cannot carry it.

    Attributes:
      rows: Float[w, ...], sharded over the workers' axis.
      shape: the shape of the parameter.
      dtype: the dtype of the gradient.
    """

    __slots__ = ("dtype", "rows", "shape")

    # numpy and jax try the operators of this class before their own.
    __array_priority__ = 1000
    __array_ufunc__ = None
    __hash__ = object.__hash__

    def __init__(self, rows: Float[Array, "w ..."]):
        self.rows = rows
        self.shape = tuple(rows.shape[1:])
        self.dtype = rows.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __repr__(self) -> str:
        # Some transformations print a wrong argument in their own error.
        return (
            f"<a local gradient of shape {self.shape}, not averaged over "
            f"{self.rows.shape[0]} workers yet. {_FIX}>"
        )

    def _scaled(self, by: Any, operation: Any, name: str) -> LocalGradient:
        if isinstance(by, LocalGradient) or np.ndim(by):
            _refuse(name)
        return LocalGradient(operation(self.rows, jnp.asarray(by, self.dtype)))

    def __mul__(self, by: Any) -> LocalGradient:
        return self._scaled(by, jnp.multiply, "*")

    __rmul__ = __mul__

    def __truediv__(self, by: Any) -> LocalGradient:
        return self._scaled(by, jnp.divide, "/")

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(f".{name}", _NoSuchAttribute)

    @property
    def __jax_array__(self) -> Any:
        # A property: `jax.jit` looks the method up without calling it, and would raise
        # an error of its own. Operators of jax arrays call it before `__rmul__`.
        caller = sys._getframe(1)
        if caller.f_code.co_name.startswith("_operator_"):
            return lambda: NotImplemented
        # `jnp.zeros_like`, with which optax freezes leaves, needs only the type.
        if _runs_in(caller, "full_like"):
            return None
        _refuse("a function of jax.numpy")


def _runs_in(frame: FrameType | None, name: str, depth: int = 8) -> bool:
    """Whether a function of this name is among the `depth` innermost callers."""
    for _ in range(depth):
        if frame is None:
            return False
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


def _refuse(
    operation: str, kind: type[LocalGradientError] = LocalGradientError
) -> NoReturn:
    raise kind(
        f"{operation}: this gradient is still local, one row for each worker, and was "
        f"not averaged yet. {_FIX}"
    )


def _operator(name: str) -> Any:
    def refuse(self, *others):
        del self, others
        _refuse(name)

    return refuse


# Python looks operators up on the class, not through `__getattr__`.
_OPERATORS = (
    "add radd sub rsub rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul",
    "neg pos abs lt le gt ge eq ne and rand or ror xor rxor invert",
    "getitem iter len float int bool complex array",
)
for _name in " ".join(_OPERATORS).split():
    setattr(LocalGradient, f"__{_name}__", _operator(f"__{_name}__"))


def is_local(leaf: Any) -> bool:
    """Whether a leaf is a `LocalGradient`."""
    return isinstance(leaf, LocalGradient)


def wrap(tree: Any) -> Any:
    """Turns every leaf [w, ...] of `tree` into a `LocalGradient`."""
    return jax.tree.map(LocalGradient, tree)
