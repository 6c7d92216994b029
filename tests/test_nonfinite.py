"""NaN or inf on one worker, under both policies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import testing
from tests.cases import CASES, PLAIN, RECIPES, param, parametrize
from tests.harness import (
    WORKERS,
    flat,
    gradients,
    memory_leaves,
    residuals,
    run,
)


def _rows(*choices):
    rows = [param(case, view) for cases, view in choices for case in cases]
    return pytest.mark.parametrize(("case", "view"), rows)


STEPS, BAD_WORKER = 6, 5
# Beyond this limit a sum over the workers may not be finite.
_LIMIT = float(jnp.finfo(jnp.float32).max) / (2 * WORKERS)
# The bad value of each step.
BAD = {1: np.nan, 3: np.inf, 4: -np.inf}


def _spoilt(t):
    drawn = gradients(t)
    if t in BAD:
        drawn["kernel"][BAD_WORKER, 3, 3] = BAD[t]
    return drawn


def _dropped(t):
    return (np.arange(WORKERS) == BAD_WORKER) & (t in BAD)


# Variants of a recipe run on real devices only: under `simulate` they add nothing.
@_rows((CASES, "shard_map"), (RECIPES, "simulate"), (PLAIN, "jit"))
def test_drop_leaves_one_gradient_out(case, view):
    testing.check_nonfinite(case.make(), workers=WORKERS, view=view)


# The branch encloses the whole recipe, so variants cannot differ.
@_rows((RECIPES, "shard_map"), (RECIPES[:3], "simulate"), (PLAIN[:1], "jit"))
def test_propagate_poisons_one_step_and_nothing_else(case, view):
    before = None
    tx = case.make(nonfinite="propagate")
    for t, (_, updates, state) in enumerate(run(tx, STEPS, stream=_spoilt, view=view)):
        np.testing.assert_array_equal(sparsejax.report(state).dropped, _dropped(t))
        if t in BAD:
            assert np.isnan(flat(updates)).all()
            if case.memory:
                np.testing.assert_array_equal(residuals(state), before)
        else:
            assert np.isfinite(flat(updates)).all()
        before = residuals(state) if case.memory else None
    # Without bad values, the policies agree.
    for (_, mine, _), (_, theirs, _) in zip(
        run(tx, 2, view=view), run(case.make(), 2, view=view), strict=True
    ):
        np.testing.assert_array_equal(flat(mine), flat(theirs))


def test_what_is_accumulated_is_cut():
    """Finite gradients whose sum with the residual would not be finite."""

    def stream(t):
        drawn = jax.tree.map(np.zeros_like, gradients(t))
        # These share a part that can send one coordinate, so the others wait.
        drawn["kernel"][1, 0, :4] = 0.75 * _LIMIT
        return drawn

    for _, updates, state in run(sparsejax.micro(0.002), 6, stream=stream):
        assert not sparsejax.report(state).dropped.any()
        assert np.isfinite(flat(updates)).all()
        assert np.abs(residuals(state)).max() <= _LIMIT
    assert np.abs(residuals(state)).max() == pytest.approx(_LIMIT)


@parametrize(RECIPES)
@pytest.mark.parametrize(("size", "places"), [(0.99, 1), (12, 1), (12, 2)])
def test_all_workers_near_the_largest_number(case, size, places):
    """Finite numbers with an infinite sum over the workers do no lasting damage."""

    def stream(t):
        drawn = gradients(t)
        if t == 1:
            drawn["kernel"][:, 3, :places] = size * _LIMIT
        return drawn

    too_large = size * places > 2 * WORKERS
    for t, (_, updates, state) in enumerate(run(case.make(), 4, stream=stream)):
        assert np.isfinite(flat(updates)).all()
        assert all(np.isfinite(leaf).all() for leaf in memory_leaves(state))
        dropped = sparsejax.report(state).dropped
        assert dropped.all() if t == 1 and too_large else not dropped.any()


@parametrize(RECIPES)
def test_many_huge_numbers_that_cancel(case):
    """Finite numbers with a finite sum, but an infinite sum of magnitudes."""

    def stream(t):
        drawn = gradients(t)
        if t == 1:
            drawn["kernel"] = np.sign(drawn["kernel"]) * (_LIMIT / 12)
            assert drawn["kernel"][0].size / 12 > 2 * WORKERS
        return drawn

    for _, updates, state in run(case.make(), 4, stream=stream):
        assert np.isfinite(flat(updates)).all()
        assert all(np.isfinite(leaf).all() for leaf in memory_leaves(state))
        assert not sparsejax.report(state).dropped.any()


def test_nan_is_seen_in_a_long_vector():
    """XLA:CPU computes the maximum of long vectors with instructions that drop NaN."""
    n = 5000
    tx = sparsejax.simulate(sparsejax.dense(), workers=1)
    state = tx.init(np.zeros(n, np.float32))
    update = jax.jit(lambda gradient: tx.update(gradient, state)[1].report.dropped)
    ones = np.ones((1, n), np.float32)
    for i in (0, 1234, n - 1):
        assert update(np.where(np.arange(n) == i, np.nan, ones))[0], i
    assert not update(ones)[0]
