"""Placement of state: per-worker rows are on their own devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import PARAMS, WORKERS, gradients, mesh_of, trainer

kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
N = sum(p.size for p in PARAMS.values())


def _rows(state):
    return jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, sparsejax.PerWorker))


def _check(state):
    marked = [x for x in _rows(state) if isinstance(x, sparsejax.PerWorker)]
    assert marked
    for leaf in jax.tree.leaves(marked):
        assert leaf.shape == (WORKERS, N)
        assert leaf.sharding.spec[0] in ("data", ("data",))
        for shard in leaf.addressable_shards:
            assert shard.data.shape == (1, N)


@pytest.mark.sampled
@kinds
@pytest.mark.parametrize("how", ["eager", "jit", "init", "nested jit"])
def test_init_shards_per_worker_rows(kind, how):
    tx = optax.chain(sparsejax.exdyna(0.05), optax.sgd(0.1))
    mesh = mesh_of(kind=kind)
    with jax.set_mesh(mesh):
        init = {
            "eager": tx.init,
            "jit": jax.jit(tx.init),
            "nested jit": jax.jit(lambda p: jax.jit(tx.init)(p)),
            "init": lambda p: p,
        }[how]
        state = init(PARAMS)
    if how == "init":
        state = sparsejax.init(tx, PARAMS, mesh)
    _check(state)


@pytest.mark.sampled
@kinds
def test_init_inside_jit(kind):
    """A mesh has to be set outside of `jax.jit`; jax then uses it inside."""
    tx, mesh = sparsejax.exdyna(0.05), mesh_of(kind=kind)
    inside = jax.jit(lambda params: sparsejax.init(tx, params, mesh))
    with pytest.raises(ValueError, match=r"set_mesh\(mesh\): jax\.jit\(tx\.init\)"):
        inside(PARAMS)
    with jax.set_mesh(mesh_of(4, kind)), pytest.raises(ValueError, match="Set it out"):
        inside(PARAMS)
    with jax.set_mesh(mesh):
        _check(inside(PARAMS))


@pytest.mark.sampled
@kinds
def test_init_on_abstract_shapes(kind):
    """The target of a restored checkpoint, without allocation."""
    tx = optax.chain(sparsejax.exdyna(0.05), optax.sgd(0.1))
    mesh = mesh_of(kind=kind)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(tx.init, jax.eval_shape(lambda: PARAMS))
    memory = state[0].memory.per_worker
    assert memory.shape == (WORKERS, N)
    specs = sparsejax.state_specs(state)
    assert specs[0].memory.per_worker == P("data")
    if kind == AxisType.Explicit:
        assert memory.sharding.spec[0] == "data"
    # With the placement by the specs, each device has its own row only.
    placed = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state),
        out_shardings=jax.tree.map(lambda s: jax.NamedSharding(mesh, s), specs),
    )()
    _check(placed)


@pytest.mark.sampled
@kinds
def test_a_step_on_either_kind_of_axis(kind):
    made = trainer(sparsejax.exdyna(0.05), mesh=mesh_of(kind=kind))
    _, state, updates = made.advance(*made.start(), gradients(0))
    assert int(sparsejax.report(state).sent) == int(0.05 * N)
    _check(state)
    other = trainer(sparsejax.exdyna(0.05))
    _, _, expected = other.advance(*other.start(), gradients(0))
    np.testing.assert_array_equal(updates["kernel"], expected["kernel"])


def test_init_inside_the_axis_gives_the_view_of_one_worker():
    tx = sparsejax.micro(0.05)

    def inside(g):
        mine = jax.tree.map(lambda x: x[0], g)
        state = tx.init(PARAMS)
        assert state.memory.per_worker.shape == (1, N)

        def body(state, _):  # the first state is already a legal carry
            updates, state = tx.update(mine, state)
            return state, updates

        state, updates = jax.lax.scan(body, state, length=3)
        return jax.tree.map(lambda u: u.sum(axis=0), updates)

    mapped = jax.shard_map(inside, mesh=mesh_of(), in_specs=P("data"), out_specs=P())
    total = jax.jit(mapped)(gradients(0))
    assert np.isfinite(total["kernel"]).all()


def test_state_specs_find_the_marker_by_path():
    tx = optax.chain(sparsejax.exdyna(0.05), optax.trace(0.9))
    state = sparsejax.init(tx, PARAMS, mesh_of())
    specs = sparsejax.state_specs(state, "data")
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert specs[0].memory.per_worker == P("data")
    assert specs[0].report.threshold == P()
    assert specs[1].trace["bias"] == P()
    # Frameworks that turn states into nested dicts keep the name `per_worker`.
    as_dict = {"0": {"memory": {"per_worker": jnp.zeros(3)}, "step": jnp.zeros(())}}
    assert sparsejax.state_specs(as_dict, ("a", "b")) == {
        "0": {"memory": {"per_worker": P(("a", "b"))}, "step": P()}
    }


NAMED = {"per_worker": jnp.zeros((30, 20)), "bias": jnp.zeros(20)}


@pytest.mark.parametrize("params", [NAMED, {"per_worker": NAMED["per_worker"]}])
def test_parameters_may_be_called_like_markers(params):
    tx = optax.chain(sparsejax.random_k(0.05), optax.adam(0.1))  # quickly compiled
    made = trainer(tx, params)
    specs = sparsejax.state_specs(made.state)
    assert specs[0].memory.per_worker == P("data")
    assert specs[1][0].mu["per_worker"] == P()
    _, state, _ = made.advance(*made.start(), gradients(0, params=params))
    smaller = sparsejax.resize_workers(tx, state, params, mesh_of(4))
    np.testing.assert_array_equal(
        smaller[1][0].mu["per_worker"], state[1][0].mu["per_worker"]
    )


def test_of_dicts_those_of_one_entry_are_markers():
    tx = optax.chain(sparsejax.exdyna(0.05), optax.adam(0.1))
    state = sparsejax.init(tx, NAMED, mesh_of())
    restored = serialization.to_state_dict({"params": NAMED, "state": state})
    specs = sparsejax.state_specs(restored)
    assert specs["state"]["0"]["memory"]["per_worker"] == P("data")
    assert specs["state"]["1"]["0"]["mu"]["per_worker"] == P()
    assert specs["params"]["per_worker"] == P()


def test_per_worker_momentum_is_local():
    """Local momentum differs between workers and equals optax's on each of them."""
    tx = optax.chain(sparsejax.per_worker(optax.trace(decay=0.9)), sparsejax.dense())
    made = trainer(tx)
    params, state = made.start()
    total = None
    for t in range(3):
        drawn = gradients(t)
        params, state, updates = made.advance(params, state, drawn)
        total = (
            drawn if total is None
            else jax.tree.map(lambda m, g: 0.9 * m + g, total, drawn)
        )  # fmt: skip
    traces = state[0].per_worker.trace["kernel"]
    assert traces.shape == (WORKERS, 30, 20)
    np.testing.assert_allclose(traces, total["kernel"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        updates["kernel"], total["kernel"].mean(axis=0), rtol=1e-5, atol=1e-5
    )


def test_localize_is_idempotent_and_keeps_values():
    def inside(x):
        once = sparsejax.localize({"x": x})
        twice = sparsejax.localize(once)
        assert jax.typeof(twice["x"]) == jax.typeof(once["x"])
        return twice["x"][None]

    out = jax.shard_map(inside, mesh=mesh_of(), in_specs=P(), out_specs=P("data"))
    np.testing.assert_array_equal(out(jnp.arange(3.0)), [[0, 1, 2]] * WORKERS)


def test_value_and_grad_with_aux_and_argnums():
    def loss(scale, w, x):
        return jnp.sum(scale * w * x), x

    def inside(w, x):
        (value, aux), grads = sparsejax.value_and_grad(
            loss, argnums=(0, -2), has_aux=True
        )(2.0, w, x[0])
        return jax.tree.map(lambda v: v[None], (value, aux, grads))

    x = jnp.arange(16.0).reshape(8, 2)
    value, aux, (by_scale, by_w) = jax.shard_map(
        inside, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P("data")
    )(jnp.ones(2), x)
    np.testing.assert_allclose(value, 2 * x.sum(axis=1))
    np.testing.assert_array_equal(aux, x)
    np.testing.assert_allclose(by_scale, x.sum(axis=1))
    np.testing.assert_allclose(by_w, 2 * x)
