"""Units of a choice: an index stands for a coordinate, or for a row of coordinates."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Self

import jax.numpy as jnp

from sparsejax import _xla
from sparsejax.parts import Choice

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def indices_of(choice: Choice) -> Int[Array, " k"]:
    """The indices of a choice, which must not be the whole vector.

    Raises:
      TypeError: if the choice is the whole vector, which `or_whole` delivers.
    """
    if choice.indices is None:
        raise TypeError("choice: got the whole vector, expected indices.")
    return choice.indices


@dataclasses.dataclass(frozen=True)
class Units:
    """The vector as `number` units of `size` coordinates each. Static.

    Attributes:
      number: u, also the value of empty slots of a choice.
      size: D; 1 if units are coordinates.
    """

    number: int
    size: int

    @classmethod
    def of(cls, choice: Choice, n: int) -> Self:
        """The units that `choice` counts in a vector of `n` coordinates."""
        return cls(n // choice.row_size, choice.row_size)

    @property
    def n(self) -> int:
        """The number of coordinates."""
        return self.number * self.size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one unit's values: () for a coordinate, (D,) for a row."""
        return (self.size,) if self.size > 1 else ()

    def split(self, vector: Float[Array, " n"]) -> Float[Array, "u *D"]:
        """`vector` as an array with one entry, or row, per unit."""
        return vector.reshape(self.number, *self.shape)

    def values(
        self, vector: Float[Array, " n"], indices: Int[Array, " k"]
    ) -> Float[Array, "k *D"]:
        """The values of `vector` at `indices`, 0 in empty slots."""
        return _xla.values_at(self.split(vector), indices)

    def coordinates(self, indices: Int[Array, " k"]) -> Int[Array, " kD"]:
        """The coordinates of the units at `indices`; empty slots hold `n`."""
        if self.size == 1:
            return indices
        inside = jnp.arange(self.size, dtype=jnp.int32)
        found = indices[:, None] * self.size + inside[None]
        return jnp.where(indices[:, None] < self.number, found, self.n).reshape(-1)
