"""Meshes with more than one axis of workers, and axes of either kind."""

from __future__ import annotations

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.mesh_training import (
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
def test_tuple_of_axes_is_one_axis(kind):
    """("host", "local") exchanges over all eight, in major order."""
    mesh, axes = make_mesh((2, 4), ("host", "local"), kind), ("host", "local")
    tx = make_tx(axes)
    state = sparsejax.init(tx, start_params(), mesh)
    memory = state[0].memory.per_worker
    assert memory.shape == (8, 120)
    assert all(s.data.shape == (1, 120) for s in memory.addressable_shards)

    def step(params, state, x):
        _, grads = sparsejax.value_and_grad(loss_of, axis_name=axes)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = train(
        step, mesh, start_params(), state, sparsejax.state_specs(state, axes), axes
    )
    expected, other = reference(make_tx("data"), 8)
    assert_close(params, expected)
    assert_close(state[0].memory.per_worker, other[0].memory.per_worker)


@pytest.mark.sampled
@kinds
def test_two_level_cluster(kind):
    """A dense mean inside each host, a sparse exchange between hosts."""
    mesh, axes = make_mesh((4, 2), ("host", "local"), kind), ("host", "local")
    tx = make_tx("host")
    state = sparsejax.init(tx, start_params(), mesh)
    memory = state[0].memory.per_worker
    assert memory.shape == (4, 120)
    assert all(s.data.shape == (1, 120) for s in memory.addressable_shards)

    def step(params, state, x):
        # Both axes are named, so `grad` sums over neither of them.
        _, grads = sparsejax.value_and_grad(loss_of, axis_name=axes)(params, x)
        grads = jax.lax.pmean(grads, "local")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = train(
        step, mesh, start_params(), state, sparsejax.state_specs(state, "host"), axes
    )
    expected, other = reference(make_tx("data"), 4)
    assert_close(params, expected)
    assert_close(state[0].memory.per_worker, other[0].memory.per_worker)
    sparsejax.check_replicas((params, state), mesh)


def _two_level_step(mesh, value_and_grad_axes, pmean):
    tx = make_tx("host")
    state = sparsejax.init(tx, start_params(), mesh)
    specs = sparsejax.state_specs(state, "host")

    def step(params, state, x):
        _, grads = sparsejax.value_and_grad(loss_of, axis_name=value_and_grad_axes)(
            params, x
        )
        grads = jax.lax.pmean(grads, "local") if pmean else grads
        return tx.update(grads, state, params)

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), specs, P(("host", "local"))),
        out_specs=(P(), specs),
    )
    return jax.eval_shape(mapped, start_params(), state, batch_of(0))


def test_forgotten_local_mean_names_the_axes():
    mesh = make_mesh((4, 2), ("host", "local"))
    both = ("host", "local")
    with pytest.raises(
        ValueError, match=r"also varies over \['local'\].*pmean.*axis_n"
    ):
        _two_level_step(mesh, both, pmean=False)
    _two_level_step(mesh, both, pmean=True)
    # Gradients of parameters that are equal over "local" were summed over "local".
    with pytest.raises(
        ValueError, match=r"value_and_grad: .*summed over them\. Name all"
    ):
        _two_level_step(mesh, "host", pmean=True)


def test_defaults_of_make_mesh():
    """The default is explicit axes: users need not name the kind of an axis."""
    mesh = jax.make_mesh((8,), ("data",))
    tx = make_tx("data")
    state = sparsejax.init(tx, start_params(), mesh)

    def step(params, state, x):
        _, grads = sparsejax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    specs = sparsejax.state_specs(state)
    params, state = train(step, mesh, start_params(), state, specs, "data")
    assert_close(params, reference(make_tx("data"), 8)[0])
