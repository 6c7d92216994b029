"""Top-k and CLT-k: the published programs on the recorded stream."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import exchanges
from tests.harness import OPTIMIZED
from tests.reference import gradient_stream

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
N, WORKERS, STEPS, FIRST_STEPS = 131072, 4, 50, 20
K = 1310


@functools.cache
def recorded(every):
    """The facts of both recipes on the stream, by name: one number per step."""
    recipes = {
        "topk": sparsejax.topk(0.01, exchange=exchanges.union()),
        "cltk": sparsejax.cltk(0.01),
    }
    probe = np.random.default_rng(7).standard_normal(N).astype(np.float32)
    states, updates = {}, {}
    options = OPTIMIZED if every else None  # Few steps run too briefly to pay for it.
    for name, tx in recipes.items():
        simulated = sparsejax.simulate(tx, workers=WORKERS)
        states[name] = simulated.init(jnp.zeros(N))
        updates[name] = jax.jit(
            simulated.update, donate_argnums=1, compiler_options=options
        )
    seen = {name: [] for name in recipes}
    steps = STEPS if every else FIRST_STEPS
    for drawn in itertools.islice(gradient_stream(N, WORKERS, STEPS, seed=1), steps):
        for name, update in updates.items():
            mean, states[name] = update(drawn, states[name])
            mean = np.asarray(mean, np.float64)
            rows = np.asarray(states[name].memory.per_worker, np.float64)
            report = states[name].report
            seen[name].append(
                (
                    int(report.sent),
                    np.abs(rows).sum(),
                    np.abs(mean).sum(),
                    mean @ probe,
                    np.linalg.norm(mean) * np.linalg.norm(probe),
                    np.asarray(report.demand),
                )
            )
    return {name: list(zip(*rows, strict=True)) for name, rows in seen.items()}


@pytest.mark.newer_waits
@pytest.mark.xdist_group("topk")
@pytest.mark.parametrize(("name", "slack"), [("topk", 1e-3), ("cltk", 0.0)])
def test_follows_the_published_program(name, slack, every):
    golden = dict(np.load(GOLDEN / f"{name}_w4.npz"))
    meta = json.loads(str(golden.pop("meta")))
    assert (meta["n"], meta["world"], meta["steps"]) == (N, WORKERS, STEPS)
    sent, residual, update, dot, scale, _ = map(np.array, recorded(every)[name])
    golden = {fact: rows[: len(sent)] for fact, rows in golden.items()}
    np.testing.assert_allclose(sent, golden["k"], rtol=slack)
    np.testing.assert_allclose(residual, golden["resid_l1"], rtol=1e-3)
    np.testing.assert_allclose(update, golden["update_l1"], rtol=1e-3)
    assert np.all(np.abs(dot - golden["update_dot"]) < 1e-3 * scale)


@pytest.mark.newer_waits
@pytest.mark.xdist_group("topk")
@pytest.mark.parametrize("name", ["topk", "cltk"])
def test_every_worker_fills_its_message_exactly(name, every):
    demand = np.array(recorded(every)[name][-1])
    assert np.all(demand == K)


def test_selects_the_largest():
    """Ties are cut to k, and zeros are never sent."""
    tx = sparsejax.simulate(sparsejax.topk(0.05), workers=2)
    update = jax.jit(tx.update)
    drawn = np.zeros((2, 100), np.float32)
    drawn[0, [3, 50, 51, 52, 53, 99]] = [1, -9, 8, -7, 6, 5]
    drawn[1, 10:20] = 2.0
    mean, state = update(drawn, tx.init(jnp.zeros(100)))
    expected = drawn[0] / 2
    expected[3] = 0
    np.testing.assert_allclose(np.asarray(mean)[20:], expected[20:])
    assert np.count_nonzero(mean[10:20]) == 5
    np.testing.assert_array_equal(state.report.details.chosen, [5, 5])
    assert state.report.sent == state.report.details.union == 10
    # The second step sends the rest, and the third nothing.
    mean, state = update(np.zeros_like(drawn), state)
    np.testing.assert_allclose(mean[3], 0.5)
    assert np.count_nonzero(mean) == 6


def test_pairs_of_the_same_coordinate_add():
    tx = sparsejax.simulate(sparsejax.topk(0.5), workers=3)
    drawn = np.array([[3.0, 0, 1, 0], [5.0, 0, 0, 2], [1.0, 6, 0, 0]], np.float32)
    mean, state = jax.jit(tx.update)(drawn, tx.init(jnp.zeros(4)))
    np.testing.assert_allclose(mean, drawn.mean(axis=0), rtol=1e-6)
    assert state.report.sent == 4
    assert not np.asarray(state.memory.per_worker).any()


@pytest.mark.parametrize("exchange", [exchanges.pairs, exchanges.union])
def test_build_up(exchange):
    """The delivery of `pairs` grows with the workers, and the report shows this."""
    rng = np.random.default_rng(0)
    drawn = rng.laplace(size=(8, 2000)).astype(np.float32)
    tx = sparsejax.simulate(sparsejax.topk(0.01, exchange=exchange()), workers=8)
    mean, state = jax.jit(tx.update)(drawn, tx.init(jnp.zeros(2000)))
    chosen = np.argsort(-np.abs(drawn), axis=1)[:, :20]
    assert state.report.sent == len(np.unique(chosen)) == np.count_nonzero(mean)
    assert state.report.density == pytest.approx(len(np.unique(chosen)) / 2000)


def test_a_value_width_belongs_to_the_default_exchange():
    with pytest.raises(ValueError, match=r"value_bits: got .* together with .*union"):
        sparsejax.dgc(exchange=exchanges.union(), value_bits=16)
