"""Samples, rungs, pieces and scans, which only programs for accelerators use."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsejax
from sparsejax import _xla, thresholds
from sparsejax.sparsifiers import _rungs
from sparsejax.sparsifiers._layers import _layerwise
from sparsejax.vectors import _scans
from sparsejax.vectors._ladder import filled
from sparsejax.vectors._pieces import select_pieces
from sparsejax.vectors._sample import sample_in


@pytest.fixture(autouse=True)
def _gpu():
    with _xla.traced_for("gpu"):
        yield


@pytest.mark.parametrize("m", [0, 1, 63, 64, 65, 4096, 4097, 140_000])
def test_running_sum_and_max(m):
    x = np.random.default_rng(m).integers(0, 5, m).astype(np.int32)
    sums, maxima = jax.jit(lambda x: (_scans.running_sum(x), _scans.running_max(x)))(x)
    assert sums.dtype == jnp.int32
    np.testing.assert_array_equal(sums, np.cumsum(x))
    np.testing.assert_array_equal(maxima, np.maximum.accumulate(x))


sample = jax.jit(functools.partial(sample_in, number=800))


@pytest.mark.parametrize(("start", "size"), [(0, 5000), (123, 4000), (4990, 10)])
def test_a_sample_covers_its_region_evenly(start, size):
    x = np.arange(5000, dtype=np.float32)
    found = np.sort(sample(x, np.int32(start), np.int32(size))) - start
    assert found.size == 800
    assert found[0] >= 0
    assert found[-1] < size
    expected = np.arange(800) * size / 800
    assert np.abs(found - expected).max() <= max(8, size / 100)
    empty = sample(x, np.int32(5000), np.int32(0))
    assert empty.size == 800


def strided(where, quota):
    kept = min(len(where), quota)
    return [where[i * len(where) // kept] for i in range(kept)]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_first_threshold_that_fills_the_quota_is_taken(data):
    x = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=1000)
    x = np.where(np.arange(1000) % 7 == 3, np.nan, x).astype(np.float32)
    size = data.draw(st.integers(0, 600))
    start = data.draw(st.integers(0, 1000 - size))
    quota = data.draw(st.integers(0, 200))
    limit = data.draw(st.integers(0, 250))
    rungs = np.array([1.5, 0.5, 0.0], np.float32)
    indices, demand, found = chosen(x, start, size, rungs, quota, limit)
    region = np.abs(x[start : start + size])
    counts = [np.sum(region >= t) for t in rungs]
    taken = next((i for i in (0, 1) if counts[i] >= quota), 2)
    assert (demand, found) == (counts[taken], rungs[taken])
    where = start + np.flatnonzero(region >= rungs[taken])
    expected = np.full(250, 1000)
    kept = strided(where, limit)
    expected[: len(kept)] = kept
    np.testing.assert_array_equal(indices, expected)


@jax.jit
def chosen(x, start, size, rungs, quota, limit):
    found = filled(x, start, size, rungs, quota, span=700).padded(800)
    indices = found.indices(limit, 250, 1000)
    return indices, found.demand, found.threshold


LAYERS = np.array([0, 3, 300, 301, 700, 1000])


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_pieces_take_a_threshold_each(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = rng.normal(size=1000).astype(np.float32)
    start = data.draw(st.integers(0, 1000))
    stop = data.draw(st.integers(start, 1000))
    rungs = np.array([[2, 1, 0], [1, 0.5, 0], [3, 2, 0], [np.inf] * 3, [1, 1, 0]])
    rungs = rungs.astype(np.float32)
    quotas = np.array([2, 60, 1, 0, 40])
    capacity = data.draw(st.sampled_from([200, 30]))
    result = in_pieces(capacity)(x, (start, stop), rungs, quotas)
    indices, demand, found = jax.device_get(result)
    expected, room = [], capacity
    for a, b, ts, q, d, t in zip(
        LAYERS[:-1], LAYERS[1:], rungs, quotas, demand, found, strict=True
    ):
        a, b = min(max(a, start), stop), max(min(b, stop), min(max(a, start), stop))
        counts = [np.sum(np.abs(x[a:b]) >= t) for t in ts]
        taken = next((i for i in (0, 1) if counts[i] >= q), 2)
        assert (d, t) == (counts[taken], ts[taken])
        where = a + np.flatnonzero(np.abs(x[a:b]) >= ts[taken])
        kept = strided(where, min(q, room))
        expected += kept
        room -= len(kept)
    assert expected == [i for i in indices if i < 1000]
    assert len(indices) == capacity


@functools.cache
def in_pieces(capacity):
    def select(x, bounds, rungs, quotas):
        bounds = tuple(jnp.int32(b) for b in bounds)
        return select_pieces(x, LAYERS, bounds, rungs, quotas, capacity=capacity)

    return jax.jit(select)


@jax.jit
def rungs_of(x, quota):
    rule = thresholds.quota()
    state, part = rule.init(500, 1), jnp.int32(0)
    region = (x, jnp.int32(0), jnp.int32(50_000))
    return _rungs.rungs(rule, state, part, quota, region, span=50_000, number=20_000)


@pytest.mark.parametrize("quota", [0, 1, 500, 50_000])
def test_a_sample_finds_a_little_more_than_the_quota(quota):
    """A zero is selected only if everything is."""
    rng = np.random.default_rng(0)
    x = (rng.laplace(size=50_000) * (rng.random(50_000) < 0.6)).astype(np.float32)
    found = np.asarray(rungs_of(x, np.int32(quota)))
    assert found.shape == (3,)
    count = np.sum(np.abs(x)[None] >= found[:, None], axis=1)
    if quota == 0:
        assert np.isinf(found).all()
    elif quota == 50_000:
        assert (found == 0).all()
    else:
        assert found[-1] == np.finfo(np.float32).tiny
        assert quota <= count[0] <= quota + 12 * quota**0.5


@pytest.mark.newer_waits
@pytest.mark.parametrize(
    "name",
    [
        "exdyna",
        "deft",
        *(pytest.param(x, marks=pytest.mark.second_tier) for x in ("micro", "sidco")),
    ],
)
def test_samples_keep_density_and_mass(name, monkeypatch):
    """The vectors are longer than their samples."""
    monkeypatch.setattr(_rungs, "_LEAST", 512)
    monkeypatch.setattr(_rungs, "_ABOVE", 16)
    monkeypatch.setattr(_layerwise, "_SAMPLE", 2048)
    n, workers = 20_000, 4
    tx = sparsejax.simulate(getattr(sparsejax, name)(0.01), workers=workers)
    shapes = {"a": (7000,), "b": (50, 100), "c": (8000,)}
    rng = np.random.default_rng(1)

    def drawn():
        return {
            k: rng.laplace(size=(workers, *s)).astype(np.float32) * (1 + i)
            for i, (k, s) in enumerate(shapes.items())
        }

    def flat(tree):
        return np.concatenate(
            [np.asarray(tree[k], np.float64).reshape(*lead, -1) for k in shapes],
            axis=-1,
        )

    state = tx.init({k: jnp.zeros(s) for k, s in shapes.items()})
    update = jax.jit(tx.update)
    given_, received = np.zeros(n), np.zeros(n)
    lead: tuple[int, ...]
    for _ in range(8):
        gradient = drawn()
        updates, state = update(gradient, state)
        lead = (workers,)
        given_ += flat(gradient).mean(axis=0)
        lead = ()
        received += flat(updates)
        report = sparsejax.report(state)
        if name != "sidco":
            assert report.sent == 200
            assert np.count_nonzero(flat(updates)) == 200
    kept = np.asarray(state.memory.per_worker, np.float64).mean(axis=0)
    np.testing.assert_allclose(received + kept, given_, atol=1e-4)
