"""Weighted losses, microbatches, auxiliary values and keys, in both views."""

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
from tests.harness import WORKERS, mesh_of

EACH = 4  # examples of a worker


def loss_fn(params, batch):
    """The mean over the examples that count, and their number."""
    x, mask = batch
    count = jnp.sum(mask)
    losses = jnp.tanh(x @ params) ** 2
    return jnp.sum(losses * mask) / count, count  # NaN without any example


def plain_loss_fn(params, batch):
    return jnp.mean(jnp.tanh(batch[0] @ params) ** 2)


@functools.cache
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(WORKERS * EACH, 5)).astype(np.float32)
    mask = (rng.random(WORKERS * EACH) < 0.6).astype(np.float32)
    mask[EACH : 2 * EACH] = 0  # worker 1 has none that counts
    mask[2 * EACH : 2 * EACH + 2] = 0  # nor has one microbatch of worker 2
    return jnp.asarray(rng.normal(size=5), jnp.float32), (x, mask)


def everybody(fun, **options):
    """`(loss, aux or None, rows of gradients)` under plain `jax.jit`."""
    params, batch = data()

    @jax.jit
    def step(params, batch):
        out, grads = sparsejax.value_and_grad(fun, **options)(params, batch)
        return out, sparsejax.rows(grads).per_worker

    with jax.set_mesh(mesh_of()):
        return step(params, batch)


def by_worker(fun, **options):
    """The same inside `jax.shard_map`; the loss is averaged."""
    params, batch = data()

    def step(params, batch):
        out, grads = sparsejax.value_and_grad(fun, **options)(params, batch)
        loss, *aux = out if options.get("has_aux") else (out,)
        loss = jax.lax.pmean(loss, "data")
        return loss, jax.tree.map(lambda x: x[None], aux), grads[None]

    mesh = mesh_of()
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=(P(), P("data"), P("data")),
    )
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    loss, aux, rows = jax.jit(mapped)(params, batch)
    return (loss, *aux) if options.get("has_aux") else loss, rows


by_vmap = functools.partial(everybody, by="vmap")
both_views = pytest.mark.parametrize("view", [everybody, by_worker])
all_views = pytest.mark.parametrize(
    "view", [everybody, by_worker, by_vmap], ids=["jit", "shard_map", "vmap"]
)


@pytest.mark.sampled
@all_views
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_weighted_mean_of_all(view, microbatches):
    loss, rows = view(loss_fn, weighted=True, microbatches=microbatches)
    params, batch = data()
    expected = jax.value_and_grad(lambda p: loss_fn(p, batch)[0])(params)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(jnp.mean(rows, axis=0), expected[1], atol=1e-6)
    assert not np.any(rows[1])


@pytest.mark.sampled
@both_views
def test_no_example_counts_anywhere(view):
    loss, rows = view(lambda p, b: loss_fn(p, (b[0], 0 * b[1])), weighted=True)
    assert loss == 0
    assert not np.any(rows)


@pytest.mark.sampled
@both_views
def test_microbatches(view):
    loss, rows = view(plain_loss_fn, microbatches=4)
    whole, expected = view(plain_loss_fn)
    np.testing.assert_allclose(loss, whole, rtol=1e-6)
    np.testing.assert_allclose(rows, expected, atol=1e-6)


@pytest.mark.sampled
@both_views
@pytest.mark.parametrize("microbatches", [1, 2])
def test_auxiliary_values(view, microbatches):
    def with_aux(params, batch):
        return plain_loss_fn(params, batch), {"first": batch[0][0, 0]}

    (_, aux), _ = view(with_aux, has_aux=True, microbatches=microbatches)
    x = np.asarray(data()[1][0][:, 0]).reshape(WORKERS, microbatches, -1)[..., 0]
    np.testing.assert_array_equal(aux["first"], x[:, 0] if microbatches == 1 else x)


@pytest.mark.sampled
@all_views
def test_each_worker_has_a_key_of_its_own(view):
    def with_aux(params, batch):
        key = sparsejax.worker_key(jax.random.key(0))
        return plain_loss_fn(params, batch), jax.random.uniform(key)

    (_, drawn), _ = view(with_aux, has_aux=True)
    assert len(set(np.asarray(drawn).tolist())) == WORKERS


def test_a_model_that_names_the_whole_mesh():
    """A `jax.shard_map` of the concrete mesh in the loss needs `by="vmap"`."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(params, batch):
        columns = P(None, "model")
        hidden = jax.shard_map(
            jnp.tanh, mesh=mesh, in_specs=columns, out_specs=columns, check_vma=False
        )(batch @ params)
        hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, columns))
        return jnp.mean(hidden**2)

    @functools.partial(jax.jit, static_argnames="by")
    def step(params, batch, by):
        value, grads = sparsejax.value_and_grad(loss, by=by)(params, batch)
        return value, sparsejax.rows(grads).per_worker

    params, batch = jnp.linspace(-1, 1, 24).reshape(6, 4), jnp.ones((8, 6))
    batch = batch * jnp.arange(8)[:, None] / 8
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r'axis \'data\' is manual.*by="vmap"'):
            step(params, batch, by="shard_map")
        value, rows = step(params, batch, by="vmap")
        expected = jax.value_and_grad(lambda p: jnp.mean(jnp.tanh(batch @ p) ** 2))
        wanted = expected(params)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(jnp.mean(rows, axis=0), wanted[1], atol=1e-6)
    assert rows.sharding.spec[0] == "data"


def test_views_that_do_not_exist():
    with pytest.raises(ValueError, match=r'by: got \'pmap\', expected "shard_map" or'):
        sparsejax.value_and_grad(plain_loss_fn, by="pmap")
    explicit = jax.set_mesh(mesh_of(kind=AxisType.Explicit))
    with explicit, pytest.raises(ValueError, match=r"axis_types=\(AxisType.Auto"):
        sparsejax.value_and_grad(plain_loss_fn, by="vmap")(*data())


def test_loops_from_constants_in_the_loss():
    """With checked types their carry has another type; here types are unchecked."""

    def recurrent(params, batch):
        def cell(state, x):
            return jnp.tanh(0.5 * state + x * params[0]), None

        states, _ = jax.lax.scan(cell, jnp.zeros(batch[0].shape[0]), batch[0].T)
        limit = jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, 0)
        return jnp.mean(states**2) * limit

    loss, rows = everybody(recurrent)
    params, batch = data()
    expected = jax.value_and_grad(recurrent)(params, batch)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    np.testing.assert_allclose(jnp.mean(rows, axis=0), expected[1], atol=1e-6)


def test_other_arguments_and_static_ones():
    def loss(params, scale, batch, *, power):
        return scale * jnp.mean(jnp.abs(batch[0] @ params) ** power)

    params, batch = data()
    with jax.set_mesh(mesh_of()):
        gradient = sparsejax.value_and_grad(loss, argnums=(0, 1), batch_argnums=2)
        value, grads = gradient(params, jnp.float32(2), batch, power=3)
        rows = sparsejax.rows(grads)
    expected = jax.value_and_grad(loss, argnums=(0, 1))(params, 2.0, batch, power=3)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    for row, wanted in zip(rows, expected[1], strict=True):
        np.testing.assert_allclose(
            jnp.mean(row.per_worker, axis=0), wanted, rtol=1e-5, atol=1e-6
        )


@pytest.mark.sampled
@pytest.mark.parametrize("first", ["clip", "momentum"])
def test_local_transformations_in_front(first):
    """`per_worker` has the same effect on all workers' rows as on each worker alone."""
    tx = optax.chain(
        sparsejax.per_worker(
            {"clip": optax.clip_by_global_norm(0.1), "momentum": optax.trace(0.9)}[
                first
            ]
        ),
        sparsejax.topk(0.4),
    )
    simulated = sparsejax.simulate(tx, workers=WORKERS)
    params, batch = data()
    with jax.set_mesh(mesh_of()):
        state, other = tx.init(params), simulated.init(params)
        _, grads = sparsejax.value_and_grad(plain_loss_fn)(params, batch)
        rows = sparsejax.rows(grads)
        update = jax.jit(tx.update)
        for _ in range(3):
            updates, state = update(rows, state)
            expected, other = simulated.update(rows.per_worker, other)
            np.testing.assert_allclose(updates, expected, atol=1e-6)
