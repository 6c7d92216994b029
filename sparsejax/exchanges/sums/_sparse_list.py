"""Sparse vectors as ascending lists, to encode and to merge.

Nothing here communicates. Shapes: `u` units, `m` slots of a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import jax
import jax.numpy as jnp

from sparsejax._workers import vary_like
from sparsejax.vectors import _codec

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class SparseList(NamedTuple):
    """A sparse vector: ascending indices [m], with empty slots `u` at the end.

    Attributes:
      indices: Int32[m].
      values: Float[m, ...].
      many: Int32[m], the number of contributing workers; () if not counted.
      lost: Bool[], whether entries were lost for lack of slots.
    """

    indices: Int[Array, " m"]
    values: Float[Array, " m *D"]
    many: Int[Array, " m"] | tuple[()]
    lost: Bool[Array, ""]

    @classmethod
    def of(
        cls,
        indices: Int[Array, " k"],
        values: Float[Array, "k *D"],
        units: int,
        slots: int,
        counted: bool,
    ) -> Self:
        """A worker's choice as a list of at most `slots`, with `many` if `counted`."""
        used = indices < units
        many = used.astype(jnp.int32) if counted else ()
        lost = jnp.sum(used, dtype=jnp.int32) > slots
        whole = cls(indices, values, many, lost)
        return jax.tree.map(lambda x: x[:slots] if x.ndim else x, whole)

    def padded(self, units: int, slots: int) -> Self:
        """The same list with empty slots added, up to `slots`."""

        def pad(x, fill):
            width = [(0, slots - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
            return jnp.pad(x, width, constant_values=fill)

        many = pad(self.many, 0) if not isinstance(self.many, tuple) else ()
        return self._replace(
            indices=pad(self.indices, units), values=pad(self.values, 0), many=many
        )

    def encode(self, units: int) -> Self:
        """The list with encoded indices, for a message."""
        many = self.many.astype(jnp.uint16) if not isinstance(self.many, tuple) else ()
        codes = _codec.plain(self.indices.size, units).encode(self.indices)
        return self._replace(indices=codes, many=many)

    def decode(self) -> Self:
        """Undoes `encode`."""
        many = self.many.astype(jnp.int32) if not isinstance(self.many, tuple) else ()
        return self._replace(indices=self.indices.astype(jnp.int32), many=many)


def merge(a: SparseList, b: SparseList, units: int, slots: int) -> SparseList:
    """The sum of two lists, in `slots` slots; bitwise equal for `a, b` and `b, a`."""

    def places(mine, other):
        below = jnp.searchsorted(other, mine, side="left").astype(jnp.int32)
        same = other.at[below].get(mode="fill", fill_value=-1) == mine
        same = (same & (mine < units)).astype(jnp.int32)
        order = jnp.arange(mine.size, dtype=jnp.int32)
        # Each earlier pair that became one entry needs one place less.
        place = order + below - (jnp.cumsum(same, dtype=jnp.int32) - same)
        return jnp.where(mine < units, place, slots), jnp.sum(same, dtype=jnp.int32)

    (at_a, both), (at_b, _) = places(a.indices, b.indices), places(b.indices, a.indices)

    def joined(x, y, fill, add):
        out = vary_like(jnp.full((slots, *x.shape[1:]), fill, x.dtype), x)
        out = out.at[at_a].set(x, mode="drop").at[at_b]
        # Places are unique within each list, so the result does not depend on an order.
        return out.add(y, mode="drop") if add else out.set(y, mode="drop")

    used = jnp.sum(a.indices < units, dtype=jnp.int32)
    used = used + jnp.sum(b.indices < units, dtype=jnp.int32) - both
    return SparseList(
        joined(a.indices, b.indices, units, add=False),
        joined(a.values, b.values, 0, add=True),
        joined(a.many, b.many, 0, add=True) if not isinstance(a.many, tuple) else (),
        a.lost | b.lost | (used > slots),
    )
