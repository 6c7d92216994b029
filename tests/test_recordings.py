"""The published rule and the numpy oracles follow recordings of published programs."""

from __future__ import annotations

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import partitions, thresholds
from tests import reference

pytestmark = pytest.mark.newer_waits

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def published_step(partition, w, target):
    """One step of a published method on all workers."""
    rule = thresholds.staircase()

    @jax.jit
    def step(residual, bounds_state, rule_state, g, t):
        n = g.shape[1]
        acc = g + residual
        bounds = partition.bounds(bounds_state, n, w, target)
        coordinates = jnp.arange(n, dtype=jnp.int32)
        part = jnp.searchsorted(bounds, coordinates, side="right") - 1
        holder = partitions.by_part(jnp.arange(w, dtype=jnp.int32), t, w)
        threshold = rule.find(rule_state, part, None, None, None)
        chosen = jnp.abs(acc[holder[part], coordinates]) >= threshold
        counts = jnp.zeros(w, jnp.int32).at[part].add(chosen.astype(jnp.int32))
        facts = (counts, jnp.full(w, threshold))
        bounds_state = partition.adapt(bounds_state, n, target, *facts, None)
        rule_state = rule.adapt(rule_state, *facts, target)
        residual = jnp.where(chosen[None], 0, acc)
        return residual, bounds_state, rule_state, bounds, counts

    return step


def _first(steps, golden):
    return {name: golden[name][:steps] for name in golden.files if name != "meta"}


@pytest.fixture(scope="module")
def recordings(every):
    """One pass over the recorded stream, and the results to compare with recordings."""
    n, w, density, target = 131072, 4, 0.01, 1310
    steps = reference.STEPS if every else reference.FIRST_STEPS
    kinds = {"exdyna": partitions.published(), "micro": partitions.even()}
    golden = {k: _first(steps, np.load(GOLDEN / f"{k}_w4.npz")) for k in kinds}
    oracles = {k: reference.Published(n, w, density, k == "exdyna") for k in kinds}
    ideal = reference.Global(n, w, density)
    defaults = {k: reference.Default(n, w, density, k == "exdyna") for k in kinds}
    stairs = thresholds.staircase()
    carried = {
        k: (jnp.zeros((w, n)), p.init(n, w), stairs.init(target, w))
        for k, p in kinds.items()
    }
    step = {k: published_step(p, w, target) for k, p in kinds.items()}
    names = ("thresholds", "counts", "bounds", "oracle_counts", "oracle_bounds",
             "oracle_l1", "update_l1", "sent", "spread")  # fmt: skip
    kept = {k: {name: [] for name in names} for k in kinds}
    stream = reference.gradient_stream(n, w, reference.STEPS, seed=1)
    for t, g in enumerate(itertools.islice(stream, steps)):
        ideal.step(g)
        for k in kinds:
            seen = kept[k]
            seen["thresholds"].append(float(carried[k][2]))
            *carry, bounds, counts = step[k](*carried[k], g, jnp.int32(t))
            carried[k] = carry
            seen["counts"].append(np.asarray(counts))
            seen["bounds"].append(np.asarray(bounds))
            seen["oracle_bounds"].append(oracles[k].bounds())
            chosen, update = oracles[k].step(g)
            seen["oracle_counts"].append([len(c) for c in chosen])
            seen["oracle_l1"].append(oracles[k].residual_l1())
            seen["update_l1"].append(np.abs(update).sum(dtype=np.float64))
            chosen, _ = defaults[k].step(g)
            seen["sent"].append(sum(map(len, chosen)))
            local = defaults[k].threshold
            seen["spread"].append(local.max() / local.min())
    for k in kinds:
        kept[k] = {name: np.array(v) for name, v in kept[k].items()}
        residual = np.asarray(carried[k][0], np.float64)
        kept[k].update(l1=np.abs(residual).sum(), default_l1=defaults[k].residual_l1())
    return golden, kept, ideal.residual_l1(), target


@pytest.mark.parametrize("kind", ["exdyna", "micro"])
def test_oracles_are_the_published_programs(recordings, kind):
    golden, kept = recordings[0][kind], recordings[1][kind]
    counts = kept["oracle_counts"]
    np.testing.assert_array_equal(counts.sum(axis=1), golden["k"])
    np.testing.assert_allclose(kept["oracle_l1"], golden["resid_l1"], rtol=1e-12)
    np.testing.assert_allclose(kept["update_l1"], golden["update_l1"], rtol=1e-7)
    if kind == "exdyna":
        np.testing.assert_array_equal(counts, golden["ks"])
        starts = kept["oracle_bounds"][:, :-1] // 128
        np.testing.assert_array_equal(starts, golden["blk_pos"])


@pytest.mark.parametrize("kind", ["exdyna", "micro"])
def test_staircase_follows_the_published_programs(recordings, kind):
    golden, kept = recordings[0][kind], recordings[1][kind]
    np.testing.assert_allclose(kept["thresholds"], golden["threshold"], rtol=1e-4)
    np.testing.assert_allclose(kept["counts"].sum(axis=1), golden["k"], rtol=2e-3)
    assert kept["l1"] == pytest.approx(golden["resid_l1"][-1], rel=1e-4)
    np.testing.assert_array_equal(kept["bounds"], kept["oracle_bounds"])
    if kind == "exdyna":
        starts = kept["bounds"][:, :-1] // 128
        np.testing.assert_array_equal(starts, golden["blk_pos"])


@pytest.mark.parametrize("kind", ["exdyna", "micro"])
def test_default_oracle_meets_the_density_and_the_ideal(recordings, kind, every):
    _, found, ideal, target = recordings
    kept = found[kind]
    if every:
        assert ideal == pytest.approx(13209, rel=1e-4)
    assert (kept["sent"] == target).all()
    assert kept["default_l1"] == pytest.approx(ideal, rel=0.05)
    if kind == "exdyna":
        assert kept["spread"][-50:].mean() < 1.03
    else:
        assert kept["spread"][-50:].mean() > 3
