"""NaN or inf on one worker, under both policies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from tests.cases import parametrize
from tests.harness import WORKERS, flat, gradients, residuals, run, run_simulated

every_case = parametrize()
every_value = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
runners = pytest.mark.parametrize("runner", [run, run_simulated])
BAD_STEP, BAD_WORKER = 2, 5


def _spoil(value, everywhere=False):
    def stream(t):
        drawn = gradients(t)
        if t == BAD_STEP:
            kernel = drawn["kernel"]
            drawn["kernel"] = kernel.at[BAD_WORKER, 3, 3].set(value)
        return drawn

    return stream


def _without_worker(t):
    drawn = gradients(t)
    if t == BAD_STEP:
        drawn = jax.tree.map(lambda g: g.at[BAD_WORKER].set(0), drawn)
    return drawn


@every_case
@every_value
@runners
def test_drop_leaves_one_gradient_out(case, value, runner):
    spoilt = runner(case.make(), 5, stream=_spoil(value))
    expected = runner(case.make(), 5, stream=_without_worker)
    for t, ((_, mine, state), (_, theirs, other)) in enumerate(
        zip(spoilt, expected, strict=True)
    ):
        np.testing.assert_array_equal(flat(mine), flat(theirs))
        dropped = np.zeros(WORKERS, bool)
        dropped[BAD_WORKER] = t == BAD_STEP
        np.testing.assert_array_equal(sparsejax.report(state).dropped, dropped)
        if case.memory:
            assert np.isfinite(residuals(state)).all()
            np.testing.assert_array_equal(residuals(state), residuals(other))


@every_case
@every_value
@runners
def test_propagate_poisons_one_step_and_nothing_else(case, value, runner):
    tx = case.make(nonfinite="propagate")
    spoilt = list(runner(tx, 5, stream=_spoil(value)))
    # Until then, the policies agree.
    for (_, mine, _), (_, theirs, _) in zip(
        spoilt[:BAD_STEP], runner(case.make(), BAD_STEP), strict=True
    ):
        np.testing.assert_array_equal(flat(mine), flat(theirs))
    before, (_, bad, state), after = spoilt[1], spoilt[2], spoilt[3:]
    assert np.isnan(flat(bad)).all()
    expected = np.arange(WORKERS) == BAD_WORKER
    np.testing.assert_array_equal(sparsejax.report(state).dropped, expected)
    if case.memory:
        np.testing.assert_array_equal(residuals(state), residuals(before[2]))
    for _, updates, state in after:
        assert np.isfinite(flat(updates)).all()
        assert not sparsejax.report(state).dropped.any()


def test_an_overflowing_sum_counts_as_nonfinite():
    """Finite gradients whose sum with the residual is not finite are dropped."""
    huge = float(jnp.finfo(jnp.float32).max) * 0.75

    def stream(t):
        drawn = jax.tree.map(jnp.zeros_like, gradients(t))
        # Alone in a part that can send one coordinate: two stay behind and overflow.
        drawn["kernel"] = drawn["kernel"].at[1, 0, :4].set(huge)
        return drawn

    seen = []
    for _, updates, state in run(sparsejax.micro(0.002), 4, stream=stream):
        seen.append(sparsejax.report(state).dropped[1])
        assert np.isfinite(residuals(state)).all()
        assert np.isfinite(flat(updates)).all()
    assert not seen[0]
    assert any(seen[1:])


def test_nan_is_seen_in_a_long_vector():
    """XLA:CPU computes the maximum of long vectors with instructions that drop NaN."""
    n = 5000
    tx = sparsejax.simulate(sparsejax.dense(), workers=1)
    state = tx.init(jnp.zeros((n,)))
    update = jax.jit(lambda gradient: tx.update(gradient, state)[1].report.dropped)
    for i in (0, 1234, n - 1):
        assert update(jnp.ones((1, n)).at[0, i].set(jnp.nan))[0], i
    assert not update(jnp.ones((1, n)))[0]
