"""Keeping n-sized buffers in place: what XLA needs to be told.

A residual that is donated should be overwritten by the accumulated vector, and that by
the next residual. XLA copies instead wherever it believes that an old value is still
needed. All that is said about it stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from sparsejax.parts import Memory

# Coordinates of a piece: with the residual's, 128 KiB.
_PIECE = 1 << 14

# Vectors of fewer coordinates are accumulated at once, on CPU too.
_LARGE = 1 << 19


def _barriers_are_dropped() -> bool:
    """Whether barriers are gone before the compiler fuses: on CPU before jax 0.11."""
    return jax.__version_info__ < (0, 11) and jax.default_backend() == "cpu"


def join(rows: list[Float[Array, "1 m"]]) -> Float[Array, "1 n"]:
    """Rows one after the other, as float32."""
    # Rows, as the residual is stored: XLA:CPU before jax 0.11 concatenates twice where
    # a reshape follows.
    rows = [row.astype(jnp.float32) for row in rows]
    return jnp.concatenate(rows, axis=1) if rows else jnp.zeros((1, 0), jnp.float32)


def prepare(rows: list[Float[Array, "1 m"]], kept: Any) -> list[Float[Array, "1 m"]]:
    """The gradient's leaves as `accumulate` wants them: mostly joined to one row.

    On CPU, where fresh memory costs a page fault for every 4 KiB, large leaves stay
    where they are, and the residual is updated piece by piece.
    """
    by_piece = (
        len(rows) > 1
        and jax.default_backend() == "cpu"
        and not _barriers_are_dropped()
        and sum(row.size for row in rows) >= _LARGE
        and bool(jax.tree.leaves(kept))
    )
    if not by_piece:
        return [jax.lax.optimization_barrier(join(rows))]
    prepared, small = [], []
    for row in rows:
        if row.size < _PIECE:
            small.append(row)
            continue
        prepared += [join(small), row] if small else [row]
        small = []
    return [*prepared, join(small)] if small else prepared


def accumulate(
    memory: Memory,
    rows: list[Float[Array, "1 m"]],
    used: Callable[[Float[Array, "1 m"]], Float[Array, "1 m"]],
    kept: Any,
    step: Int[Array, ""],
    bound: float,
) -> tuple[Float[Array, "1 n"], Any]:
    """`memory.accumulate` cut at +-`bound`, in the place of the first leaf of `kept`.

    Args:
      memory: whose rule it is.
      rows: the gradient, from `prepare`.
      used: what to accumulate of a piece of a row, in float32.
      kept: the residual, leaves [1, n].
      step: Int32[], the number of the step.
      bound: of the result.

    Returns:
      The vector [1, n] and the residual to settle.
    """

    def add(row, kept):
        both = memory.accumulate(used(row), kept)
        return jax.tree.map(lambda x: jnp.clip(x, -bound, bound), both)

    if len(rows) == 1:
        return _accumulate_whole(lambda kept: add(rows[0], kept), kept, step)
    return _accumulate_by_piece(add, rows, kept)


def _accumulate_whole(add, kept, step):
    """All of the vector at once.

    Without a barrier the sum is computed again inside each kernel that uses it, so
    that `kept` outlives it and is copied. The arrays keep the leading axis with which
    they are stored: a reshape inside the kernel of the sum forbids XLA to overwrite its
    operand.
    """
    vector, residual = add(kept)
    leaves, treedef = jax.tree.flatten(kept)
    if not leaves or not _barriers_are_dropped():
        # The vector takes the place of the first leaf. The others are overwritten when
        # it is done with them, and before anything is done with it.
        vector, more = jax.lax.optimization_barrier((vector, leaves[1:]))
        if more:
            residual = add(treedef.unflatten([leaves[0], *more]))[1]
            more = jax.tree.leaves(residual)[1:]
            vector, more = jax.lax.optimization_barrier((vector, more))
            residual = treedef.unflatten([leaves[0], *more])
        return vector, residual

    def body(_, vector):
        return add(treedef.unflatten([vector, *leaves[1:]]))[0]

    # A loop whose trip count, 1, is only known at run time is a barrier that stays.
    once = jnp.minimum(step, 0) + 1
    return jax.lax.fori_loop(0, once, body, leaves[0]), residual


def _accumulate_by_piece(add, rows, kept):
    """Row after row, in pieces that stay in the cache of a core.

    The barrier between a piece's sum and its insertion keeps XLA from fusing them into
    one kernel that runs over all of the vector for each piece.
    """

    def insert(kept, piece, start):
        size = piece.shape[1]
        old = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1), kept
        )
        vector, residual = jax.lax.optimization_barrier(add(piece, old))
        # The vector takes the place of the first leaf.
        new = [vector, *jax.tree.leaves(residual)[1:]]
        leaves, treedef = jax.tree.flatten(kept)
        return treedef.unflatten(
            jax.lax.dynamic_update_slice_in_dim(x, piece, start, axis=1)
            for x, piece in zip(leaves, new, strict=True)
        )

    start = 0
    for row in rows:
        whole, rest = divmod(row.size, _PIECE)

        def step(i, kept, row=row, start=start):
            piece = jax.lax.dynamic_slice_in_dim(row, i * _PIECE, _PIECE, axis=1)
            return insert(kept, piece, start + i * _PIECE)

        if whole:
            kept = jax.lax.fori_loop(0, whole, step, kept)
        if rest:
            last = jax.lax.slice_in_dim(row, whole * _PIECE, row.size, axis=1)
            kept = insert(kept, last, start + whole * _PIECE)
        start += row.size
    return jax.tree.leaves(kept)[0], kept


def hold_back(x: Any, until: Any) -> Any:
    """`x`, but not before `until` is known; of the same types."""
    # Before jax 0.11 a barrier types all that passes it alike.
    if jax.__version_info__ < (0, 11):
        return x
    return jax.lax.optimization_barrier((x, until))[0]


def late_zeros(n: int, after: Int[Array, ""]) -> Float[Array, " n"]:
    """Zeros [n] that are not written before the non-negative number `after` is known.

    Constants are written first thing otherwise, and need memory of their own while the
    gradients are alive; late ones take over the gradients' memory.
    """
    return jnp.full((n,), jnp.minimum(after, 0).astype(jnp.float32))


def insert(
    zeros: Float[Array, " n *D"],
    indices: Int[Array, " k"],
    values: Float[Array, " k *D"],
) -> Float[Array, " n *D"]:
    """`values` at distinct `indices` of zeros; what is out of range is left out.

    A CPU is told to add them: what it reads first, it waits for many at a time, and
    for what it only writes, one after the other.
    """
    if jax.default_backend() == "cpu":
        return zeros.at[indices].add(values, mode="drop")
    return zeros.at[indices].set(values, mode="drop")
