"""Properties of a few steps, on the devices or simulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax

import sparsejax
from sparsejax.testing._programs import example_params, gradients, run
from sparsejax.testing._reports import require_true_reports
from sparsejax.testing._values import (
    flat,
    memory_leaves,
    named_memory_leaves,
    require,
    require_equal,
    require_same_types,
)

if TYPE_CHECKING:
    from jaxtyping import Float

# step -> the bad worker's value in that step.
_BAD = {1: np.nan, 3: np.inf, 4: -np.inf}


def check_tiny_tree(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """Three steps on a tree without leaves: finite updates of the right types.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      params: another small tree, such as a scalar.

    Raises:
      AssertionError: with the updates.
    """
    params = {} if params is None else params
    rule, cause = "tiny trees are legal", "a part divides by n, or by its slots"
    try:
        steps = list(run(tx, 3, params, workers))
    except (TypeError, ValueError, ZeroDivisionError) as error:
        found = f"got {type(error).__name__}, {str(error).splitlines()[0]}"
        cause = f"{cause}, or chooses more than n coordinates (n may be 0)"
        require(False, rule, found, cause)
    for _, updates, state in steps:
        require_true_reports(state)
        require_same_types(updates, params, rule, ("as an update", "before"), cause)
        require(np.isfinite(flat(updates)).all(), rule, f"got {updates}", cause)
        for report in sparsejax.reports(state).values():
            found = f"the density is {report.density}"
            require(np.isfinite(report.density), rule, found, cause)


def check_zero_gradients(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """Zero gradients give zero updates and residuals, and later steps work.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      params: see `check_contract`.

    Raises:
      AssertionError: with the first value that is not zero.
    """
    params = example_params() if params is None else params

    def late(t):
        drawn = gradients(t, workers, params)
        return jax.tree.map(np.zeros_like, drawn) if t < 3 else drawn

    rule = "zero gradients give zeros"
    cause = "a part divides by a norm or count that is 0"
    counts = "or a leaf counts steps: a count belongs in the sparsifier's state"
    for t, (_, updates, state) in enumerate(run(tx, 5, params, workers, stream=late)):
        require_true_reports(state)
        if t < 3:
            require_equal(flat(updates), 0, f"{rule} as updates", cause)
            for name, leaf in named_memory_leaves(state):
                kept = f"{rule} in each leaf of the memory, here `{name}`"
                require_equal(leaf, 0, kept, f"{cause}, {counts}")
    require(
        flat(updates).any() or not flat(params).size,
        "zero gradients break nothing",
        "updates are still 0 after two steps with gradients",
        "the zeros drove a threshold out of reach",
    )


def check_nonfinite(
    tx: optax.GradientTransformation,
    *,
    workers: int = 4,
    params: Any = None,
    view: str | None = None,
) -> None:
    """A worker whose gradient is NaN or infinite adds nothing in that step.

    The run has to be bitwise equal to one in which this worker's gradient is zero.

    Args:
      tx: see `check_contract`; with the policy `nonfinite="drop"`.
      workers: see `check_contract`.
      params: see `check_contract`.
      view: "shard_map", "jit" or "simulate", see `check_conservation`.

    Raises:
      AssertionError: with the first value that differs.
    """
    params = example_params() if params is None else params
    bad = min(5, workers - 1)

    def spoilt(t):
        drawn = gradients(t, workers, params)
        if t in _BAD:  # One coordinate, in the middle of the largest leaf.
            largest = max(jax.tree.leaves(drawn), key=lambda leaf: leaf.size)
            rows = largest.reshape(workers, -1)
            rows[bad, rows.shape[1] // 2] = _BAD[t]
        return drawn

    def without(t):
        drawn = gradients(t, workers, params)
        if t in _BAD:
            for leaf in jax.tree.leaves(drawn):
                leaf[bad] = 0
        return drawn

    given = run(tx, 6, params, workers, stream=spoilt, view=view)
    expected = run(tx, 6, params, workers, stream=without, view=view)
    rule = "a gradient that is not finite is left out"
    cause = "a part reads values that bypass `Memory.accumulate`, or `nonfinite` is set"
    for t, ((_, mine, state), (_, theirs, other)) in enumerate(
        zip(given, expected, strict=True)
    ):
        require_true_reports(state)
        require_equal(flat(mine), flat(theirs), f"{rule} of updates", cause)
        for kept, reference in zip(
            memory_leaves(state), memory_leaves(other), strict=True
        ):
            require(np.isfinite(kept).all(), rule, "the memory is not finite", cause)
            require_equal(kept, reference, f"{rule} of the memory", cause)
        dropped = (np.arange(workers) == bad) & (t in _BAD)
        for report in sparsejax.reports(state).values():
            require_equal(
                report.dropped,
                dropped,
                "the report says who was left out",
                "the exchange does not gather `step.dropped`",
            )


def check_dense_mean(
    tx: optax.GradientTransformation,
    *,
    workers: int = 4,
    params: Any = None,
    rounding: float = 0.0,
) -> None:
    """At density 1 the update is the mean gradient. Not part of `check_contract`.

    Args:
      tx: a transformation that should deliver every coordinate.
      workers: see `check_contract`.
      params: see `check_contract`.
      rounding: the relative rounding error of values on the wire.

    Raises:
      AssertionError: with the coordinate that is furthest off.
    """
    params = example_params() if params is None else params
    rule = "at density 1 the update is the mean"
    cause = "the exchange does not divide by w, or drops coordinates"
    for drawn, updates, state in run(tx, 3, params, workers):
        mean: Float[np.ndarray, " n"] = flat(drawn, (workers,)).mean(axis=0)
        # Rounded twice, and the rest of the step before is rounded again.
        atol = 1e-6 + 4 * rounding * np.abs(flat(drawn, (workers,))).mean(axis=0).max()
        require_equal(flat(updates), mean, rule, cause, rtol=1e-6, atol=atol)
        reports: Mapping[str, sparsejax.Report] = sparsejax.reports(state)
        for report in reports.values():
            found = f"the report says {report.density:.6g}"
            require(report.density == 1, "the density is 1", found, cause)
