"""One worker's gradient: whether it is finite, and how it is added to the residual."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp

from sparsejax import _xla

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    from sparsejax._layout import Layout
    from sparsejax.parts import Memory

# Coordinates of a piece: with the residual's, 128 KiB.
_PIECE = 1 << 14

# Vectors of fewer coordinates are accumulated at once, on CPU too.
_LARGE = 1 << 19


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The leaves of a gradient as rows. Per worker.

    Attributes:
      rows: Float[1, m] each, in the order of the vector. Rows, since the residual is
        stored as one: a reshape inside the kernel of their sum would keep XLA from
        overwriting the residual.
      n: static, the number of coordinates.
    """

    rows: list[Float[Array, "1 m"]]
    n: int

    @classmethod
    def of(cls, tree: Any, layout: Layout, kept: Any) -> Self:
        """The gradient `tree`, to be added to the residual `kept`."""
        return cls(_prepare(layout.rows(tree), kept), layout.n)

    @functools.cached_property
    def broken(self) -> Bool[Array, ""]:
        """Bool[]: whether the gradient, or the sum of all of it, is not finite."""
        # The sum is not finite if a coordinate is not. `max` would not do: XLA:CPU
        # loses NaN in it.
        total = sum(jnp.sum(row, dtype=jnp.float32) for row in self.rows)
        return jnp.logical_not(jnp.isfinite(total))

    def mean_square(self, skip: Bool[Array, ""] | bool) -> Float[Array, ""]:
        """Float[]: the mean of the squared coordinates, 0 where `skip`."""
        square = sum(jnp.sum(jnp.square(_wide(row))) for row in self.rows)
        # Zero the scalar: masking the rows would copy them.
        return jnp.where(skip, 0.0, square / max(self.n, 1))

    def add_to(
        self,
        memory: Memory,
        kept: Any,
        step: Int[Array, ""],
        *,
        skip: Bool[Array, ""] | bool,
        bound: float,
    ) -> tuple[Float[Array, " n"], Any]:
        """`memory.accumulate`, in the place of the first leaf of `kept`.

        Args:
          memory: whose rule it is.
          kept: the residual, leaves [1, n].
          step: Int32[], the number of the step.
          skip: Bool[], per worker: adds zeros instead of the gradient.
          bound: the result is cut at `bound` and `-bound`.

        Returns:
          The vector [n] and the residual to settle.
        """

        def add(row, kept):
            both = memory.accumulate(jnp.where(skip, 0.0, _wide(row)), kept)
            return jax.tree.map(lambda x: jnp.clip(x, -bound, bound), both)

        if len(self.rows) == 1:
            both = _add_whole(lambda kept: add(self.rows[0], kept), kept, step)
        else:
            both = _add_by_piece(add, self.rows, kept)
        return jax.tree.map(lambda row: row[0], both)


def _wide(row: Float[Array, "1 m"]) -> Float[Array, "1 m"]:
    return row.astype(jnp.float32)


def _join(rows: list[Float[Array, "1 m"]]) -> Float[Array, "1 n"]:
    """Rows one after the other, as float32."""
    # Rows, as the residual is stored: XLA:CPU before jax 0.11 concatenates twice where
    # a reshape follows.
    rows = [_wide(row) for row in rows]
    return jnp.concatenate(rows, axis=1) if rows else jnp.zeros((1, 0), jnp.float32)


def _prepare(rows: list[Float[Array, "1 m"]], kept: Any) -> list[Float[Array, "1 m"]]:
    """Rows to add: mostly joined to one.

    On CPU, where fresh memory costs a page fault for every 4 KiB, large leaves stay
    where they are, and the residual is updated piece by piece.
    """
    by_piece = (
        len(rows) > 1
        and _xla.on_cpu()
        and not _xla.barriers_are_dropped()
        and sum(row.size for row in rows) >= _LARGE
        and bool(jax.tree.leaves(kept))
    )
    if not by_piece:
        return [_xla.computed_once(_join(rows))]
    prepared, small = [], []
    for row in rows:
        if row.size < _PIECE:
            small.append(row)
            continue
        prepared += [_join(small), row] if small else [row]
        small = []
    return [*prepared, _join(small)] if small else prepared


def _add_whole(
    add: Callable[[Any], tuple[Float[Array, "1 n"], Any]],
    kept: Any,
    step: Int[Array, ""],
) -> tuple[Float[Array, "1 n"], Any]:
    """All of the vector at once.

    Barriers: XLA would compute the sum again inside each kernel that uses it, so that
    `kept` outlives it and is copied.
    """
    vector, residual = add(kept)
    treedef: Any = jax.tree.structure(kept)
    leaves = jax.tree.leaves(kept)
    if not leaves or not _xla.barriers_are_dropped():
        # The vector takes the place of the first leaf. The others are overwritten when
        # it is done with them, and before anything is done with it.
        vector, more = _xla.read_before(vector, leaves[1:])
        if more:
            residual = add(treedef.unflatten([leaves[0], *more]))[1]
            more = jax.tree.leaves(residual)[1:]
            vector, more = _xla.read_before(vector, more)
            residual = treedef.unflatten([leaves[0], *more])
        return vector, residual

    def body(_, vector):
        return add(treedef.unflatten([vector, *leaves[1:]]))[0]

    # A loop whose trip count, 1, is only known at run time is a barrier that stays.
    once = jnp.minimum(step, 0) + 1
    return jax.lax.fori_loop(0, once, body, leaves[0]), residual


def _add_by_piece(
    add: Callable[[Any, Any], tuple[Float[Array, "1 m"], Any]],
    rows: list[Float[Array, "1 m"]],
    kept: Any,
) -> tuple[Float[Array, "1 n"], Any]:
    """Row after row, in pieces that stay in the cache of a core."""

    def insert(kept, piece, start):
        size = piece.shape[1]
        old = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1), kept
        )
        # Barrier: XLA would fuse sum and insertion into one kernel that runs over all
        # of the vector for each piece.
        vector, residual = _xla.computed_once(add(piece, old))
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
