"""Clipping before a recipe, by a norm on which all workers agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.testing._values import flat
from tests.harness import PARAMS, WORKERS, gradients, mesh_of, trainer

CLIP = sparsejax.clip_by_global_norm(1.0)
TX = optax.chain(CLIP, sparsejax.dense())


def expected(drawn):
    """The clipped mean gradient, in numpy."""
    rows = flat(drawn, (WORKERS,))
    norms = np.linalg.norm(rows, axis=1)
    known = np.isfinite(norms)
    norm = np.sqrt(np.mean(norms[known] ** 2))
    return np.where(known[:, None], rows, 0).sum(axis=0) / WORKERS * min(1, 1 / norm)


@pytest.mark.sampled
@pytest.mark.parametrize("view", ["shard_map", "jit", "simulate"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e25])
def test_all_views_scale_all_workers_alike(view, scale):
    made = trainer(TX, view=view)
    drawn = jax.tree.map(lambda g: scale * g, gradients(0))
    _, _, updates = made.advance(*made.start(), drawn)
    np.testing.assert_allclose(flat(updates), expected(drawn), rtol=1e-5, atol=1e-7)
    assert np.linalg.norm(flat(updates)) <= 1 + 1e-6


def test_a_worker_that_is_dropped_does_not_count():
    made = trainer(TX)
    drawn = gradients(0)
    drawn["kernel"][2, 0, 0] = np.nan
    _, state, updates = made.advance(*made.start(), drawn)
    np.testing.assert_allclose(flat(updates), expected(drawn), rtol=1e-5, atol=1e-7)
    assert sparsejax.report(state).dropped[2]


def test_equal_gradients_are_clipped_as_optax_clips_them():
    same = jax.tree.map(lambda g: np.broadcast_to(g[:1], g.shape), gradients(0))
    made = trainer(TX)
    _, _, updates = made.advance(*made.start(), same)
    row = jax.tree.map(lambda g: g[0], same)
    clip = optax.clip_by_global_norm(1.0).update
    wanted, _ = jax.jit(clip)(row, optax.EmptyState())
    np.testing.assert_allclose(flat(updates), flat(wanted), rtol=1e-5, atol=1e-7)


@pytest.mark.sampled
@pytest.mark.parametrize("recipe", [sparsejax.topk, sparsejax.exdyna])
def test_nothing_that_waited_is_thrown_away(recipe):
    """Least squares: clipped before the recipe, the loss is close to dense's."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 32, 200)).astype(np.float32)
    y = x @ rng.normal(size=200).astype(np.float32)

    def final_loss(front, exchange, behind=None):
        tx = optax.chain(front, exchange, behind or optax.identity(), optax.sgd(0.05))
        tx = sparsejax.simulate(tx, workers=8)

        def loss(w, x, y):
            return jnp.mean((x @ w - y) ** 2)

        def step(carry, _):
            w, state = carry
            grads = jax.vmap(jax.grad(loss), (None, 0, 0))(w, x, y)
            updates, state = tx.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), None

        w = jnp.zeros(200)
        run = jax.jit(lambda c: jax.lax.scan(step, c, length=800)[0])
        w, _ = run((w, tx.init(w)))
        return float(jax.vmap(loss, (None, 0, 0))(w, x, y).mean())

    dense = final_loss(CLIP, sparsejax.dense())
    assert final_loss(CLIP, recipe(0.05)) < 1.1 * dense
    late = optax.clip_by_global_norm(1.0)
    assert final_loss(optax.identity(), recipe(0.05), late) > 2 * dense


def test_wrong_places_and_arguments_are_named():
    for wrong in (0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="max_norm: got"):
            sparsejax.clip_by_global_norm(wrong)
    with (
        jax.set_mesh(mesh_of()),
        pytest.raises(ValueError, match=r"averaged already.*leave the clipping out"),
    ):
        CLIP.update(PARAMS, CLIP.init(PARAMS))
