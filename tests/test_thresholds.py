"""Threshold rules: the factors of `staircase`, and `quota` fills its quota."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sparsejax import _xla, partitions, thresholds

TINY = np.finfo(np.float32).tiny


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def count_in(x):
    """The `count` of the part `x`: all thresholds in one pass."""
    return lambda t: jnp.sum(jnp.abs(x[None]) >= t[:, None], axis=1, dtype=jnp.int32)


PASSES = []


@functools.cache
def searching(slack, platform):
    """The quota rule's search, jitted once; `PASSES` grows by one with each pass."""
    rule = thresholds.quota(slack)

    @jax.jit
    def find(x, wanted, hint):
        def count(t):
            jax.debug.callback(lambda: PASSES.append(1))
            return count_in(x)(t)

        size = jnp.int32(x.shape[0])
        with _xla.traced_for(platform):
            return rule.find(hint[None], jnp.int32(0), wanted, size, count)

    return find


def search(x, wanted, hint, slack=0.25, platform="cpu"):
    """(threshold, passes) that the quota rule finds for the part `x`."""
    PASSES.clear()
    found = searching(slack, platform)(x, np.int32(wanted), jnp.float32(hint))
    jax.effects_barrier()
    return np.asarray(found), len(PASSES)


# -- the quota rule --------------------------------------------------------------------

RNG = np.random.default_rng(3)
PARTS = {
    "laplace": RNG.laplace(size=5000),
    "thirty decades": RNG.choice([-1, 1], 5000) * 10.0 ** RNG.uniform(-30, 0, 5000),
    "huge": RNG.laplace(size=5000) * 1e30,
    "minute": RNG.uniform(1, 2, size=5000) * 1e-30,
    "two values": np.where(np.arange(5000) % 10 == 0, 3.0, 1.0),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("wanted", [1, 50, 4999])
@pytest.mark.parametrize("hint", ["none", "right", "1e6 over", "1e6 under"])
def test_quota_is_filled_from_any_hint(part, wanted, hint):
    x = PARTS[part].astype(np.float32)
    exact = np.sort(np.abs(x))[-wanted]
    factor = {"none": 0, "right": 1, "1e6 over": 1e6, "1e6 under": 1e-6}[hint]
    found, passes = search(x, wanted, exact * np.float32(factor))
    count = np.sum(np.abs(x) >= found)
    assert count >= wanted
    if part == "two values" and wanted < 4000:
        # No threshold lies in between: the highest that reaches the quota is chosen.
        assert found == exact
        assert passes <= 15
    else:
        assert count <= wanted * 1.25
        # Each pass keeps one of five ranges, so all 2^31 numbers need 14 passes.
        assert passes <= (14 if part == "minute" and wanted == 1 else 9)
    assert found.dtype == np.float32


@pytest.mark.parametrize("wanted", [1, 50, 4999])
@pytest.mark.parametrize("hint", ["none", "right", "1e6 over", "1e6 under"])
def test_accelerators_make_three_passes(wanted, hint):
    """They meet the slack from any hint, or nearly so: 0.7 % between thresholds."""
    x = PARTS["laplace"].astype(np.float32)
    exact = np.sort(np.abs(x))[-wanted]
    factor = {"none": 0, "right": 1, "1e6 over": 1e6, "1e6 under": 1e-6}[hint]
    found, passes = search(x, wanted, exact * np.float32(factor), platform="gpu")
    assert passes == 3
    count = np.sum(np.abs(x) >= found)
    assert wanted <= count <= 1.25 * wanted


def test_passes_when_the_hint_is_near():
    x = RNG.laplace(size=20000).astype(np.float32)
    exact = np.sort(np.abs(x))[-400]
    hints = exact * np.exp(RNG.normal(scale=0.02, size=20)).astype(np.float32)
    passes = [search(x, 400, hint)[1] for hint in hints]
    assert np.mean(passes) < 1.3
    assert max(passes) <= 2


@pytest.mark.parametrize("slack", [0.0, 0.01])
def test_quota_without_slack_is_exact(slack):
    x = RNG.laplace(size=3000).astype(np.float32)
    found, passes = search(x, 90, 0.0, slack)
    assert np.sum(np.abs(x) >= found) == 90
    assert passes <= 9


@pytest.mark.parametrize(
    ("x", "wanted", "expected"),
    [
        (np.arange(8), 0, np.inf),  # a quota of 0
        (np.arange(8), 8, 0.0),  # a quota of everything, zeros too
        (np.arange(8), 9, 0.0),
        (np.zeros(0), 1, 0.0),
        (np.zeros(0), 0, np.inf),
        (np.zeros(8), 3, TINY),  # zeros are never selected
        (np.array([0, 0, 5, 0, 0, 0]), 3, TINY),
        (np.full(8, 0.7), 3, np.float32(0.7)),  # ties
        (np.full(8, -1e-30), 3, np.float32(1e-30)),
    ],
)
@pytest.mark.parametrize("hint", [0.0, 0.7, 1e-38, 3e38])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_quota_edge_cases(x, wanted, expected, hint, platform):
    x = x.astype(np.float32)
    found, passes = search(x, wanted, hint, slack=0.0, platform=platform)
    if platform == "gpu" and TINY < expected < np.inf:
        # Lower than the tie, and with the same count.
        assert TINY <= found <= expected
        assert np.sum(np.abs(x) >= found) >= wanted
    else:
        assert found == np.float32(expected)
    if platform == "gpu":
        assert passes == 3
    elif expected in (0.0, np.inf):
        assert passes == 0
    elif expected == TINY:
        assert passes <= (2 if hint else 1)


def test_nan_counts_as_nothing():
    x = np.array([np.nan, 1, 2, 3, 4], np.float32)
    found, _ = search(x, 2, 0.0)
    assert 2 < found <= 3


def test_quota_remembers_only_thresholds_that_are_good_hints():
    rule = thresholds.quota()
    state = jnp.array([1.0, 2.0, 3.0, 4.0, 5.0])
    last = jnp.array([0.5, jnp.inf, jnp.nan, 0.0, TINY])
    middle = jnp.full(5, 225, jnp.int32)
    new = rule.adapt(state, middle, last, 1000)
    assert new.tolist() == [0.5, 2.0, 3.0, 4.0, 5.0]
    assert new.dtype == rule.init(10, 5).dtype == jnp.float32


def test_quota_expects_thresholds_where_counts_would_be_right():
    rule = thresholds.quota()
    last, state = jnp.full(5, 0.5), jnp.zeros(5)
    # The quota is 200 of 1000, so 225 is the middle of the accepted counts.
    counts = jnp.array([200, 225, 250, 0, 10_000], jnp.int32)
    for target in (1000, jnp.int32(1000)):
        low, right, high, none, many = rule.adapt(state, counts, last, target).tolist()
        assert none < low < right == 0.5 < high < many
        # The hint moves by at most a factor of two in counts.
        assert none == pytest.approx(0.5 * 0.5 ** (1 / 9))
        assert many == pytest.approx(0.5 * 2 ** (1 / 9))


def test_slots_and_limits():
    fill, stairs = thresholds.quota(), thresholds.staircase()
    for rule in (fill, stairs):
        assert rule.capacity(382, 38282, 8) == 48
        assert rule.capacity(1, 10, 8) == 1
    quotas = jnp.array([3, 5])
    assert fill.limit(quotas, 4).tolist() == [3, 4]
    # The published program has no quota: messages may be full.
    assert int(stairs.limit(jnp.int32(3), 4)) == 4


@pytest.mark.parametrize("slack", [-0.1, float("nan"), float("inf")])
def test_slack_is_checked(slack):
    with pytest.raises(ValueError, match="slack: got"):
        thresholds.quota(slack=slack)
    with pytest.raises(TypeError, match="slack: got '1'"):
        thresholds.quota(slack="1")


def test_rules_bring_their_partition():
    """The published rule moves single blocks, and the default follows a histogram."""
    assert thresholds.staircase().partition.reads == frozenset()
    assert thresholds.quota().partition.reads == {"histogram"}


# -- inside shard_map and vmap ---------------------------------------------------------


@pytest.mark.parametrize("make", [thresholds.quota, thresholds.staircase])
def test_rules_run_in_shard_map_and_vmap(make):
    w, target, rule = 8, 804, make()
    scale = np.geomspace(1e-3, 1e3, w)[:, None]
    x = jnp.asarray(RNG.laplace(size=(w, 4000)) * scale, jnp.float32)
    state = rule.init(target, w)

    def find(x):
        part = (jax.lax.axis_index("data") + 3) % w
        quota = partitions.quotas(jnp.int32(3), x.shape[0] * w, target, w)[part]
        size = jnp.int32(x.shape[0])
        found = rule.find(state, part, quota, size, count_in(x))
        return found, count_in(x)(found[None])[0], quota

    def sharded(x):
        facts = find(x[0])
        # Typed as replicated, one worker's threshold would count for all workers.
        assert jax.typeof(facts[0]).mat.varying == {"data"}
        return jax.tree.map(lambda leaf: leaf[None], facts)

    mesh = jax.make_mesh((w,), ("data",), axis_types=(AxisType.Auto,))
    on_devices = jax.jit(
        jax.shard_map(sharded, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    )(x)
    on_one = jax.jit(jax.vmap(find, axis_name="data"))(x)
    for a, b in zip(on_devices, on_one, strict=True):
        np.testing.assert_array_equal(a, b)
    found, counts, quotas = map(np.asarray, on_devices)
    if make is thresholds.quota:
        assert ((quotas <= counts) & (counts <= 1.25 * quotas)).all()
        assert sorted(set(quotas)) == [100, 101]
    else:
        assert set(found) == {np.float32(1 / (2 * np.sqrt(target)))}


# -- the published rule ----------------------------------------------------------------


def test_staircase_factors():
    rule = thresholds.staircase()
    state = rule.init(100, 2)
    assert state.dtype == jnp.float32
    assert float(state) == pytest.approx(0.05)
    for total, factor in [(111, 1.005), (110, 1.00125), (91, 1.00125), (90, 0.995)]:
        demand = jnp.array([total - 40, 40])
        new = rule.adapt(state, demand, jnp.full(2, state), 100)
        assert float(new) == pytest.approx(0.05 * factor, rel=1e-6), total
