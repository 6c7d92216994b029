"""Gradients of 64 bits: `dense` keeps all bits, and every other recipe refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from tests.cases import RECIPES, parametrize
from tests.harness import WORKERS, mesh_of

# The first leaf is wide; 1e38 is too large for a sum in float32, and 1e-40 too small.
ROWS = {
    "wide": np.random.default_rng(0).normal(size=(WORKERS, 5)),
    "edges": np.tile(np.array([1e38, 1e-40, 1 + 1e-15]), (WORKERS, 1)),
    "float32": np.arange(WORKERS, dtype=np.float32)[:, None],
}
PARAMS = jax.tree.map(lambda x: np.zeros_like(x[0]), ROWS)


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True), jax.set_mesh(mesh_of()):
        yield


@pytest.mark.parametrize("nonfinite", ["drop", "propagate"])
def test_dense_averages_in_float64(nonfinite):
    tx = sparsejax.dense(nonfinite=nonfinite)
    rows = jax.tree.map(lambda x: sparsejax.PerWorker(jnp.asarray(x)), ROWS)
    updates, state = jax.jit(tx.update)(rows, tx.init(PARAMS))
    simulated = sparsejax.simulate(tx, workers=WORKERS)
    others, _ = simulated.update(ROWS, simulated.init(PARAMS), PARAMS)
    for name, drawn in ROWS.items():
        for mine in (updates[name], others[name]):
            assert mine.dtype == drawn.dtype
            np.testing.assert_allclose(mine, drawn.mean(axis=0), rtol=1e-15)
    assert not sparsejax.report(state).dropped.any()


@parametrize(case for case in RECIPES if case.name != "dense")
def test_other_recipes_refuse_float64(case):
    tx = sparsejax.simulate(case.make(), workers=WORKERS)
    state = jax.eval_shape(tx.init, PARAMS)
    message = r"`\['edges'\]`, `\['wide'\]` are float64.*per_worker.*tree\.cast.*dense"
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(tx.update, ROWS, state, PARAMS)


def test_the_cast_that_the_error_names():
    cast = optax.stateless(lambda grads, _: optax.tree.cast(grads, "float32"))
    tx = optax.chain(sparsejax.per_worker(cast), sparsejax.topk(1.0), optax.sgd(1.0))

    @jax.jit
    def step(params, state, batch):
        _, grads = sparsejax.value_and_grad(lambda p, b: jnp.mean(p) * b[0])(
            params, batch
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.zeros(3)
    made, _ = step(params, tx.init(params), jnp.arange(float(WORKERS)))
    assert made.dtype == jnp.float64
    np.testing.assert_allclose(made, -3.5 / 3, rtol=1e-6)


def test_weights_of_float64_losses():
    """A weight is not rounded to float32: 2^24 and one token more differ."""
    weights = 2.0**24 + np.arange(WORKERS)

    def loss(params, weight):
        return jnp.sum(params * weight), weight[0]

    weighted = sparsejax.value_and_grad(loss, weighted=True)
    mean, _ = weighted(jnp.ones(1), jnp.asarray(weights))
    np.testing.assert_allclose(mean, np.average(weights, weights=weights), rtol=1e-15)
