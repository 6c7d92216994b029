"""A model axis next to that of the workers: automatic, or manual with `per_shard`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import flat
from tests.mesh_training import (
    AUTO,
    EXPLICIT,
    assert_close,
    batch_of,
    kinds,
    loss_of,
    make_mesh,
    make_tx,
    reference,
    start_params,
    train,
)


@pytest.mark.sampled
@kinds
@pytest.mark.parametrize("model", [AUTO, EXPLICIT])
def test_automatic_model_axis(kind, model):
    """Manual over "data" only; the compiler shards over "model"."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, model))
    tx = make_tx("data")
    with jax.set_mesh(mesh):
        state = tx.init(start_params())

        def step(params, state, x):
            _, grads = sparsejax.value_and_grad(loss_of)(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        specs = sparsejax.state_specs(state)
        params, state = train(
            step, mesh, start_params(), state, specs, "data", axis_names={"data"}
        )
    memory = state[0].memory.per_worker
    assert all(s.data.shape[0] == 1 for s in memory.addressable_shards)
    assert_close(params, reference(make_tx("data"), 4)[0])


PARAM_SPECS = {"w1": P(None, "model"), "w2": P("model", None)}


def _sharded(mesh, specs=PARAM_SPECS):
    return jax.tree.map(
        lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)),
        start_params(),
        specs,
    )


def _loss_of_shard(params, x):
    """Column-parallel, then row-parallel layers; sums the shards' parts of outputs."""
    outputs = jnp.tanh(x @ params["w1"]) @ params["w2"]
    return jnp.mean((jax.lax.psum(outputs, "model") - 1.0) ** 2)


def _model_step(tx):
    def step(params, state, x):
        _, grads = sparsejax.value_and_grad(_loss_of_shard)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.sampled
@kinds
@pytest.mark.parametrize("nonfinite", ["drop", "propagate"])
def test_manual_model_axis(kind, nonfinite):
    """Each shard is sparsified separately, among the workers that hold this shard."""
    mesh = make_mesh((4, 2), ("data", "model"), kind)
    tx = sparsejax.per_shard(
        optax.chain(
            sparsejax.exdyna(0.1, nonfinite=nonfinite), optax.sgd(0.5, momentum=0.9)
        )
    )
    state = sparsejax.init(tx, _sharded(mesh), mesh)
    specs = sparsejax.state_specs(state)
    inner = state.per_shard
    assert inner[0].memory.per_worker.shape == (2, 4, 60)
    assert specs.per_shard[0].memory.per_worker == P("model", "data")
    assert specs.per_shard[0].step == P("model")
    shards = inner[0].memory.per_worker.addressable_shards
    assert all(s.data.shape == (1, 1, 60) for s in shards)
    assert inner[1][0].trace["w1"].shape == (2, 6, 6)
    params, state = train(
        _model_step(tx),
        mesh,
        _sharded(mesh),
        state,
        specs,
        "data",
        param_specs=PARAM_SPECS,
    )
    report = sparsejax.report(state)
    np.testing.assert_array_equal(report.sent, [6, 6])
    sparsejax.check_replicas((params, state), mesh)
    assert_close(params, _manual_reference())


def test_a_manual_axis_of_one_device_shards_nothing():
    """Specifications may name it, without `per_shard` and with types."""
    mesh = make_mesh((4, 1), ("data", "model"), devices=jax.devices()[:4])
    tx = make_tx("data")
    state = sparsejax.init(tx, _sharded(mesh), mesh)
    specs = sparsejax.state_specs(state)
    step = _model_step(tx)
    params, state = train(
        step, mesh, _sharded(mesh), state, specs, "data", param_specs=PARAM_SPECS
    )
    assert_close(params, reference(make_tx("data"), 4)[0])


@functools.cache
def _manual_reference():
    """Two simulated groups of four, one for each half of the model."""
    tx = optax.chain(sparsejax.exdyna(0.1), optax.sgd(0.5, momentum=0.9))
    tx = sparsejax.simulate(tx, workers=4)
    params = start_params()

    def half(tree, i):  # of the hidden units
        return {
            "w1": jnp.split(tree["w1"], 2, axis=-1)[i],
            "w2": jnp.split(tree["w2"], 2, axis=-2)[i],
        }

    gradients = jax.jit(jax.vmap(jax.grad(loss_of), in_axes=(None, 0)))
    states = [tx.init(half(params, i)) for i in range(2)]
    for t in range(4):
        grads = gradients(params, batch_of(t).reshape(4, -1, 6))
        halves = []
        for i in range(2):
            mine = half(params, i)
            updates, states[i] = tx.update(half(grads, i), states[i], mine)
            halves.append(optax.apply_updates(mine, updates))
        params = {
            "w1": jnp.concatenate([h["w1"] for h in halves], axis=1),
            "w2": jnp.concatenate([h["w2"] for h in halves], axis=0),
        }
    return params


def test_init_of_shards_inside_the_axes():
    mesh = make_mesh((4, 2), ("data", "model"))
    tx = sparsejax.per_shard(sparsejax.micro(0.1))

    def inside(params, x):
        state = tx.init(params)
        assert state.per_shard.memory.per_worker.shape == (1, 1, 60)
        step = _model_step(tx)

        def body(carry, _):  # the first state is already a legal carry
            return step(*carry, x), None

        (params, _), _ = jax.lax.scan(body, (params, state), length=3)
        return params

    mapped = jax.shard_map(
        inside,
        mesh=mesh,
        in_specs=(PARAM_SPECS, P("data")),
        out_specs=PARAM_SPECS,
    )
    params = jax.jit(mapped)(_sharded(mesh), batch_of(0))
    assert np.isfinite(flat(params)).all()


def test_leaf_sharded_over_an_automatic_axis():
    """`init` makes a state for plain `jax.jit`; a manual loop has to bind the axis."""
    tx = sparsejax.exdyna(0.1)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, EXPLICIT))

    def traced(state, gradients):
        mapped = jax.shard_map(
            lambda g, s: tx.update(sparsejax.localize(g), s),
            mesh=mesh,
            in_specs=(P(), sparsejax.state_specs(state)),
            out_specs=(P(), sparsejax.state_specs(state)),
            axis_names={"data"},
        )
        with jax.set_mesh(mesh):
            jax.eval_shape(mapped, gradients, state)

    whole = sparsejax.init(tx, start_params(), mesh)
    message = r"update: the leaf `\['w1'\]` is sharded over \['model'\].*per_shard\("
    with pytest.raises(ValueError, match=message):
        traced(whole, _sharded(mesh))
    sharded = sparsejax.init(tx, _sharded(mesh), mesh)
    assert sharded.groups["model"].per_shard.memory.per_worker.shape[:2] == (2, 4)
    gradients = jax.tree.map(lambda x: jnp.zeros(x.shape), _sharded(mesh))
    with pytest.raises(
        (NameError, ValueError), match=r"sharded over|refers to 'model'"
    ):
        traced(sharded, gradients)


def test_parameters_that_all_shards_share():
    mesh = make_mesh((4, 2), ("data", "model"))
    specs = PARAM_SPECS | {"bias": P()}
    params = _sharded(mesh) | {"bias": jax.device_put(jnp.zeros(4))}
    alone = sparsejax.per_shard(sparsejax.exdyna(0.1))
    with pytest.raises(ValueError, match=r"`\['bias'\]` is not known.*partition"):
        sparsejax.init(alone, params, mesh)

    def loss(params, x):
        outputs = jnp.tanh(x @ params["w1"]) @ params["w2"]
        outputs = jax.lax.psum(outputs, "model") + params["bias"][None]
        return jnp.mean((outputs - 1.0) ** 2)

    def gradients(params, x):
        return sparsejax.value_and_grad(loss)(params, x)[1]

    with pytest.raises(ValueError, match=r"`\['bias'\]` are typed as equal.*partition"):
        jax.eval_shape(
            jax.shard_map(
                lambda p, x: alone.update(gradients(p, x), alone.init(p))[0],
                mesh=mesh,
                in_specs=(specs, P("data")),
                out_specs=specs,
            ),
            params,
            batch_of(0),
        )
    tx = optax.chain(
        optax.partition(
            {"sharded": alone, "shared": sparsejax.exdyna(0.1)},
            {"w1": "sharded", "w2": "sharded", "bias": "shared"},
        ),
        optax.sgd(0.5),
    )
    state = sparsejax.init(tx, params, mesh)

    def step(params, state, x):
        updates, state = tx.update(gradients(params, x), state, params)
        return optax.apply_updates(params, updates), state

    trained, state = train(
        step, mesh, params, state, sparsejax.state_specs(state), "data",
        steps=12, param_specs=specs,
    )  # fmt: skip
    sparsejax.check_replicas((trained, state), mesh)
    assert np.abs(trained["bias"]).max() > 0


def test_shards_unknown_under_jit():
    mesh = make_mesh((4, 2), ("data", "model"))
    tx = sparsejax.per_shard(sparsejax.exdyna(0.1))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"outside `jax\.jit`"):
        jax.jit(tx.init)(_sharded(mesh))
    with pytest.raises(ValueError, match="per_shard: no axes"):
        tx.init(start_params())
    explicit = make_mesh((4, 2), ("data", "model"), EXPLICIT)
    with jax.set_mesh(explicit):
        state = jax.jit(tx.init)(_sharded(explicit))
    assert state.per_shard.memory.per_worker.shape == (2, 4, 60)


def test_all_of_a_chain_belongs_in_per_shard():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(None, "model"))
    params = {"w": jax.device_put(jnp.zeros((20, 6)), sharding)}
    tx = optax.chain(sparsejax.per_shard(sparsejax.exdyna(0.1)), optax.adam(0.1))
    state = sparsejax.init(tx, params, mesh)
    with pytest.raises(ValueError, match=r"mu\['w'\]`.*per_shard\(optax\.chain"):
        sparsejax.state_specs(state)
