"""Loops with `jax.pmap` over a replicated `TrainState`, as in flax and haiku."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, serialization
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.cases import RECIPES, param
from tests.harness import WORKERS, mesh_of

SHAPES = {"w": (6, 8), "v": (8, 4), "b": (8,)}
DRAWN = np.random.default_rng(0)
PARAMS = {k: DRAWN.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}
BATCHES = DRAWN.normal(size=(6, WORKERS, 2, 10)).astype(np.float32)
TRAINED = ("exdyna", "topk", "marsit")


def loss_fn(params, batch):
    x, y = batch[:, :6], batch[:, 6:]
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


@functools.cache
def made(recipe):
    chain = (recipe(axis_name="batch"), optax.sgd(0.1, momentum=0.9))
    return optax.chain(
        sparsejax.per_worker(optax.trace(0.5), axis_name="batch"), *chain
    )


def start(tx):
    """The `TrainState` of a `jax.pmap` loop, made without a mesh."""
    opt_state = sparsejax.init(tx, PARAMS, workers=WORKERS, axis_name="batch")
    state = TrainState(step=0, apply_fn=None, params=PARAMS, tx=tx, opt_state=opt_state)
    return jax_utils.replicate(state)


def step(state, batch):
    """The step of a `jax.pmap` loop, without its `pmean` of the gradients."""
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "batch")


def marked_step(state, batch):
    loss, grads = sparsejax.value_and_grad(loss_fn, axis_name="batch")(
        state.params, batch
    )
    return state.apply_gradients(grads=grads), jax.lax.pmean(loss, "batch")


def parallel(step):
    return jax.pmap(step, axis_name="batch")


def train(pstep, state, steps):
    for batch in BATCHES[steps]:
        state, _ = jax.block_until_ready(pstep(state, batch))
    return state


@functools.cache
def trained(recipe):
    """A compiled step, and the state after four steps."""
    pstep = parallel(step)
    return pstep, train(pstep, start(made(recipe)), slice(0, 4))


def manual(tx):
    """The same four steps under `jax.shard_map`."""
    mesh = jax.sharding.Mesh(mesh_of().devices, ("batch",))
    state = sparsejax.init(tx, PARAMS, mesh)
    specs = (P(), sparsejax.state_specs(state, "batch"))

    def local(params, state, batch):
        _, grads = sparsejax.value_and_grad(loss_fn, axis_name="batch")(
            params, batch[0]
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(*specs, P("batch")), out_specs=specs)
    )
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    for batch in BATCHES[:4]:
        params, state = jax.block_until_ready(mapped(params, state, batch))
    return params, state


@pytest.mark.parametrize("case", [param(c) for c in RECIPES if c.name in TRAINED])
def test_equals_the_shard_map_loop(case):
    state = jax.device_get(trained(case.make)[1])
    params, opt_state = jax.device_get(manual(made(case.make)))
    for leaf in jax.tree.leaves(state.params):
        assert all(row.tobytes() == leaf[0].tobytes() for row in leaf)
    mine = (jax_utils.unreplicate(state.params), state.opt_state[1].memory[0][:, 0])
    theirs = (params, opt_state[1].memory[0])
    chex.assert_trees_all_close(mine, theirs, atol=1e-6, rtol=0)
    assert np.ptp(mine[1], axis=0).any()  # each worker keeps its own residual


@pytest.mark.parametrize("case", [param(c) for c in RECIPES])
def test_every_recipe_traces(case):
    state = start(made(case.make))
    for traced in (step, marked_step):
        new, loss = jax.eval_shape(parallel(traced), state, BATCHES[0])
        assert loss.shape == (WORKERS,)
        assert jax.tree.structure(new) == jax.tree.structure(state)


EXDYNA = next(case.make for case in RECIPES if case.name == "exdyna")


def test_init_names_the_call_for_pmap():
    with pytest.raises(NameError, match=r"pmap.*workers=.*axis_name='batch'"):
        TrainState.create(apply_fn=None, params=PARAMS, tx=made(EXDYNA))


def test_all_of_the_state_can_be_saved():
    """Training continues from [w, 1, ...] with bitwise the same result."""
    pstep, state = trained(EXDYNA)
    expected = train(pstep, state, slice(4, 6))
    restored = serialization.from_bytes(
        start(made(EXDYNA)), serialization.to_bytes(state)
    )
    again = train(pstep, restored, slice(4, 6))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_one_copy_with_the_mean_residual():
    """Replaces `unreplicate`: saves one copy, and loses no pending gradient."""
    pstep, state = trained(EXDYNA)
    tx, params = made(EXDYNA), jax_utils.unreplicate(state.params)
    one = sparsejax.resize_workers(
        tx, state.opt_state, params, workers=WORKERS, axis_name="batch"
    )
    fresh = jax_utils.unreplicate(start(tx))
    saved = jax_utils.unreplicate(state).replace(opt_state=one)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(saved))
    rows = np.asarray(state.opt_state[1].memory.per_worker)
    np.testing.assert_allclose(
        restored.opt_state[1].memory.per_worker, rows.mean(axis=0), atol=1e-6
    )
    assert int(restored.step) == int(restored.opt_state[1].step) == 4
    train(pstep, jax_utils.replicate(restored), slice(4, 5))


def test_resize_from_pmap_to_a_mesh():
    _, state = trained(EXDYNA)
    mesh = jax.sharding.Mesh(mesh_of().devices, ("batch",))
    tx, params = made(EXDYNA), jax_utils.unreplicate(state.params)
    for opt_state in (state.opt_state, jax.device_get(state.opt_state)):
        placed = sparsejax.resize_workers(tx, opt_state, params, mesh)
        for mine, theirs in (
            (placed[0].per_worker.trace["w"], state.opt_state[0].per_worker.trace["w"]),
            (placed[1].memory.per_worker, state.opt_state[1].memory.per_worker),
        ):
            np.testing.assert_array_equal(mine, np.asarray(theirs)[:, 0])
        np.testing.assert_array_equal(
            placed[2][0].trace["v"], state.opt_state[2][0].trace["v"][0]
        )


@pytest.mark.parametrize("kind", ["unreplicated", "out_axes", "out_specs"])
def test_one_workers_state_is_refused(kind):
    """The state of one worker looks replicated, but has the residual of one worker."""
    _, state = trained(EXDYNA)
    tx, params = made(EXDYNA), jax_utils.unreplicate(state.params)
    mesh = jax.sharding.Mesh(mesh_of().devices, ("batch",))
    if kind == "unreplicated":
        one = jax_utils.unreplicate(state).opt_state
    elif kind == "out_specs":
        placed = sparsejax.resize_workers(tx, state.opt_state, params, mesh)
        one = _handed_out_as_replicated(placed, mesh)
    else:
        looks = jax.pmap(
            lambda state, batch: step(state, batch)[0].opt_state,
            axis_name="batch",
            out_axes=None,
        )
        one = looks(state, BATCHES[4])
    if kind != "unreplicated":
        with pytest.raises(
            ValueError, match=r"per_worker.*differ.*out_axes=0.*state_specs"
        ):
            sparsejax.check_replicas(one, mesh)
    for host in (one, jax.device_get(one)):
        with pytest.raises(
            ValueError, match=r"1 of the residuals of 8.*out_axes=0.*state_specs"
        ):
            sparsejax.resize_workers(tx, host, params, mesh)


def _handed_out_as_replicated(state, mesh):
    """Each device keeps its own row, as `out_specs=P()` without types allows."""
    specs = sparsejax.state_specs(state, "batch")
    options = {"in_specs": (specs,), "out_specs": P(), "check_vma": False}
    return jax.jit(jax.shard_map(lambda state: state, mesh=mesh, **options))(state)
