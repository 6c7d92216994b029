"""Static sizes of the messages of exact sparse sums, from expected densities.

Shapes: `u` units (coordinates, or rows), `w` workers, `k` slots of a choice.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sparsejax._checks import check_densification, check_density
from sparsejax.exchanges.sums._owners import OwnerMap
from sparsejax.vectors import _bits, _codec

# With a well-mixed map, the longest of w lists exceeds its mean m / w by a factor of
# more than 1 + sqrt(c w ln(w) / m) with probability below 1 / w: among all workers'
# lists for c = 9, among the owners for c = 6 (Wang et al.).
_PUSH_SLACK, _PULL_SLACK = 9, 6

# Extra slots for a union that is larger than expected, in standard deviations of a
# Poisson number, an upper bound for independent supports.
_SIGMAS = 4


class Sizes(NamedTuple):
    """Static sizes of the messages of a step of `hashed_owners`.

    Attributes:
      area: the number of places of an owner.
      push: slots of a list.
      pull: slots for the non-zero sums of an owner.
      form: the form of these sums on the wire: "indices", "bitmap" or "dense".
    """

    area: int
    push: int
    pull: int
    form: str


def check_sizes(
    max_density: Any, densification: Any
) -> tuple[float | None, float | None]:
    """Returns both arguments as floats or None.

    Raises:
      TypeError: if an argument is neither a number nor None.
      ValueError: if `max_density` is outside (0, 1], or `densification` below 1 or not
        finite.
    """
    if max_density is not None:
        max_density = check_density(max_density, "max_density")
    return max_density, check_densification(densification)


def sizes_of(
    owners: OwnerMap,
    units: int,
    slots: int,
    width: int,
    worker_count: int,
    max_density: float | None,
    densification: float | None,
) -> Sizes:
    """The sizes for a choice of `slots` among `units` units of `width` coordinates."""
    expected = _expected(units, slots, max_density)
    area = owners.size(units, worker_count)
    push = min(expected, _even(expected, worker_count, _PUSH_SLACK))
    growth = _densified(expected / units, worker_count, densification, worker_count)
    total = min(units, worker_count * expected, math.ceil(growth * expected))
    pull = min(area, worker_count * push, _even(total, worker_count, _PULL_SLACK))
    return Sizes(area, push, pull, _form(owners, area, pull, width))


def lengths(
    units: int,
    slots: int,
    worker_count: int,
    max_density: float | None,
    densification: float | None,
) -> tuple[int, ...]:
    """At position j, from 1 to w, the slots for the sum of j workers' lists."""
    expected = _expected(units, slots, max_density)
    made = [0, expected]
    for j in range(2, worker_count + 1):
        growth = _densified(expected / units, worker_count, densification, j)
        size = growth * expected
        made.append(
            min(units, j * expected, math.ceil(size + _SIGMAS * math.sqrt(size)))
        )
    return tuple(made)


def _expected(units: int, slots: int, max_density: float | None) -> int:
    """The number of units of one worker that have to fit."""
    if max_density is None:
        return slots
    return max(1, min(slots, math.ceil(max_density * units)))


def _densified(
    density: float, workers: int, densification: float | None, of: int
) -> float:
    """The expected densification of the sum of `of` out of `workers` workers.

    Independent supports give `(1 - (1 - d)^of) / d`, the default. If g is given for all
    workers, it is `of^(log g / log w)`: 1 for g = 1, and `of` for g = w.
    """
    if densification is None:
        return (1 - (1 - density) ** of) / density if density else float(of)
    if workers == 1:
        return 1.0
    return of ** (math.log(densification) / math.log(workers))


def _even(total: int, worker_count: int, slack: int) -> int:
    """Slots that very likely hold the largest of `worker_count` shares of `total`."""
    spread = math.sqrt(slack * worker_count * math.log(worker_count) / total)
    return math.ceil((1 + spread) * total / worker_count)


def _form(owners: OwnerMap, area: int, pull: int, width: int) -> str:
    """The form with the fewest bytes for the owners' messages."""
    value = 4 * width
    bytes_of = {"indices": _codec.plain(pull, area).size + pull * value}
    if owners.dense:
        bytes_of["bitmap"] = 4 * -(-area // _bits.WORD) + pull * value
        bytes_of["dense"] = area * value
    return min(bytes_of, key=lambda form: bytes_of[form])
