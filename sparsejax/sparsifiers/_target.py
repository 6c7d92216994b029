"""The number of coordinates for a density, which is a number or a schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import jax.numpy as jnp

from sparsejax._checks import check_density_schedule

if TYPE_CHECKING:
    from jaxtyping import Array, Int

Schedule = Callable[[Any], Any]


def target_count(density: float, n: int) -> int:
    """K*: the number of coordinates for `density`, `floor(density n)`, at least 1."""
    # The factor undoes the rounding of products such as 0.29 * 100 = 28.999...
    return min(n, max(1, math.floor(density * n * (1 + 1e-12))))


def live_count(schedule: Schedule, step: Int[Array, ""], n: int, most: int) -> Any:
    """Int32[]: `target_count` of the schedule's value in this step, at most `most`."""
    density = jnp.asarray(schedule(step), jnp.float32)
    # The factor makes up for two rounding errors of float32. NaN counts as 0.
    wanted = jnp.nan_to_num(density * jnp.float32(n) * jnp.float32(1 + 2**-22))
    bounded = jnp.clip(wanted, 0.0, jnp.float32(most)).astype(jnp.int32)
    return jnp.clip(bounded, min(1, most), most)


def slot_count(capacity: int | None, default: int, most: int) -> int:
    """Slots of a message: `capacity`, or `default` for None, but at most `most`.

    Example:
      >>> [slot_count(capacity, 10, 100) for capacity in (None, 20, 200)]
      [10, 20, 100]
    """
    return min(default if capacity is None else capacity, most)


@dataclasses.dataclass(frozen=True)
class Target:
    """The number of coordinates to choose.

    Attributes:
      density: fraction of all coordinates, in (0, 1], or a schedule: a function from
        Int32[], the step, to Float[].
      max_density: the largest density of any step, which fixes all sizes; larger values
        of a schedule are clipped.
    """

    density: float | Schedule
    max_density: float

    @classmethod
    def of(cls, density: Any, max_density: Any = None) -> Self:
        """Checks a user's arguments and returns their target.

        Raises:
          TypeError: if an argument is not a number, or is traced.
          ValueError: if an argument is outside (0, 1]; for a schedule without
            `max_density`, or `max_density` without a schedule.
        """
        return cls(*check_density_schedule(density, max_density))

    def most(self, n: int) -> int:
        """Static: the largest target of any step."""
        return target_count(self.max_density, n)

    def now(self, step: Int[Array, ""], n: int) -> Any:
        """The target of this step: an int, or Int32[] for a schedule."""
        most = self.most(n)
        if not callable(self.density):
            return most
        return live_count(self.density, step, n, most)

    def is_everything(self, n: int) -> bool:
        """Whether the target is all coordinates in every step."""
        return not callable(self.density) and self.most(n) >= n
