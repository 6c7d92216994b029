"""Values that the checks read from trees and states, and their failures."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import sparsejax
from sparsejax._checks import path_name

if TYPE_CHECKING:
    from jaxtyping import Float


def require(holds: Any, rule: str, found: str, cause: str) -> None:
    """Raises AssertionError with one sentence unless `holds`.

    Args:
      holds: whether the property was found.
      rule: the property.
      found: the value that contradicts the property.
      cause: the likely reason.
    """
    if not holds:
        raise AssertionError(f"{rule}: {found}; {cause}.")


def flat(tree: Any, lead: tuple[int, ...] = ()) -> Float[np.ndarray, "*lead n"]:
    """All leaves as one float64 vector, in the order of the tree."""
    return np.concatenate(
        [
            np.asarray(leaf, np.float64).reshape(*lead, -1)
            for leaf in jax.tree.leaves(tree)
        ]
        or [np.zeros((*lead, 0))],
        axis=-1,
    )


def as_vector(tree: Any, lead: tuple[int, ...] = ()) -> Float[np.ndarray, "*lead n"]:
    """`flat` in the order of a residual, where leaves of one dtype are adjacent."""
    leaves = jax.tree.leaves(tree)
    dtypes = [leaf.dtype for leaf in leaves]
    return flat(sorted(leaves, key=lambda leaf: dtypes.index(leaf.dtype)), lead)


def first_line(error: Exception) -> str:
    """The first line of an error's text, quoted, without its full stop."""
    return repr(str(error).strip().split("\n")[0].rstrip("."))


def sparsify_states(state: Any) -> list[sparsejax.SparsifyState]:
    """The sparsejax states in `state`."""
    nodes = jax.tree.leaves(
        state, is_leaf=lambda x: isinstance(x, sparsejax.SparsifyState)
    )
    return [x for x in nodes if isinstance(x, sparsejax.SparsifyState)]


def coordinates(state: sparsejax.SparsifyState) -> int:
    """n, the number of coordinates of the tree that `state` was made for."""
    leaves = ast.literal_eval(state.structure.leaves)
    return sum(math.prod(shape) for _, shape in leaves)


def memory_leaves(state: Any) -> list[Any]:
    """All arrays of the memories of the sparsejax states in `state`."""
    return [leaf for _, leaf in named_memory_leaves(state)]


def named_memory_leaves(state: Any) -> list[tuple[str, Any]]:
    """`memory_leaves` with the name of each within the residual of its memory."""
    residuals = [x.memory.per_worker for x in sparsify_states(state)]
    found = [jax.tree_util.tree_leaves_with_path(x) for x in residuals]
    return [(path_name(path), leaf) for leaves in found for path, leaf in leaves]


def residuals(state: Any) -> Float[np.ndarray, "w n"]:
    """The residuals [w, n] of the one sparsejax state in `state`, as float64."""
    return np.asarray(memory_leaves(state)[0], np.float64)


def types(tree: Any) -> dict[str, str]:
    """`{path: "dtype[shape]"}` of all leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {path_name(path): type_name(leaf) for path, leaf in leaves}


def type_name(leaf: Any, axis: int = 0) -> str:
    """ "dtype[shape]" of an array, without the axes before `axis`."""
    # `result_type` calls float64 float32 outside of `enable_x64`, as jax does with
    # arrays of numpy when it gets them.
    known = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    dtype = leaf.dtype if known else jnp.result_type(leaf)
    return f"{dtype}[{', '.join(map(str, jnp.shape(leaf)[axis:]))}]"


def require_same_types(
    given: Any, expected: Any, rule: str, when: tuple[str, str], cause: str
) -> None:
    """Raises AssertionError with the first leaf whose shape or dtype differs.

    Args:
      given: pytree of arrays or shapes.
      expected: pytree of the same kind.
      rule: the property.
      when: where `given` and `expected` were found, for the sentence.
      cause: the likely reason.
    """
    mine, theirs = types(given), types(expected)
    for path in {**theirs, **mine}:
        require(
            mine.get(path) == theirs.get(path),
            rule,
            f"`{path}` is {mine.get(path, 'missing')} {when[0]} and "
            f"{theirs.get(path, 'missing')} {when[1]}",
            cause,
        )
    mine, theirs = str(jax.tree.structure(given)), str(jax.tree.structure(expected))
    found = f"the tree is {mine} {when[0]} and {theirs} {when[1]}"
    require(mine == theirs, rule, found, cause)


def require_equal(
    given: Any, expected: Any, rule: str, cause: str, rtol=0.0, atol=0.0
) -> None:
    """Raises AssertionError with the value of `given` that is furthest off.

    Args:
      given: array.
      expected: array of the same shape, or a number.
      rule: the property.
      cause: the likely reason.
      rtol: relative tolerance.
      atol: absolute tolerance.
    """
    given = np.asarray(given, np.float64)
    expected = np.broadcast_to(np.asarray(expected, np.float64), given.shape)
    close = np.isclose(given, expected, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return
    off = np.where(close, -1.0, np.nan_to_num(np.abs(given - expected), nan=np.inf))
    at = np.unravel_index(int(np.argmax(off)), given.shape)
    where = ", ".join(map(str, at)) or "the only one"
    require(
        False,
        rule,
        f"value {where} is {given[at]:.6g} instead of {expected[at]:.6g}, and "
        f"{int((~close).sum())} of {close.size} values differ",
        cause,
    )
