"""Conservation: sum of updates + mean residual = sum of mean gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import optax

import sparsejax
from sparsejax.testing._memory import require_memory_leaves
from sparsejax.testing._programs import example_params, run
from sparsejax.testing._reports import require_true_reports
from sparsejax.testing._values import (
    as_vector,
    named_memory_leaves,
    require,
    sparsify_states,
)

if TYPE_CHECKING:
    from jaxtyping import Float

_CAUSE = (
    "`Delivery.left` is not the vector less this worker's share of `Delivery.mean`, "
    "`delivered` names coordinates that did not go out, or a scatter added duplicates"
)


def check_conservation(
    tx: optax.GradientTransformation,
    *,
    workers: int = 4,
    params: Any = None,
    steps: int = 20,
    tolerance: float = 1e-6,
    view: str | None = None,
) -> Float[np.ndarray, "w n"] | None:
    """Sum of updates + mean residual = sum of mean gradients.

    Args:
      tx: see `check_contract`; with a memory that is error feedback, or a method that
        delivers everything.
      workers: see `check_contract`.
      params: see `check_contract`.
      steps: the number of steps.
      tolerance: the largest error of a coordinate, relative to the sum of the mean
        magnitudes of its gradients.
      view: "shard_map" binds the axis, each worker on a device of its own; "jit" is
        plain `jax.jit` on the same devices; "simulate" uses one device. By default
        "simulate" if there are fewer devices than workers, and "shard_map" otherwise.

    Returns:
      The residuals after the last step; `None` without a memory.

    Raises:
      AssertionError: with the coordinate that is furthest off.
    """
    params = example_params() if params is None else params
    return _conserved(tx, workers, params, steps, tolerance, view)[0]


def check_one_worker(
    tx: optax.GradientTransformation, *, params: Any = None, conserves: bool = True
) -> None:
    """Four steps of one worker: something is sent, and no mass is lost.

    Args:
      tx: see `check_contract`.
      params: see `check_contract`.
      conserves: see `check_contract`.

    Raises:
      AssertionError: with the coordinate that is furthest off.
    """
    params = example_params() if params is None else params
    _, sent = _conserved(tx, 1, params, 4, 1e-5 if conserves else None)
    require(
        all(sent), "one worker sends", f"{sent.count(0)} of 4 steps sent nothing",
        "messages are sized by the other workers, or a threshold is out of reach",
    )  # fmt: skip


def check_few_coordinates(
    tx: optax.GradientTransformation, *, workers: int = 4, conserves: bool = True
) -> None:
    """24 steps on max(1, min(3, w - 1)) coordinates: some are sent, no mass is lost.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      conserves: see `check_contract`.

    Raises:
      AssertionError: with the coordinate that is furthest off.
    """
    params = np.zeros(max(1, min(3, workers - 1)), np.float32)
    _, sent = _conserved(tx, workers, params, 24, 1e-5 if conserves else None)
    require(
        any(sent), "fewer coordinates than workers", "24 steps sent nothing",
        "a share of n is rounded down to 0",
    )  # fmt: skip


def _conserved(
    tx: optax.GradientTransformation,
    workers: int,
    params: Any,
    steps: int,
    tolerance: float | None,
    view: str | None = None,
) -> tuple[Float[np.ndarray, "w n"] | None, list[int]]:
    """The residuals, and the coordinates that each step sent."""
    given = received = scale = np.zeros(as_vector(params).size)
    sent = []
    for drawn, updates, state in run(tx, steps, params, workers, view=view):
        require_true_reports(state)
        mine = as_vector(drawn, (workers,))
        given = given + mine.mean(axis=0)
        received = received + as_vector(updates)
        scale = scale + np.abs(mine).mean(axis=0)
        found = sparsejax.reports(state).values()
        sent.append(sum(int(report.sent) for report in found))
    require_memory_leaves(state)
    leaves = _residual(state)
    kept = next(iter(leaves.values()), None)

    def errors(residual):
        total = received + (0 if residual is None else residual.mean(axis=0))
        error = np.abs(total - given) / np.maximum(scale, np.finfo(np.float32).tiny)
        return total, np.nan_to_num(error, nan=np.inf)

    if tolerance is not None and given.size:
        total, error = errors(kept)
        worst = int(error.argmax())
        require(
            error[worst] < tolerance,
            "mass is conserved",
            f"after {steps} steps of {workers} workers, at coordinate {worst}, updates "
            f"+ mean residual is {total[worst]:.6g}, and the sum of mean gradients is "
            f"{given[worst]:.6g}",
            _cause(leaves, lambda x: errors(x)[1].max() < tolerance),
        )
    return kept, sent


def _residual(state: Any) -> dict[str, Float[np.ndarray, "w n"]]:
    """The leaves of the first residual in `state`, by name; empty without a memory."""
    found = map(named_memory_leaves, sparsify_states(state))
    return {
        name: np.asarray(leaf, np.float64)
        for name, leaf in next(filter(None, found), [])
    }


def _cause(leaves: dict[str, Any], conserves: Callable[[Any], bool]) -> str:
    """The likely reason for mass that is missing.

    Args:
      leaves: the leaves [w, n] of the residual, by name.
      conserves: whether mass is conserved if it is counted in this array [w, n].
    """
    if len(leaves) < 2:
        return _CAUSE
    first, *others = leaves
    rule = (
        f"the gradient that waits is the first leaf of the memory's residual, "
        f"`{first}`, and mass is counted there"
    )
    for name in others:
        if conserves(leaves[name]):
            return (
                f"{rule}: put `{name}` first (the leaves of a dict are sorted by key)"
            )
    if conserves(sum(leaves.values())):
        return f"{rule}: put the sum of the {len(leaves)} leaves there"
    return f"{rule}; or {_CAUSE}"
