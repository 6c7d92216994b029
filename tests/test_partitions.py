"""Partitions: bounds are legal for any history, and follow their oracles."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax import partitions
from tests import reference

RULES = {
    "even": partitions.even,
    "published": partitions.published,
    "balanced": partitions.balanced,
}
# (n, workers, target): fewer coordinates than workers, one worker, nearly dense,
# nothing at all, blocks that are not multiples of 32, and the usual.
SIZES = [
    (0, 3, 1),
    (5, 8, 2),
    (100, 8, 3),
    (1000, 3, 990),
    (5000, 1, 50),
    (38282, 8, 382),
]


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@functools.cache
def compiled(name, n, w, target):
    """(init, bounds, adapt) of a rule, jitted once per size."""
    rule = RULES[name]()
    return (
        lambda: rule.init(n, w),
        jax.jit(lambda state: rule.bounds(state, n, w, target)),
        jax.jit(lambda state, *facts: rule.adapt(state, n, target, *facts)),
    )


# -- who has which part, and how much it sends -----------------------------------------


@pytest.mark.parametrize("step", [0, 1, 7, 2**31 - 1])
def test_parts_rotate_and_by_part_undoes_it(step):
    parts = partitions.parts_of(jnp.int32(step), 8)
    assert parts.tolist() == [(step + r) % 8 for r in range(8)]
    # `by_part` puts each worker's fact at the place of the worker's part.
    assert partitions.by_part(parts, jnp.int32(step), 8).tolist() == list(range(8))
    rows = jnp.stack([parts, parts], axis=1)
    assert partitions.by_part(rows, jnp.int32(step), 8)[:, 1].tolist() == [*range(8)]


@pytest.mark.parametrize(
    ("n", "target", "w"),
    [(38282, 382, 8), (131072, 1310, 4), (100, 3, 8), (5, 2, 8), (10, 9, 8), (0, 0, 3)],
)
def test_quotas_sum_to_the_target(n, target, w):
    for step in (0, 1, w, 5 * w + 1, 2**31 - 1):
        quotas = np.asarray(partitions.quotas(jnp.int32(step), n, target, w))
        assert quotas.dtype == np.int32
        assert quotas.sum() == target
        assert quotas.max() - quotas.min() <= 1
        np.testing.assert_array_equal(
            quotas, reference.quotas_of(step, n, target, w), f"step {step}"
        )


def test_no_part_starves_when_the_target_is_below_the_worker_count():
    w, target = 8, 3
    total = sum(
        np.asarray(partitions.quotas(jnp.int32(t), 1000, target, w))
        for t in range(w * w)
    )
    assert total.tolist() == [target * w] * w


@pytest.mark.parametrize(("n", "w", "target"), [(10, 8, 9), (1003, 8, 1001)])
def test_quotas_near_density_one_fit_the_even_parts(n, w, target):
    sizes = np.diff(reference.even_bounds(n, w))
    for step in range(2 * w):
        quotas = np.asarray(partitions.quotas(jnp.int32(step), n, target, w))
        assert (quotas <= sizes).all()


@given(n=st.integers(0, 2**31 - 1), w=st.integers(1, 1024))
def test_blocks_cover_the_vector(n, w):
    count, size = partitions.blocks(n, w)
    assert (count, size) == reference.block_grid(n, w)
    assert (count - 1) * size <= max(n - 1, 0) < count * size
    assert count <= max(1024, 4 * w)
    if n >= 64 * w:
        assert size % 32 == 0


@pytest.mark.parametrize("name", RULES)
def test_only_balanced_parts_read_the_histogram(name):
    n, w, target = 38282, 8, 382
    rule = RULES[name]()
    facts = rule.init(n, w), n, target, jnp.full(w, 48), jnp.ones(w)
    if rule.reads:
        assert (name, rule.reads) == ("balanced", {"histogram"})
        with pytest.raises(AttributeError):
            rule.adapt(*facts, None)
    else:
        rule.adapt(*facts, None)


# -- bounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("n", "w", "target"), SIZES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_bounds_are_legal_whatever_happened(name, n, w, target, seed):
    rng = np.random.default_rng(seed)
    init, bounds, adapt = compiled(name, n, w, target)
    span = RULES[name]().span(n, w, target)
    count, size = partitions.blocks(n, w)
    awkward = np.array([0, np.inf, np.nan, 1e-38, 1e-45, 1e-30, 1e30, 1.0], np.float32)
    state = init()
    for _ in range(12):
        cuts = np.asarray(bounds(state))
        assert cuts.dtype == np.int32
        assert cuts[0] == 0
        assert cuts[-1] == n
        lengths = np.diff(cuts)
        assert (lengths >= 0).all()
        assert lengths.max() <= span
        if name == "balanced":
            # If a part could not hold its quota, the target would be missed.
            quotas = reference.quotas_of(0, n, target, w)
            assert (lengths >= min(quotas.max(), n // w)).all()
        demand = rng.integers(0, 2 ** rng.integers(1, 16), w).astype(np.int32)
        threshold = rng.choice(awkward, w)
        if rng.random() < 0.5:
            threshold = rng.lognormal(sigma=2, size=w).astype(np.float32)
        histogram = rng.integers(0, size + 1, count).astype(np.int32)
        # Deliveries in all blocks, in few, or in none.
        histogram[rng.random(count) < rng.choice([0.0, 0.99, 1.0])] = 0
        new = adapt(state, demand, threshold, histogram)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(new))
        assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
        state = new


def test_balanced_stays_legal_when_the_target_changes_under_its_state():
    n, w = 38282, 8
    init, _, adapt = compiled("balanced", n, w, 382)
    histogram = np.zeros(partitions.blocks(n, w)[0], np.int32)
    histogram[100:104] = 90
    state = adapt(init(), np.full(w, 48), np.ones(w, np.float32), histogram)
    rule = partitions.balanced()
    for target in (38, 382, 9570, 38000):
        lengths = np.diff(rule.bounds(state, n, w, target))
        assert lengths.sum() == n
        assert lengths.min() >= min(-(-target // w), n // w)


def test_balanced_leaves_room_for_the_quota_where_the_last_block_is_short():
    n, w, target = 4100, 3, 192
    init, bounds, adapt = compiled("balanced", n, w, target)
    count, size = partitions.blocks(n, w)
    assert target // w == 2 * size
    assert n % size
    histogram = np.zeros(count, np.int32)
    histogram[-1] = 4
    state = adapt(init(), np.full(w, 64), np.ones(w, np.float32), histogram)
    lengths = np.diff(bounds(state))
    assert lengths[0] > n // 2
    assert (lengths >= target // w).all()


@pytest.mark.parametrize("seed", range(4))
def test_published_moves_as_the_published_program_does(seed):
    n, w, target = 38282, 8, 382
    rng = np.random.default_rng(seed)
    init, bounds, adapt = compiled("published", n, w, target)
    oracle = reference.Published(n, w, target / n, moving=True)
    facts = (np.ones(w, np.float32), np.zeros(partitions.blocks(n, w)[0], np.int32))
    state, moved = init(), False
    # Enough steps in one direction to reach the least size.
    tilt = np.geomspace(1, 40, w)
    for t in range(150):
        np.testing.assert_array_equal(bounds(state), oracle.bounds())
        counts = rng.poisson(20 * tilt) * (rng.random() > 0.05)
        if t % 2:
            # Counts so near the mean that a moved block changes the next pair.
            counts = rng.integers(900, 1100, w)
        before = oracle.blocks
        oracle.blocks = reference.published_move(
            oracle.blocks, counts.tolist(), oracle.s, n, oracle.B
        )
        moved |= (before != oracle.blocks).any()
        state = adapt(state, counts.astype(np.int32), *facts)
    assert moved
    assert oracle.blocks.min() >= oracle.B / (4 * w)


@pytest.mark.parametrize(("n", "w", "target"), [(38282, 8, 382), (4099, 3, 40)])
def test_balanced_moves_as_its_oracle_does(n, w, target):
    rng = np.random.default_rng(n)
    init, bounds, adapt = compiled("balanced", n, w, target)
    oracle = reference.Default(n, w, target / n, balanced=True)
    state, unequal = init(), 0
    density = np.exp(-(((np.arange(oracle.B) / oracle.B - 0.3) / 0.2) ** 2))
    for t in range(40):
        np.testing.assert_array_equal(bounds(state), oracle.bounds())
        threshold = rng.lognormal(sigma=0.2, size=w).astype(np.float32)
        threshold[t % w] = [np.inf, 0, np.nan, 1e-38, 1.0][t % 5]
        histogram = rng.poisson(density * (t % 7 > 0)).astype(np.int32)
        oracle.mean, oracle.cuts = reference.balanced_move(
            oracle.mean, oracle.cuts, oracle.least, threshold, histogram
        )
        state = adapt(state, np.full(w, 48), threshold, histogram)
        # If a quantile falls in the middle of a block, rounding may decide.
        cuts = np.searchsorted(
            np.arange(oracle.B) * oracle.size, np.asarray(bounds(state))
        )
        assert np.abs(cuts - oracle.cuts).max() <= 1
        unequal += (cuts != oracle.cuts).sum()
        oracle.cuts = cuts
    assert unequal <= 0.02 * 40 * w


def test_balanced_brings_local_thresholds_together():
    n, w, target, steps = 16384, 4, 328, 120
    init, bounds, adapt = compiled("balanced", n, w, target)
    count, size = partitions.blocks(n, w)
    scale = np.where(np.arange(n) < n // 8, 1.0, 0.2).astype(np.float32)
    rng = np.random.default_rng(0)
    state, residual, ratios = init(), np.zeros(n, np.float32), []
    for _ in range(steps):
        acc = residual + scale * rng.laplace(size=n).astype(np.float32)
        cuts, threshold, chosen = np.asarray(bounds(state)), [], []
        for p in range(w):
            part = np.abs(acc[cuts[p] : cuts[p + 1]])
            kept, t = reference.fill_quota(part, target // w)
            chosen.append(cuts[p] + kept)
            threshold.append(t)
        chosen = np.concatenate(chosen)
        residual = acc
        residual[chosen] = 0
        ratios.append(max(threshold) / min(threshold))
        histogram = np.bincount(chosen // size, minlength=count).astype(np.int32)
        facts = np.full(w, target // w, np.int32), np.float32(threshold), histogram
        state = adapt(state, *facts)
    assert ratios[0] > 2.5
    assert np.mean(ratios[-40:]) < 1.1


# -- size of the programs --------------------------------------------------------------


def equations(jaxpr):
    inner = jax.tree.leaves(
        [e.params for e in jaxpr.eqns],
        is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
    )
    inner = [getattr(x, "jaxpr", x) for x in inner]
    return len(jaxpr.eqns) + sum(equations(x) for x in inner if hasattr(x, "eqns"))


@pytest.mark.parametrize("name", RULES)
def test_programs_do_not_grow_with_the_workers(name):
    n, target = 2**24, 2**17
    rule = RULES[name]()

    def program(state, step, demand, threshold, histogram):
        w = demand.shape[0]
        state = rule.adapt(state, n, target, demand, threshold, histogram)
        quotas = partitions.quotas(step, n, target, w)
        owned = partitions.parts_of(step, w)
        demand = partitions.by_part(demand, step, w)
        return rule.bounds(state, n, w, target), quotas, owned, demand

    def size(w):
        histogram = jnp.zeros(partitions.blocks(n, w)[0], jnp.int32)
        facts = jnp.int32(3), jnp.ones(w, jnp.int32), jnp.ones(w), histogram
        return equations(jax.make_jaxpr(program)(rule.init(n, w), *facts).jaxpr)

    assert size(1024) == size(8) < 350
