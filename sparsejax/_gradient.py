"""One worker's gradient: tests whether it is finite, and adds it to the residual."""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    from sparsejax._layout import Layout
    from sparsejax.parts import Memory

# Coordinates per piece. Pieces of the gradient and the residual fill 128 KiB together.
_PIECE = 1 << 14

# Smaller vectors are accumulated in one go, even on CPU.
_LARGE = 1 << 19


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The leaves of a gradient as rows. Per worker.

    Attributes:
      rows: Float[1, m] each, in the order of the vector. The residual is stored as a
        row too: a reshape in the kernel that adds them would keep XLA from overwriting
        the residual.
      n: static, the number of coordinates.
      dtype: static, the dtype of the vector.
    """

    rows: list[Float[Array, "1 m"]]
    n: int
    dtype: np.dtype

    @classmethod
    def of(cls, tree: Any, layout: Layout, kept: Any) -> Self:
        """The gradient `tree`, to be added to the residual `kept`."""
        rows = _prepare(layout.rows(tree), kept, layout.dtype)
        return cls(rows, layout.n, layout.dtype)

    @functools.cached_property
    def broken(self) -> Bool[Array, ""]:
        """Bool[]: whether a coordinate, or the sum of them all, is not finite."""
        # The sum is not finite if any coordinate is not. A maximum would not do: on
        # XLA:CPU it can lose NaN.
        total = sum(jnp.sum(row, dtype=self.dtype) for row in self.rows)
        return jnp.logical_not(jnp.isfinite(total))

    def mean_square(self, skip: Bool[Array, ""] | bool) -> Float[Array, ""]:
        """Float[]: the mean of the squared coordinates, 0 if `skip`."""
        square = sum(jnp.sum(jnp.square(row.astype(self.dtype))) for row in self.rows)
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
        """Runs `memory.accumulate`; the vector overwrites the first leaf of `kept`.

        Args:
          memory: the memory whose rule applies.
          kept: the residual, leaves [1, n].
          step: Int32[], the number of the step.
          skip: Bool[], per worker: True adds zeros instead of the gradient.
          bound: results are clipped to `[-bound, bound]`.

        Returns:
          The vector [n] and the residual to settle.
        """

        def add(row, kept):
            row = jnp.where(skip, 0.0, row.astype(self.dtype))
            both = memory.accumulate(row, kept)
            _check_first(kept, both)
            return jax.tree.map(lambda x: jnp.clip(x, -bound, bound), both)

        if len(self.rows) == 1:
            both = _add_whole(lambda kept: add(self.rows[0], kept), kept, step)
        else:
            both = _add_by_piece(add, self.rows, kept)
        return jax.tree.map(lambda row: row[0], both)


def with_first(residual: Any, vector: Float[Array, " n"]) -> Any:
    """`residual` with `vector` as its first leaf, whose memory the vector took."""
    treedef: Any = jax.tree.structure(residual)
    leaves = jax.tree.leaves(residual)
    return treedef.unflatten([vector, *leaves[1:]] if leaves else [])


def _check_first(kept: Any, both: Any) -> None:
    """Raises TypeError if `Memory.accumulate` changed the first leaf: it is lost."""
    if not isinstance(both, tuple) or len(both) != 2:
        raise TypeError(
            f"memory: `accumulate` returned {reprlib.repr(both)}, expected "
            f"`(vector, residual)`."
        )
    vector, residual = both
    old, new = jax.tree.leaves(kept)[:1], jax.tree.leaves(residual)[:1]
    if old and new and new[0] is not old[0] and new[0] is not vector:
        raise TypeError(
            "memory: `accumulate` changed the first leaf of the residual, whose place "
            "the vector takes. Return this leaf as it is: it is the gradient that "
            "waits, and leaves that `accumulate` changes, such as a velocity, come "
            "after it."
        )


def _join(rows: list[Float[Array, "1 m"]], dtype: np.dtype) -> Float[Array, "1 n"]:
    """All rows, concatenated as `dtype`."""
    # The result is a row, like the residual: if a reshape follows, XLA:CPU before jax
    # 0.11 concatenates twice.
    rows = [row.astype(dtype) for row in rows]
    return jnp.concatenate(rows, axis=1) if rows else jnp.zeros((1, 0), dtype)


def _prepare(
    rows: list[Float[Array, "1 m"]], kept: Any, dtype: np.dtype
) -> list[Float[Array, "1 m"]]:
    """The rows to add: usually one, joined from all.

    On CPU, fresh memory costs a page fault for every 4 KiB. There large leaves are not
    joined, and the residual is updated piece by piece.
    """
    by_piece = (
        len(rows) > 1
        and _xla.on_cpu()
        and not _xla.barriers_are_dropped()
        and sum(row.size for row in rows) >= _LARGE
        and bool(jax.tree.leaves(kept))
    )
    if not by_piece:
        return [_xla.computed_once(_join(rows, dtype))]
    prepared, small = [], []
    for row in rows:
        if row.size < _PIECE:
            small.append(row)
            continue
        prepared += [_join(small, dtype), row] if small else [row]
        small = []
    return [*prepared, _join(small, dtype)] if small else prepared


def _add_whole(
    add: Callable[[Any], tuple[Float[Array, "1 n"], Any]],
    kept: Any,
    step: Int[Array, ""],
) -> tuple[Float[Array, "1 n"], Any]:
    """Adds the whole vector in one go.

    Barriers against fusion: XLA would recompute the sum in each kernel that reads the
    sum. `kept` would stay alive until then, so XLA would copy `kept`.
    """
    vector, residual = add(kept)
    treedef: Any = jax.tree.structure(kept)
    leaves = jax.tree.leaves(kept)
    if not leaves or not _xla.barriers_are_dropped():
        # The vector overwrites the first leaf. The other leaves are overwritten after
        # the vector was computed from them, and before anything reads the vector.
        vector, more = _xla.read_before(vector, leaves[1:])
        if more:
            residual = add(treedef.unflatten([leaves[0], *more]))[1]
            more = jax.tree.leaves(residual)[1:]
            vector, more = _xla.read_before(vector, more)
            residual = treedef.unflatten([leaves[0], *more])
        return vector, residual

    def body(_, vector):
        return add(treedef.unflatten([vector, *leaves[1:]]))[0]

    # XLA drops barriers here, but it cannot fuse through a loop whose trip count, 1, is
    # known only at run time.
    once = jnp.minimum(step, 0) + 1
    return jax.lax.fori_loop(0, once, body, leaves[0]), residual


def _add_by_piece(
    add: Callable[[Any, Any], tuple[Float[Array, "1 m"], Any]],
    rows: list[Float[Array, "1 m"]],
    kept: Any,
) -> tuple[Float[Array, "1 n"], Any]:
    """Adds row after row, in pieces that fit the cache of a core."""

    def insert(kept, piece, start):
        size = piece.shape[1]
        old = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, size, axis=1), kept
        )
        # Barrier against fusion: one kernel for sum and insertion would run over the
        # whole vector for each piece.
        vector, residual = _xla.computed_once(add(piece, old))
        # The vector overwrites the first leaf.
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
