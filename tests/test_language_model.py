"""The language model in shards learns as on one device, dense or sparse."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.examples import _cluster, language_model
from sparsejax.examples._training import Trainer, place

pytestmark = pytest.mark.newer_waits

SIZE = language_model.Size(width=16, heads=2, layers=1, context=8, batch=16)
STEPS = 20


@functools.cache
def task():
    return language_model.make_task(SIZE)


@functools.cache
def trained(name):
    mesh = _cluster.make_mesh(8, task().placement.axes)
    assert dict(mesh.shape) == {"replica": 2, "fsdp": 2, "model": 2}
    trainer = Trainer(task(), language_model.RECIPES[name].build(0.05), mesh, STEPS)
    return trainer.run(0, lambda metrics: None)


def test_dense_is_the_mean_gradient_on_one_device():
    tx, params = task().optimizer(STEPS), task().init(0)
    state, batches = tx.init(params), task().batches(0, SIZE.batch)

    @jax.jit
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(task().loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, next(batches))
        losses.append(loss)
    np.testing.assert_allclose(trained("dense").loss, losses, rtol=1e-5)


def test_exdyna_lowers_the_loss():
    run = trained("exdyna")
    assert run.loss[-5:].mean() < run.loss[0] - 0.1
    assert run.density[1:].mean() == pytest.approx(0.05, rel=0.5)
    assert not run.overflow


def test_a_device_receives_shards_of_what_changes():
    """No sharded array is sent whole from one replica to the other."""
    mesh = _cluster.make_mesh(8, task().placement.axes)
    params = place(task().init(0), task().placement, mesh)
    sizes = [x.size for x in jax.tree.leaves(params)]
    moved = sparsejax.wire_bytes(
        sparsejax.dense(axis_name="replica"), params, workers=2, axis_name="replica"
    )
    # A quarter of the model, and the few scales that all shards hold.
    assert sum(sizes) <= moved.total <= 1.1 * sum(sizes) + 4 * 3 * SIZE.width


@pytest.mark.parametrize("name", language_model.RECIPES)
def test_planned_bytes_are_those_of_the_compiled_exchange(name):
    mesh = _cluster.make_mesh(8, task().placement.axes)
    params = place(task().init(0), task().placement, mesh)
    tx = language_model.RECIPES[name].build(0.05)
    with jax.set_mesh(mesh):
        rows = jax.tree.map(two_rows, params, task().placement.specs)
        program = jax.jit(tx.update).lower(rows, tx.init(params)).compile()
    planned = sparsejax.wire_bytes(tx, params, workers=2, axis_name="replica")
    measured = sparsejax.compiled_wire_bytes(program)
    assert (measured.total, measured.least) == (planned.total, planned.least)
    assert measured.by_kind == planned.by_kind


def two_rows(leaf, spec):
    """Gradients of two replicas, of the shape and sharding of a parameter."""
    sharding = jax.NamedSharding(leaf.sharding.mesh, jax.P("replica", *spec))
    shape = (2, *leaf.shape)
    return sparsejax.PerWorker(jax.device_put(np.ones(shape, "f"), sharding))
