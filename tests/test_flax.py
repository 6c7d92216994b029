"""Linen's TrainState and nnx's Optimizer: the place of their state, and one step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx, serialization
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import WORKERS, mesh_of

kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
FEATURES, OUTPUTS = 12, 5
N = FEATURES * OUTPUTS + OUTPUTS
TX = optax.chain(sparsejax.exdyna(0.1), optax.sgd(0.5, momentum=0.9))


def _batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(4 * WORKERS, FEATURES)).astype(np.float32)


def _zeros():
    shapes = {"kernel": (FEATURES, OUTPUTS), "bias": OUTPUTS}
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _check_rows(leaf):
    (leaf,) = jax.tree.leaves(leaf)  # nnx may wrap the array
    assert leaf.shape == (WORKERS, N)
    assert leaf.sharding.spec[0] in ("data", ("data",))
    assert {s.data.shape for s in leaf.addressable_shards} == {(1, N)}
    assert len({s.device for s in leaf.addressable_shards}) == WORKERS


def _linen_state(mesh, how):
    model = linen.Dense(OUTPUTS)
    params = jax.tree.map(jnp.asarray, _zeros())

    def create(params):
        return TrainState.create(apply_fn=model.apply, params=params, tx=TX)

    with jax.set_mesh(mesh):
        made = jax.jit(create) if how == "jit" else create
        return made(params)


@kinds
@pytest.mark.parametrize("how", ["eager", "jit"])
def test_train_state(kind, how):
    mesh = mesh_of(kind=kind)
    state = _linen_state(mesh, how)
    _check_rows(state.opt_state[0].memory.per_worker)
    specs = sparsejax.state_specs(state)
    assert specs.opt_state[0].memory.per_worker == P("data")
    assert specs.params["kernel"] == P()
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda p: TX.init(p), state.params)
    assert shapes[0].memory.per_worker.shape == (WORKERS, N)


def _loss(kernel, bias, x):
    return jnp.mean((x @ kernel + bias[None] - 1.0) ** 2)


@jax.jit
def _plain_step(params, x):
    """The first step by hand, for all workers on one device."""
    tx = sparsejax.simulate(TX, workers=WORKERS)
    grads = jax.vmap(
        jax.grad(lambda p, x: _loss(p["kernel"], p["bias"], x)), in_axes=(None, 0)
    )(params, x.reshape(WORKERS, -1, FEATURES))
    updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


@kinds
def test_linen_step(kind):
    mesh = mesh_of(kind=kind)
    state = _linen_state(mesh, "eager")
    specs = sparsejax.state_specs(state)

    def step(state, x):
        def loss(params):
            return _loss(params["kernel"], params["bias"], x)

        _, grads = sparsejax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs
    )
    x = jax.device_put(_batch(), jax.NamedSharding(mesh, P("data")))
    after = jax.jit(mapped)(state, x)
    _check_rows(after.opt_state[0].memory.per_worker)
    assert sparsejax.report(after).sent == int(0.1 * N)
    expected = _plain_step(_zeros(), _batch())
    np.testing.assert_allclose(
        after.params["kernel"], expected["kernel"], rtol=1e-5, atol=1e-6
    )


def _nnx_objects(mesh):
    with jax.set_mesh(mesh):
        model = nnx.Linear(
            FEATURES,
            OUTPUTS,
            kernel_init=nnx.initializers.zeros,
            rngs=nnx.Rngs(0),
        )
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


@kinds
def test_nnx_keeps_the_marker(kind):
    mesh = mesh_of(kind=kind)
    model, optimizer = _nnx_objects(mesh)
    _check_rows(optimizer.opt_state[0].memory.per_worker)
    graphdef, state = nnx.split((model, optimizer))
    specs = sparsejax.state_specs(state)
    flat_specs = jax.tree_util.tree_leaves_with_path(specs)
    marked = [jax.tree_util.keystr(path) for path, spec in flat_specs if spec != P()]
    assert len(marked) == 1
    assert "per_worker" in marked[0]
    _, merged = nnx.merge(graphdef, state)
    assert isinstance(merged.opt_state[0].memory, sparsejax.PerWorker)
    assert isinstance(merged.opt_state[0], sparsejax.SparsifyState)
    _check_rows(merged.opt_state[0].memory.per_worker)
    report = sparsejax.report(merged.opt_state)
    assert isinstance(report.sent, jax.Array)
    assert sparsejax.log_row(report)["sent"] == 0


@kinds
def test_nnx_step(kind):
    mesh = mesh_of(kind=kind)
    graphdef, state = nnx.split(_nnx_objects(mesh))
    specs = sparsejax.state_specs(state)

    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)

        def loss(params):
            return _loss(params["kernel"][...], params["bias"][...], x)

        _, grads = sparsejax.value_and_grad(loss)(nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs
    )
    x = jax.device_put(_batch(), jax.NamedSharding(mesh, P("data")))
    after = jax.jit(mapped)(state, x)
    model, optimizer = nnx.merge(graphdef, after)
    _check_rows(optimizer.opt_state[0].memory.per_worker)
    expected = _plain_step(_zeros(), _batch())
    np.testing.assert_allclose(
        model.kernel[...], expected["kernel"], rtol=1e-5, atol=1e-6
    )


@kinds
def test_nnx_jit_of_the_constructor(kind):
    mesh = mesh_of(kind=kind)

    @nnx.jit
    def make():
        model = nnx.Linear(FEATURES, OUTPUTS, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, TX, wrt=nnx.Param)

    with jax.set_mesh(mesh):
        _, optimizer = make()
    _check_rows(optimizer.opt_state[0].memory.per_worker)


def test_reports_in_a_split_state():
    """nnx turns reports into dicts; `report` returns the same reports."""
    tx = optax.chain(sparsejax.zen(1.0), sparsejax.dense())
    with jax.set_mesh(mesh_of()):
        model = nnx.Linear(FEATURES, OUTPUTS, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    _, state = nnx.split((model, optimizer))
    expected = sparsejax.reports(optimizer.opt_state)
    found = sparsejax.reports(state)
    assert len(found) == len(expected) == 2
    for mine, theirs in zip(found.values(), expected.values(), strict=True):
        assert sparsejax.log_row(mine) == sparsejax.log_row(theirs)
    first, second = found.values()
    assert first.details.overflow == 0
    assert second.details == ()
    restored = serialization.to_state_dict(optimizer.opt_state)
    assert list(sparsejax.reports(restored)) == ["['0']['report']", "['1']['report']"]
    assert sparsejax.reports(nnx.state(model)) == {}


def test_parameters_of_nnx_may_be_called_like_markers():
    class Model(nnx.Module):
        def __init__(self):
            self.per_worker = nnx.Param(jnp.zeros((FEATURES, OUTPUTS)))
            self.bias = nnx.Param(jnp.zeros(OUTPUTS))

    with jax.set_mesh(mesh_of()):
        model = Model()
        state = nnx.split((model, nnx.Optimizer(model, TX, wrt=nnx.Param)))[1]
    specs = jax.tree_util.tree_leaves_with_path(sparsejax.state_specs(state))
    marked = [jax.tree_util.keystr(path) for path, spec in specs if spec != P()]
    assert len(marked) == 1
    assert "['memory']['per_worker']" in marked[0]
