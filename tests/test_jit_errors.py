"""Mistakes under plain `jax.jit`, and the words that name the fix. Nothing compiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import mesh_of

PARAMS = {"w": jnp.ones((6, 4)), "b": jnp.zeros((4,))}
BATCH = (jnp.ones((16, 6)), jnp.ones((16, 4)))


@pytest.fixture(autouse=True)
def _mesh():
    with jax.set_mesh(mesh_of()):
        yield


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"][None] - y) ** 2)


def trace(tx, loss=loss_fn, batch=BATCH, *, gradient=None, **options):
    """Traces one step of the loop."""
    gradient = gradient or sparsejax.value_and_grad(loss, **options)
    state = jax.eval_shape(tx.init, PARAMS)

    def step(params, state, batch):
        _, grads = gradient(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.eval_shape(step, PARAMS, state, batch)


def recipe():
    return sparsejax.exdyna(0.1)


@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.sgd(0.1, momentum=0.9),
        optax.adam(0.1),
        optax.chain(optax.clip_by_global_norm(1.0), recipe()),
        optax.chain(optax.clip(1.0), recipe()),
        optax.chain(optax.add_decayed_weights(1e-4), recipe()),
        optax.chain(optax.trace(0.9), recipe()),
        optax.chain(optax.zero_nans(), recipe()),
        optax.chain(optax.scale_by_adam(), recipe()),
    ],
    ids=["sgd", "momentum", "adam", "norm", "clip", "decay", "trace", "nans", "adam_"],
)
def test_what_stands_before_a_recipe_or_in_its_place(tx):
    with pytest.raises(ValueError, match=r"still local.*per_worker\(\.\.\.\)"):
        trace(tx)


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(optax.scale(0.5), recipe(), optax.adam(0.1)),
        optax.chain(optax.scale_by_learning_rate(0.1), recipe()),
        optax.chain(sparsejax.per_worker(optax.clip_by_global_norm(1.0)), recipe()),
        optax.chain(sparsejax.per_worker(optax.trace(0.9)), recipe()),
        optax.chain(recipe(), optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    ],
)
def test_what_is_right(tx):
    params, _ = trace(tx)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, PARAMS)


def test_averaged_gradients():
    averaged = jax.value_and_grad(loss_fn)
    with pytest.raises(ValueError, match=r"`jax.grad`.*sparsejax.value_and_grad"):
        trace(recipe(), gradient=averaged)


def test_a_batch_that_the_workers_do_not_divide():
    batch = jax.tree.map(lambda x: x[:13], BATCH)
    with pytest.raises(ValueError, match=r"\(13, 6\).*8 workers.*weighted=True"):
        trace(recipe(), batch=batch)
    with pytest.raises(ValueError, match=r"microbatches=3.*does not divide"):
        trace(recipe(), microbatches=3)


def test_no_mesh():
    nothing = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with nothing, pytest.raises(NameError, match=r"mesh is not set.*jax.set_mesh"):
        sparsejax.value_and_grad(loss_fn)(PARAMS, BATCH)
    with pytest.raises(NameError, match=r"'batch'.*has the axes \('data',\)"):
        sparsejax.value_and_grad(loss_fn, axis_name="batch")(PARAMS, BATCH)


def total(params, batch):
    return loss_fn(params, batch) * batch[0].shape[0]


def count(batch):
    return jax.lax.psum(jnp.float32(batch[0].shape[0]), "data") + 0 * batch[0][0, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, b: total(p, b) / count(b),
        lambda p, b: total(p, b) / jnp.maximum(count(b), 1.0),
        lambda p, b: 2 * (total(p, b) * (1 / count(b))),
        jax.jit(lambda p, b: total(p, b) / count(b)),
    ],
)
def test_a_loss_divided_by_the_count_of_all(wrong):
    with pytest.raises(ValueError, match=r"1/w of the global.*weighted=True"):
        trace(recipe(), wrong)


@pytest.mark.parametrize(
    "right",
    [
        lambda p, b: jax.lax.pmean(loss_fn(p, b), "data"),
        lambda p, b: jax.lax.psum(total(p, b), "data") / count(b),
        lambda p, b: loss_fn(p, b) / jax.lax.stop_gradient(1 + jnp.max(b[0])),
    ],
)
def test_collectives_that_are_right(right):
    trace(recipe(), right)


def test_parameters_sharded_over_the_workers_axis():
    mesh = mesh_of()
    w = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"workers' own axis.*'fsdp'.*axis_name"):
        recipe().init({"w": w})
    with pytest.raises(ValueError, match=r"workers' own axis.*'fsdp'.*'replica'"):
        sparsejax.value_and_grad(lambda p, x: jnp.sum(p["w"]) * jnp.mean(x))(
            {"w": w}, jnp.ones(8)
        )


def test_unknown_shardings():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"`\['b'\]`.*with_param_specs\(tx, specs"):
            jax.eval_shape(jax.jit(recipe().init), PARAMS)
        specs = {"w": P(None, "model"), "b": P()}
        told = sparsejax.with_param_specs(optax.chain(recipe(), optax.sgd(0.1)), specs)
        state = jax.eval_shape(told.init, PARAMS)
        assert set(state[0].groups) == {"model", "replicated"}
        prefix = sparsejax.with_param_specs(recipe(), P())
        assert jax.eval_shape(prefix.init, PARAMS).memory.per_worker.shape == (4, 28)


def test_axes_that_shard_nothing():
    mesh = jax.make_mesh((8, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((6, 4)), NamedSharding(mesh, P(None, "model")))
        state = recipe().init({"w": w})
    assert state.memory.per_worker.shape == (8, 24)


def test_constraints_inside_the_loss():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(params, batch):
        sharding = NamedSharding(mesh, spec)
        hidden = jax.lax.with_sharding_constraint(batch[0] @ params["w"], sharding)
        return jnp.mean(hidden)

    def loss_value(params, batch):
        return sparsejax.value_and_grad(loss)(params, batch)[0]

    with jax.set_mesh(mesh):
        spec = P("data", "model")
        with pytest.raises(ValueError, match=r"over \['data'\].*P\(None, 'model'\)"):
            jax.eval_shape(loss_value, PARAMS, BATCH)
        spec = P(None, "model")
        jax.eval_shape(loss_value, PARAMS, BATCH)


def test_arguments_by_keyword_and_by_position():
    gradient = sparsejax.value_and_grad(loss_fn)
    with pytest.raises(TypeError, match="by position"):
        gradient(params=PARAMS, batch=BATCH)

    def weighted(params, batch):
        return loss_fn(params, batch)

    with pytest.raises(TypeError, match=r"pair `\(mean, weight\)`"):
        trace(recipe(), weighted, weighted=True)


def test_local_gradients_in_other_hands():
    _, grads = sparsejax.value_and_grad(loss_fn)(PARAMS, BATCH)
    leaf = grads["w"]
    assert leaf.shape == (6, 4)
    assert leaf.ndim == 2
    assert leaf.size == 24
    assert jnp.zeros_like(leaf).shape == (6, 4)
    rows = sparsejax.rows(grads)["w"].per_worker
    np.testing.assert_array_equal((2 * leaf).rows, 2 * rows)
    np.testing.assert_array_equal((jnp.float32(2) * leaf).rows, 2 * rows)
    np.testing.assert_array_equal((leaf / 2).rows, rows / 2)
    for wrong in (
        lambda: leaf + 1,
        lambda: jnp.sum(leaf),
        lambda: jnp.clip(leaf, 0, 1),
        lambda: leaf.mean(),
        lambda: leaf * leaf,
        lambda: np.asarray(leaf),
        lambda: leaf[0],
        lambda: float(leaf),
    ):
        with pytest.raises(ValueError, match=r"still local"):
            wrong()
    assert not hasattr(leaf, "real")
