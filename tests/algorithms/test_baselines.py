"""The promises of the papers of random-k, hard threshold, DGC and DEFT."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import partitions
from sparsejax.sparsifiers import _random_k
from sparsejax.sparsifiers._layers import _shares

pytestmark = pytest.mark.newer_waits


def run(tx, stream, params=None, workers=2):
    """Updates [T, n] and states of a run under `simulate`."""
    simulated = sparsejax.simulate(tx, workers=workers)
    state = simulated.init(jnp.zeros(stream[0].shape[1]) if params is None else params)
    update = jax.jit(simulated.update)
    updates, states = [], []
    for drawn in stream:
        mean, state = update(drawn, state)
        updates.append(mean)
        states.append(jax.device_get(state))
    return updates, states


# -- random-k --------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw(seed, n, k):
    keys = jax.random.bits(jax.random.key(seed), (_random_k._ROUNDS,), jnp.uint32)
    return _random_k.sample(keys, n, k, k)


@pytest.mark.parametrize(("n", "k"), [(2, 1), (17, 16), (1000, 10), (2**31 - 1, 50)])
def test_samples_are_distinct_and_ascending(n, k):
    for seed in range(5):
        drawn = np.asarray(draw(seed, n, k))
        assert np.all(np.diff(drawn) > 0)
        assert drawn[0] >= 0
        assert drawn[-1] < n


def test_samples_are_uniform():
    """Counts of single coordinates and of neighbours are within five deviations."""
    n, k, draws = 60, 12, 4000
    drawn = np.asarray(jax.vmap(lambda seed: draw(seed, n, k))(jnp.arange(draws)))
    chosen = np.zeros((draws, n))
    np.put_along_axis(chosen, drawn, 1, axis=1)
    p = k / n
    assert np.all(np.abs(chosen.mean(0) - p) < 5 * np.sqrt(p * (1 - p) / draws))
    pairs = chosen.T @ chosen / draws
    p = p * (k - 1) / (n - 1)
    apart = ~np.eye(n, dtype=bool)
    assert np.all(np.abs(pairs[apart] - p) < 5 * np.sqrt(p * (1 - p) / draws))


def test_draws_are_those_of_earlier_versions():
    """A seed always gives the same draws, so runs can be repeated."""
    assert draw(3, 1000, 6).tolist() == [64, 97, 383, 490, 840, 905]


def test_random_k_needs_no_indices_and_changes_every_step():
    tx = sparsejax.random_k(0.1, seed=3)
    gradient = np.ones((2, 100), np.float32)
    updates, _ = run(tx, [gradient] * 3)
    chosen = [set(np.flatnonzero(u)) for u in updates]
    assert [len(c) for c in chosen] == [10, 10, 10]
    assert chosen[0] != chosen[1] != chosen[2]
    moved = sparsejax.wire_bytes(tx, jnp.zeros(100), workers=2)
    # An all-reduce of ten floats, and ten bytes of facts of the other worker.
    assert moved.by_kind == {"all-reduce": 40, "all-gather": 10}


def test_unbiased_random_k():
    gradient = np.stack([np.arange(50.0), np.ones(50)]).astype(np.float32)
    updates, states = run(sparsejax.random_k(0.2, unbiased=True), [gradient])
    sent = np.flatnonzero(updates[0])
    np.testing.assert_allclose(
        np.asarray(updates[0])[sent], 5 * gradient.mean(axis=0)[sent], rtol=1e-6
    )
    assert jax.tree.leaves(states[0][0].memory) == []
    with pytest.raises(ValueError, match=r"value_bits: got 8 with `unbiased`"):
        sparsejax.random_k(0.2, unbiased=True, value_bits=8)


# -- hard threshold --------------------------------------------------------------------


def test_hard_threshold():
    drawn = np.array([[0.5, -2, 3, 0.9], [1, 0, -1.5, 0.2]], np.float32)
    updates, states = run(sparsejax.hard_threshold(1.0, max_density=1.0), [drawn])
    sent = np.where(np.abs(drawn) >= 1, drawn, 0)
    np.testing.assert_allclose(updates[0], sent.mean(axis=0))
    np.testing.assert_allclose(states[0].memory.per_worker, drawn - sent)
    np.testing.assert_array_equal(states[0].report.demand, [2, 2])
    with pytest.raises(ValueError, match="threshold: got -1"):
        sparsejax.hard_threshold(-1)
    with pytest.raises(TypeError, match="threshold: got None"):
        sparsejax.hard_threshold(None)


# -- DGC -------------------------------------------------------------------------------


def test_dgc_accumulates_velocities_and_masks_both():
    """Compares with the paper's recursion in numpy; the sample is the whole vector."""
    rng = np.random.default_rng(0)
    n, momentum, k = 200, 0.7, 10
    stream = rng.laplace(size=(6, 2, n)).astype(np.float32)
    updates, states = run(sparsejax.dgc(k / n, momentum), stream)
    velocity, unsent = np.zeros((2, 2, n))
    for t, drawn in enumerate(stream):
        velocity = momentum * velocity + drawn
        unsent = unsent + velocity
        expected = np.zeros(n)
        for r in range(2):
            largest = np.argsort(-np.abs(unsent[r]))[:k]
            expected[largest] += unsent[r, largest] / 2
            unsent[r, largest] = velocity[r, largest] = 0
        np.testing.assert_allclose(updates[t], expected, rtol=1e-4, atol=1e-5)
        kept = states[t].memory.per_worker
        np.testing.assert_allclose(kept.unsent, unsent, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(kept.velocity, velocity, rtol=1e-4, atol=1e-5)


def test_dgc_sample_meets_the_density():
    rng = np.random.default_rng(0)
    n = 60_000
    tx = sparsejax.dgc(0.01, momentum=0.0)
    _, states = run(tx, [rng.laplace(size=(2, n)).astype(np.float32) for _ in range(4)])
    for state in states:
        assert np.all(np.abs(state.report.demand / 600 - 1) < 0.4)
        assert np.all(state.report.details.chosen > 0.8 * 600)
        assert np.all(state.report.details.chosen <= 600)


def test_dgc_warms_up():
    n = 640
    tx = sparsejax.dgc(0.02, momentum=0.0, warmup_steps=2)
    rng = np.random.default_rng(0)
    _, states = run(tx, rng.laplace(size=(6, 2, n)).astype(np.float32))
    chosen = [int(state.report.details.chosen[0]) for state in states]
    assert chosen == [160, 160, 40, 40, 12, 12]
    by_branch = sparsejax.wire_bytes(tx, jnp.zeros(n), workers=2).by_branch
    sizes = sorted(size for branch, size in by_branch.items() if branch)
    assert len(sizes) == 3
    assert sizes[0] < sizes[1] / 2 < sizes[2] / 4


def test_dgc_warm_up_moves_what_the_docstring_says(every):
    struct = jax.ShapeDtypeStruct((10**6,), jnp.float32)
    tx = sparsejax.dgc(0.02, warmup_steps=2)
    for workers in (4, 8) if every else (8,):
        dense = sparsejax.wire_bytes(sparsejax.dense(), struct, workers=workers).total
        by_branch = sparsejax.wire_bytes(tx, struct, workers=workers).by_branch
        ratios = sorted(size / dense for size in by_branch.values())
        expected = [0.037 * workers, min(0.14 * workers, 1.0)]
        assert ratios[-2:] == pytest.approx(expected, rel=0.02)


def test_dgc_clips_locally():
    drawn = np.array([[3.0, 4, 0, 0], [0, 0, 0.3, 0.4]], np.float32)
    tx = sparsejax.dgc(1.0, momentum=0.0, clip_norm=2.0)
    updates, state = run(tx, [drawn])
    bound = 2 / np.sqrt(2)
    expected = np.stack([drawn[0] * bound / 5, drawn[1]]).mean(axis=0)
    np.testing.assert_allclose(updates[0], expected, rtol=1e-6)
    assert isinstance(state[0][0], optax.EmptyState)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_dgc_momentum_range(momentum):
    with pytest.raises(ValueError, match="momentum: got"):
        sparsejax.dgc(momentum=momentum)


# -- DEFT ------------------------------------------------------------------------------


def test_deft_shares_follow_norms():
    """Layers have different norms, and one is smaller than its share: the sum is K*."""
    params = {
        "a": jnp.zeros(1000),
        "b": jnp.zeros((20, 50)),
        "c": jnp.zeros(10),
        "d": jnp.zeros(3000),
    }
    scale = {"a": 1.0, "b": 3.0, "c": 1000.0, "d": 0.0}
    rng = np.random.default_rng(0)
    drawn = {
        name: (scale[name] * rng.laplace(size=(4, *leaf.shape))).astype(np.float32)
        for name, leaf in params.items()
    }
    updates, states = run(sparsejax.deft(0.02), [drawn], params, workers=4)
    report, sent = states[0].report, jax.tree.map(np.count_nonzero, updates[0])
    assert int(report.sent) == 100 == sum(sent.values())
    assert sent["c"] == 10
    assert sent["b"] / sent["a"] == pytest.approx(3, rel=0.15)
    assert sent["d"] == 0
    # In each layer large values are sent; each owner has its own threshold.
    for name in ("a", "b"):
        mine = np.abs(drawn[name]).reshape(4, -1)
        chosen = np.flatnonzero(updates[0][name])
        assert mine[:, chosen].max(axis=0).min() > np.quantile(mine, 0.9)


def test_deft_allocation():
    sizes = np.array([10, 1000, 1000, 5000], np.int32)
    shares = _shares.allocate(jnp.array([9.0, 1.0, 2.0, 0.0]), sizes, 100)
    assert float(jnp.sum(shares)) == pytest.approx(100, rel=1e-3)
    assert shares[0] == 10
    assert shares[2] / shares[1] == pytest.approx(2, rel=0.01)
    assert 0 < shares[3] < 1
    # If all norms are zero, shares are even.
    even = _shares.allocate(jnp.zeros(4), np.full(4, 100, np.int32), 40)
    np.testing.assert_allclose(even, 10, rtol=1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("goal", [1, 2, 7, 100, 597, 598])
@pytest.mark.parametrize("workers", [1, 4, 7])
def test_deft_pieces_hold_what_is_selected_in_them(goal, workers):
    """Shares, parts and pieces are exact for any norms."""
    rng = np.random.default_rng(goal)
    sizes = np.array([1, 500, 3, 90, 5], np.int32)
    edges = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    for step in range(5):
        norms = jnp.asarray(rng.exponential(size=5) ** 4, jnp.float32)
        shares = _shares.allocate(norms, sizes, goal)
        counts = np.asarray(_shares.rounded(shares, sizes, goal))
        assert counts.sum() == goal
        assert np.all((counts >= 0) & (counts <= sizes))
        assert np.all(np.abs(counts - np.asarray(shares)) < 1.01)
        quotas = partitions.quotas(jnp.int32(step), sizes.sum(), goal, workers)
        goals = np.concatenate([[0], np.cumsum(quotas)]).astype(np.int32)
        cuts = _shares.cut(jnp.asarray(counts), edges, jnp.asarray(goals))
        bounds, ends = np.asarray(cuts), np.cumsum(counts)
        assert (bounds[0], bounds[-1]) == (0, sizes.sum())
        assert np.all(np.diff(bounds) >= 0)
        for p in range(workers):
            piece = np.minimum(bounds[p + 1], edges[1:]) - np.maximum(
                bounds[p], edges[:-1]
            )
            wanted = np.minimum(goals[p + 1], ends) - np.maximum(
                goals[p], ends - counts
            )
            assert np.all(np.maximum(wanted, 0) <= np.maximum(piece, 0))


@pytest.mark.parametrize(
    ("scale", "goal"), [(1.1, 20_000_000), (0.9, 20_000_000), (1.0, 20_000_001)]
)
def test_deft_shares_that_are_off_still_sum_to_the_target(scale, goal):
    """Float32 sums may be off by more than one coordinate per layer."""
    sizes = np.array([2**30, 2**20, 2**24], np.int32)
    shares = jnp.array([19_000_000.3, 500_000.3, 500_000.4], jnp.float32) * scale
    counts = np.asarray(_shares.rounded(shares, sizes, goal))
    assert counts.sum() == goal
    assert np.all((counts >= 0) & (counts <= sizes))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("n", "workers", "density"), [(5, 8, 0.2), (600, 4, 0.999), (620, 3, 0.98)]
)
def test_deft_delivers_its_target_in_every_step(n, workers, density):
    """Even with shares that round to 0, and with layers that are sent whole."""
    rng = np.random.default_rng(1)
    params = {"a": jnp.zeros(2), "b": jnp.zeros((n - 3, 1)), "c": jnp.zeros(1)}
    stream = [
        jax.tree.map(
            lambda leaf: rng.laplace(size=(workers, *leaf.shape)).astype(np.float32),
            params,
        )
        for _ in range(16)
    ]
    _, states = run(sparsejax.deft(density), stream, params, workers)
    assert {int(s.report.sent) for s in states} == {max(1, int(density * n))}
