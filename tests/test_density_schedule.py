"""The density as a function of the step, in messages of one size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import partitions, thresholds
from sparsejax.sparsifiers._target import live_count, target_count
from tests.harness import PARAMS, WORKERS, flat, gradients, mesh_of, run_simulated

N = sum(p.size for p in PARAMS.values())
EXCLUSIVE = [sparsejax.exdyna, sparsejax.micro, sparsejax.deft]
WHOLE_VECTOR = [sparsejax.topk, sparsejax.cltk, sparsejax.random_k]
recipes = pytest.mark.parametrize("recipe", EXCLUSIVE)
every_recipe = pytest.mark.parametrize("recipe", [*EXCLUSIVE, *WHOLE_VECTOR])
whole_vector = pytest.mark.parametrize("recipe", WHOLE_VECTOR)


@pytest.mark.sampled
@every_recipe
def test_density_follows_the_schedule(recipe):
    schedule = optax.exponential_decay(0.25, 2, 0.5)
    tx = recipe(schedule, max_density=0.25)
    for t, (_, updates, state) in enumerate(run_simulated(tx, 8)):
        wanted = int(0.25 * 0.5 ** (t / 2) * N)
        report = sparsejax.report(state)
        if recipe is sparsejax.topk:  # each worker sends its own pairs, which add up
            assert report.demand.tolist() == [wanted] * WORKERS
        else:
            assert int(report.sent) == np.count_nonzero(flat(updates)) == wanted


@pytest.mark.newer_waits
@pytest.mark.sampled
@every_recipe
def test_constant_schedule_equals_the_number(recipe):
    """Quotas, parts and thresholds are equal bit by bit."""
    fixed = run_simulated(recipe(0.1), 6)
    scheduled = run_simulated(recipe(lambda step: 0.1, max_density=0.1), 6)
    for (_, mine, state), (_, theirs, other) in zip(fixed, scheduled, strict=True):
        np.testing.assert_array_equal(flat(mine), flat(theirs))
        assert jax.tree.structure(state) == jax.tree.structure(other)


def test_fitted_thresholds_follow_the_schedule():
    """A fit of one stage is not a count: the density is within a factor of two."""
    schedule = optax.piecewise_constant_schedule(0.2, {6: 0.25})
    tx = sparsejax.sidco(schedule, max_density=0.2, stages=1)
    sent = []
    for _, _, state in run_simulated(tx, 12):
        sent.append(np.mean(sparsejax.report(state).demand) / N)
    assert 0.1 < np.mean(sent[2:6]) < 0.4
    assert 0.025 < np.mean(sent[8:]) < 0.1


def test_a_fixed_threshold_may_be_a_schedule():
    schedule = optax.piecewise_constant_schedule(1.0, {2: 4.0})
    tx = sparsejax.hard_threshold(schedule, max_density=1.0)
    for t, (drawn, _, state) in enumerate(run_simulated(tx, 3)):
        report = sparsejax.report(state)
        assert (report.threshold == (1.0 if t < 2 else 4.0)).all()
        if t == 0:
            rows = np.abs(flat(drawn, (WORKERS,)))
            np.testing.assert_array_equal(report.demand, (rows >= 1).sum(axis=1))


@pytest.mark.sampled
@whole_vector
def test_whole_vector_from_everything(recipe):
    tx = recipe(optax.linear_schedule(1.0, 0.0, 4), max_density=1.0)
    first, *_, last = run_simulated(tx, 6)
    mean = flat(first[0], (WORKERS,)).mean(axis=0)
    np.testing.assert_allclose(flat(first[1]), mean, rtol=1e-6, atol=1e-6)
    assert int(sparsejax.report(last[2]).demand.max()) == 1


def test_unbiased_random_k_takes_no_schedule():
    with pytest.raises(ValueError, match="unbiased"):
        sparsejax.random_k(lambda step: 0.1, max_density=0.1, unbiased=True)


def test_warm_up_from_everything():
    """From the dense mean down to one coordinate: at least one, and never too many."""
    tx = sparsejax.exdyna(optax.linear_schedule(1.0, 0.0, 4), max_density=1.0)
    sent = []
    for drawn, updates, state in run_simulated(tx, 6):
        if not sent:
            mean = flat(drawn, (WORKERS,)).mean(axis=0)
            np.testing.assert_allclose(flat(updates), mean, rtol=1e-6, atol=1e-6)
        sent.append(int(sparsejax.report(state).sent))
    assert sent == [N, 3 * N // 4, N // 2, N // 4, 1, 1]


def test_schedule_beyond_its_maximum_is_cut():
    tx = sparsejax.micro(lambda step: 0.5, max_density=0.1)
    *_, (_, _, state) = run_simulated(tx, 2)
    assert int(sparsejax.report(state).sent) == int(0.1 * N)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 0.0])
def test_schedule_without_sense_sends_the_least(value):
    assert live_count(lambda step: value, jnp.int32(0), 100, 20) == 1


@pytest.mark.parametrize("n", [0, 1, 7, 100, 12_345, 10**7])
def test_live_count_is_the_static_one(n):
    for density in (1e-6, 0.01, 0.29, 1 / 3, 0.07, 1.0):
        most = target_count(1.0, n)
        live = int(live_count(lambda step, d=density: d, jnp.int32(3), n, most))
        # float32 is exact below 24 bits, and off by the last bit above.
        assert abs(live - target_count(density, n)) <= (n >= 2**23)


def test_traced_quotas_are_the_static_ones():
    for n, w in ((100, 8), (13, 4), (7, 8), (64, 1)):
        quotas = jax.jit(partitions.quotas, static_argnums=(1, 3))
        for target in {1, w - 1, w, n // 2, n - 1, n} - {0}:
            for step in (0, 1, w, 3 * w + 1):
                np.testing.assert_array_equal(
                    quotas(jnp.int32(step), n, jnp.int32(target), w),
                    partitions.quotas(jnp.int32(step), n, target, w),
                )


def test_published_threshold_chases_the_schedule():
    """`staircase` compares with the target of the step, not with the largest one."""
    rule = thresholds.staircase()
    demand, threshold = jnp.array([50, 50]), jnp.zeros(2)
    for target in (80, 100, 200):
        traced = jax.jit(rule.adapt)(
            jnp.float32(0.1), demand, threshold, jnp.int32(target)
        )
        fixed = rule.adapt(jnp.float32(0.1), demand, threshold, target)
        np.testing.assert_allclose(traced, fixed, rtol=1e-7)


@pytest.mark.newer_waits
def test_state_is_that_of_a_fixed_density():
    """A transformation with another density, or a schedule, accepts the same state."""
    fixed = sparsejax.exdyna(0.2)
    tx = sparsejax.exdyna(optax.constant_schedule(0.02), max_density=0.3)
    first, second = (sparsejax.simulate(t, workers=WORKERS) for t in (fixed, tx))
    _, state = jax.jit(first.update)(gradients(0), first.init(PARAMS))
    _, state = jax.jit(second.update)(gradients(1), state)
    assert int(sparsejax.report(state).sent) == int(0.02 * N)
    assert int(state.step) == 2


def test_bytes_follow_the_maximum():
    sizes = [
        sparsejax.wire_bytes(tx, PARAMS, workers=8).total
        for tx in (
            sparsejax.micro(0.2),
            sparsejax.micro(optax.constant_schedule(0.01), max_density=0.2),
        )
    ]
    assert sizes[0] == sizes[1] > 0


@recipes
def test_misuse(recipe):
    schedule = optax.constant_schedule(0.1)
    with pytest.raises(ValueError, match=r"max_density: density is a schedule"):
        recipe(schedule)
    with pytest.raises(ValueError, match=r"max_density: got 0\.2 with the fixed"):
        recipe(0.1, max_density=0.2)
    with pytest.raises(ValueError, match=r"max_density: got 2, expected a number"):
        recipe(schedule, max_density=2)
    with pytest.raises(TypeError, match=r"max_density: got '1', expected a number"):
        recipe(schedule, max_density="1")
    injected = optax.inject_hyperparams(recipe)(density=schedule, max_density=0.1)
    with jax.set_mesh(mesh_of()), pytest.raises(TypeError, match="static_args"):
        injected.init(PARAMS)
    fixed = ("density", "max_density", "nonfinite")
    injected = optax.inject_hyperparams(recipe, static_args=fixed)
    with jax.set_mesh(mesh_of()):
        injected(density=schedule, max_density=0.1).init(PARAMS)
