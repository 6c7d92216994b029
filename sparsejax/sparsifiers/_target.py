"""How many coordinates a density stands for, be it a number or a schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Int

Schedule = Callable[[Any], Any]


def target_count(density: float, n: int) -> int:
    """K*: how many of `n` coordinates `density` stands for, at least one."""
    # The factor undoes the rounding of products such as 0.29 * 100 = 28.999...
    return min(n, max(1, math.floor(density * n * (1 + 1e-12))))


def live_count(schedule: Schedule, step: Int[Array, ""], n: int, most: int) -> Any:
    """Int32[]: `target_count` of what a schedule says in this step, at most `most`."""
    density = jnp.asarray(schedule(step), jnp.float32)
    # The factor is two roundings of float32, and NaN is the least there is.
    wanted = jnp.nan_to_num(density * jnp.float32(n) * jnp.float32(1 + 2**-22))
    bounded = jnp.clip(wanted, 0.0, jnp.float32(most)).astype(jnp.int32)
    return jnp.clip(bounded, min(1, most), most)


@dataclasses.dataclass(frozen=True)
class Target:
    """The number of coordinates to choose.

    Attributes:
      density: fraction of all coordinates, in (0, 1], or a schedule: a function from
        Int32[], the step, to Float[].
      max_density: with a schedule, the largest density it may reach: all sizes follow
        from it. Larger values of the schedule are cut.
    """

    density: float | Schedule
    max_density: float | None = None

    def most(self, n: int) -> int:
        """Static: the target of any step, at most."""
        largest: Any = self.max_density if callable(self.density) else self.density
        return target_count(largest, n)

    def now(self, step: Int[Array, ""], n: int) -> Any:
        """The target of this step: an int, or Int32[] of a schedule."""
        most = self.most(n)
        if not callable(self.density):
            return most
        return live_count(self.density, step, n, most)

    def is_everything(self, n: int) -> bool:
        """Whether it is all coordinates in every step."""
        return not callable(self.density) and self.most(n) >= n
