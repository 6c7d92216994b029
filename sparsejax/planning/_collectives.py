"""The collectives of a step, as records, and sums over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class Collective(NamedTuple):
    """One collective of a step.

    Attributes:
      kind: "all-reduce", "all-gather", "all-to-all", "permute" or "reduce-scatter".
      bytes: the bytes that a worker receives in a step.
      branch: "" for a collective of every step, otherwise the enclosing conditionals,
        such as "cond0[1]" for the branch taken if the first predicate is true.
      times: the number of runs in a step, if a loop contains the collective; `bytes`
        counts all runs. 0 if the collective shares its message with the previous one,
        like the leaves of one `psum`.
    """

    kind: str
    bytes: float
    branch: str
    times: float = 1


class WireBytes(NamedTuple):
    """Bytes that a worker receives in a step.

    Attributes:
      total: bytes per worker and step, with the most expensive branch of each
        conditional.
      least: bytes per worker and step, with the cheapest branch of each conditional.
      by_kind: bytes by kind of collective, summed over all branches.
      by_branch: bytes by branch; "" for the collectives of every step.
      collectives: the collectives themselves.
    """

    total: float
    least: float
    by_kind: dict[str, float]
    by_branch: dict[str, float]
    collectives: tuple[Collective, ...]


class Operation(NamedTuple):
    """A collective in a program, independent of its algorithm.

    Attributes:
      kind: as in `Collective`.
      size: bytes of one worker's operand; for an all-gather, bytes of the result.
      workers: the number of participating workers.
      branch: as in `Collective`.
      times: the number of runs in a step; less than 1 in rounds of local steps.
      joined: whether the operation shares its message with the previous operation.
    """

    kind: str
    size: float
    workers: int
    branch: str
    times: float
    joined: bool = False


def received(operation: Operation) -> Collective:
    """Adds to an operation the bytes that each worker receives."""
    kind, size, workers, branch, times, joined = operation
    moved = times * received_bytes(kind, size, workers)
    return Collective(kind, moved, branch, 0 if joined else times)


def received_bytes(kind: str, size: float, workers: int) -> float:
    """Bytes that one worker receives by the algorithm that moves the fewest bytes.

    Args:
      kind: as in `Operation`.
      size: as in `Operation`.
      workers: as in `Operation`.
    """
    share = (workers - 1) / workers
    return {
        "all-reduce": 2 * share * size,
        "all-gather": share * size,
        "all-to-all": share * size,
        "reduce-scatter": share * size,
        "permute": float(size) if workers > 1 else 0.0,
    }[kind]


def summarise(collectives: Iterable[Collective]) -> WireBytes:
    """Sums the bytes of collectives."""
    collectives = tuple(collectives)
    by_kind: dict[str, float] = {}
    by_branch: dict[str, float] = {"": 0.0}
    for kind, size, branch, _ in collectives:
        by_kind[kind] = by_kind.get(kind, 0.0) + size
        by_branch[branch] = by_branch.get(branch, 0.0) + size
    costs = [(c.branch, c.bytes) for c in collectives]
    return WireBytes(
        add_up(costs, max), add_up(costs, min), by_kind, by_branch, collectives
    )


def add_up(
    costs: list[tuple[str, float]],
    pick: Callable[[list[float]], float],
    prefix: str = "",
) -> float:
    """The sum of `costs`, with one branch of each conditional.

    Args:
      costs: pairs `(branch, cost)`, in bytes or in seconds.
      pick: `max` for the most expensive branch of each conditional, `min` for the
        cheapest.
      prefix: the branch to sum up, with all conditionals inside that branch.
    """
    here = sum(cost for branch, cost in costs if branch == prefix)
    deeper: dict[str, set[str]] = {}
    for branch, _ in costs:
        if branch.startswith(prefix) and branch != prefix:
            label = branch[len(prefix) :].split("]")[0] + "]"
            deeper.setdefault(label.split("[")[0], set()).add(prefix + label)
    for labels in deeper.values():
        sums = [add_up(costs, pick, label) for label in labels]
        # A branch without collectives has no label.
        here += pick(sums if len(sums) > 1 else [0.0, *sums])
    return here
