"""SIDCo: the published program's counts, and vectors that no distribution fits."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax.sparsifiers._fit import _fitted, _stages

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "sidco.json"
FITS = {
    "exponential": "exponential",
    "generalized_pareto": "generalized_pareto",
    "gamma_then_generalized_pareto": "gamma",
}


@functools.cache
def vector(dist, n, seed):
    rng = np.random.default_rng([seed, n])
    draw = {
        "laplace": lambda: rng.laplace(size=n) * 1e-3,
        "normal": lambda: rng.standard_normal(n) * 1e-2,
        "student_t3": lambda: rng.standard_t(3, size=n) * 1e-3,
        "gamma0.5": lambda: (
            rng.gamma(0.5, size=n) * np.sign(rng.standard_normal(n)) * 1e-3
        ),
        "mixed": lambda: (
            rng.laplace(size=n) * np.where(np.arange(n) % 10 == 0, 1e-2, 1e-4)
        ),
    }[dist]
    return draw().astype(np.float32)


@functools.partial(jax.jit, static_argnums=(1, 2))
def count(x, density, fit, stages):
    threshold = _stages.tail_threshold(x, density, fit, stages)
    return jnp.sum(jnp.abs(x) >= threshold)


@pytest.mark.newer_waits
@pytest.mark.parametrize("fit", FITS)
def test_counts_of_the_published_program(fit, every):
    rows = [row for row in json.loads(GOLDEN.read_text()) if row["fit"] == fit]
    assert len(rows) == 120
    if not every:  # This compiles half of the programs.
        rows = [row for row in rows if row["n"] == 65537]
    for row in rows:
        x = vector(row["dist"], row["n"], row["seed"])
        kept = int(count(x, row["ratio"], FITS[fit], row["stages"]))
        assert abs(kept - row["k"]) <= max(3, 0.01 * row["k"]), row


def run(tx, drawn, steps=1):
    simulated = sparsejax.simulate(tx, workers=len(drawn))
    state = simulated.init(jnp.zeros(drawn.shape[1]))
    update = jax.jit(simulated.update)
    for _ in range(steps):
        mean, state = update(drawn, state)
    return np.asarray(mean), state


@pytest.mark.sampled
@pytest.mark.parametrize("fit", list(FITS.values()))
@pytest.mark.parametrize("granularity", ["vector", "leaf"])
def test_vectors_that_no_distribution_fits(fit, granularity):
    rows = {
        "zero": np.zeros(400),
        "constant": np.full(400, -2.0),
        "single": np.eye(400)[17],
        "huge": np.full(400, 3e35) * np.linspace(0.1, 1, 400),
        "tiny": np.linspace(1e-38, 2e-37, 400),
    }
    drawn = np.stack(list(rows.values())).astype(np.float32)
    tx = sparsejax.sidco(0.05, fit, granularity=granularity)
    mean, state = run(tx, drawn, steps=3)
    assert np.isfinite(mean).all()
    report = dict(zip(rows, state.report.demand, strict=True))
    assert report["zero"] == 0
    assert all(report[name] > 0 for name in rows if name != "zero")
    assert report["constant"] > 0
    assert np.isfinite(np.asarray(state.report.threshold)).all()
    assert np.isfinite(np.asarray(state.memory.per_worker)).all()


def test_one_element():
    mean, _ = run(sparsejax.sidco(0.01), np.array([[3.0], [1.0]], np.float32))
    np.testing.assert_array_equal(mean, [2.0])


@pytest.mark.newer_waits
def test_the_number_of_stages_adapts():
    """A heavy tail needs more than one exponential; a fixed number stays."""
    rng = np.random.default_rng(0)
    drawn = (rng.standard_t(3, size=(2, 20_000)) * 1e-3).astype(np.float32)

    def demands(stages, steps):
        tx = sparsejax.simulate(sparsejax.sidco(0.01, stages=stages), workers=2)
        state = tx.init(jnp.zeros(20_000))
        update = jax.jit(tx.update)
        seen, number = [], []
        for t in range(steps):
            _, state = update(np.roll(drawn, 37 * t, axis=1), state)
            seen.append(np.asarray(state.report.demand))
            number.append(np.asarray(state.sparsifier.stages))
        return np.array(seen), np.array(number)

    seen, number = demands(None, 40)
    assert np.all(number[:4] == 1)
    assert number.max() > 1
    assert number.max() <= _fitted.most_stages(0.01) == 7
    changed = np.flatnonzero(np.any(np.diff(number, axis=0) != 0, axis=1)) + 1
    assert np.all(changed % 5 == 4)
    # The mean stays in the range that the controller accepts.
    assert 0.7 < seen[20:].mean() / 200 < 1.3
    _, number = demands(3, 7)
    assert np.all(number == 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fit": "normal"}, "fit: got 'normal', expected one of"),
        ({"stages": 0}, "stages: got 0, expected an int of at least 1"),
        ({"granularity": "row"}, "granularity: got 'row'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        sparsejax.sidco(0.01, **arguments)
