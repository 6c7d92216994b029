"""Checks of the arguments of estimates: a transformation, arrays, and numbers."""

from __future__ import annotations

import numbers
import reprlib
from typing import Any

import jax
import numpy as np

from sparsejax._checks import path_name


def check_transformation(tx: Any) -> None:
    """Raises TypeError unless `tx` is a transformation of one worker's gradients."""
    if hasattr(tx, "simulated"):
        raise TypeError(
            "tx: got the result of `sparsejax.simulate`, whose workers send nothing "
            "to each other. Pass the transformation that it simulates."
        )
    if not hasattr(tx, "update"):
        name = getattr(tx, "__name__", "")
        found = f"the function `{name}`" if name else type(tx).__name__
        call = f"`{name}(...)`" if name else "`sparsejax.exdyna(0.01)`"
        raise TypeError(
            f"tx: got {found}, expected a transformation, such as {call}, with the "
            f"parentheses."
        )


def check_shapes(params: Any) -> None:
    """Raises TypeError unless all leaves of `params` are arrays, or shapes of them."""
    if isinstance(params, int | float | np.integer):
        raise TypeError(
            f"params: got the number {params}, expected the parameters, or their "
            f"shapes, such as `jax.ShapeDtypeStruct((n,), jnp.float32)`."
        )
    expected = (
        "a pytree of arrays or `jax.ShapeDtypeStruct`s, such as "
        "`jax.eval_shape(model.init, key, x)`"
    )
    _check_leaves("params", params, expected)


def check_arrays(name: str, tree: Any) -> None:
    """Raises TypeError unless all leaves of `tree` are arrays."""
    _check_leaves(name, tree, "a pytree of arrays", jax.ShapeDtypeStruct)


def _check_leaves(name: str, tree: Any, expected: str, *refused: type) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # Types, such as `np.float32`, have these attributes too.
        shaped = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        number = isinstance(leaf, numbers.Number)
        if isinstance(leaf, (type, *refused)) or not (shaped or number):
            raise TypeError(
                f"{name}: got {reprlib.repr(leaf)} at `{path_name(path)}`, expected "
                f"{expected}."
            )


def refuse_arrays(**arguments: Any) -> None:
    """Raises TypeError for a number that is an array of jax.

    The checks of numbers would take such an array for an argument of
    `optax.inject_hyperparams`, but estimates build no transformation.
    """
    for name, value in arguments.items():
        if isinstance(value, jax.Array):
            raise TypeError(
                f"{name}: got {reprlib.repr(value)}, expected a Python or numpy "
                f"number, such as `{name}.item()`."
            )
