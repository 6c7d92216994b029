"""Rounds of local steps: equal to the synchronous step at H = 1, in both views."""

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
from tests.cases import RECIPES, parametrize
from tests.harness import flat, mesh_of
from tests.jit_training import assert_copies_equal
from tests.mesh_training import make_mesh, start_params

W, H, B = 4, 3, 2


def loss_fn(params, batch, shift=None, *, scale=1.0):
    x = batch if shift is None else batch + shift
    out = jnp.tanh(x @ params["w1"]) @ params["w2"]
    return scale * jnp.mean((out - 1.0) ** 2)


def batches(t, steps=H, workers=W):
    """Batches [w, H, b, 6], as `simulate` expects them."""
    rng = np.random.default_rng([3, t])
    return rng.normal(size=(workers, steps, B, 6)).astype(np.float32)


def whole(rows):
    """The same batches as they are passed on a mesh, [H, w b, 6]."""
    return np.moveaxis(rows, 0, 1).reshape(rows.shape[1], -1, rows.shape[-1])


@parametrize(RECIPES)
def test_one_plain_local_step_is_the_synchronous_step(case):
    tx = optax.chain(case.make(), optax.sgd(0.3, momentum=0.9))
    training = sparsejax.rounds(loss_fn, optax.sgd(1.0), tx, steps=1)
    alone, params = sparsejax.simulate(training, workers=W), start_params()
    simulated = sparsejax.simulate(tx, workers=W)

    @jax.jit
    def both(mine, theirs, rows):
        mine = alone.step(*mine, rows)[:2]
        params, state = theirs
        gradient = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))
        updates, state = simulated.update(gradient(params, rows[:, 0]), state, params)
        return mine, (optax.apply_updates(params, updates), state)

    mine, theirs = (params, alone.init(params)), (params, simulated.init(params))
    for t in range(4):
        mine, theirs = both(mine, theirs, batches(t, 1))
        jax.tree.map(np.testing.assert_array_equal, mine[0], theirs[0])
        jax.tree.map(np.testing.assert_array_equal, mine[1].outer, theirs[1])


@functools.cache
def _adam_training(axis_name="data", **options):
    """Adam with a schedule that counts local steps, ExDyna outside."""
    inner = optax.adam(optax.linear_schedule(0.1, 0.0, 20))
    recipe = sparsejax.exdyna(0.2, axis_name=axis_name)
    outer = optax.chain(recipe, optax.sgd(1.0))
    return sparsejax.rounds(
        loss_fn, inner, outer, steps=H, axis_name=axis_name, **options
    )


@functools.cache
def _alone():
    return sparsejax.simulate(_adam_training(), workers=W)


@functools.cache
def _simulated(rounds=4):
    params = start_params()
    state = _alone().init(params)
    for t in range(rounds):
        params, state, losses = _alone().step(params, state, batches(t))
    return params, state, losses


_jitted = functools.cache(jax.jit)


def _on_mesh(mesh, training, rounds, start=None, first=0):
    """Plain `jax.jit`: `(params, state, losses)` after some rounds."""
    with jax.set_mesh(mesh):
        params = jax.device_put(start_params(), P())
        params, state = start or (params, training.init(params))
        for t in range(first, first + rounds):
            rows = whole(batches(t, workers=mesh.size))
            params, state, losses = _jitted(training.step)(params, state, rows)
            jax.block_until_ready(params)
    return params, state, losses


AXES = {
    "auto": ((W,), ("data",), AxisType.Auto, "data"),
    "explicit": ((W,), ("data",), AxisType.Explicit, "data"),
    "two_axes": ((2, 2), ("host", "local"), AxisType.Auto, ("host", "local")),
}


@pytest.mark.sampled
@pytest.mark.parametrize("axes", AXES)
def test_plain_jit_equals_the_simulation(axes):
    shape, names, kind, axis_name = AXES[axes]
    mesh = jax.make_mesh(
        shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[:W]
    )
    params, state, losses = _on_mesh(mesh, _adam_training(axis_name), 4)
    assert_copies_equal(params)
    assert_copies_equal(state)
    expected, simulated, means = _simulated()
    np.testing.assert_allclose(flat(params), flat(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(losses, means, rtol=1e-5)
    # Schedules count local steps.
    np.testing.assert_array_equal(state.inner.per_worker[0].count, [4 * H] * W)
    assert jax.tree.structure(state) == jax.tree.structure(simulated)


@pytest.mark.sampled
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_equals_the_simulation(check_vma):
    mesh = make_mesh((W,), ("data",)) if jax.device_count() == W else mesh_of(W)
    training = _adam_training()
    # Arrays are placed: the first call compiles for the shardings of later calls.
    params = jax.device_put(start_params(), NamedSharding(mesh, P()))
    state = sparsejax.init(training, params, mesh)
    specs = (P(), sparsejax.state_specs(state))
    step = jax.jit(
        jax.shard_map(
            training.step,
            mesh=mesh,
            in_specs=(*specs, P(None, "data")),
            out_specs=(*specs, P("data")),
            check_vma=check_vma,
        )
    )
    for t in range(4):
        rows = jax.device_put(whole(batches(t)), NamedSharding(mesh, P(None, "data")))
        params, state, losses = step(params, state, rows)
    expected, _, means = _simulated()
    np.testing.assert_allclose(flat(params), flat(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(losses.reshape(W, H).mean(axis=0), means, rtol=1e-5)


def test_workers_that_are_islands_of_shards():
    """Moments are sharded from the start, and the rounds are as with two workers."""
    mesh = make_mesh((2, 2), ("data", "fsdp"), devices=jax.devices()[:W])
    specs = {"w1": P(None, "fsdp"), "w2": P("fsdp")}
    outer = optax.chain(sparsejax.dense(), optax.sgd(1.0))
    training = sparsejax.rounds(loss_fn, optax.adam(0.1), outer, steps=H)
    whole_mesh = mesh_of(2)
    expected, _, means = _on_mesh(whole_mesh, training, 3)
    with jax.set_mesh(mesh):
        params = jax.tree.map(jax.device_put, start_params(), specs)
        state = training.init(params)
        waiting = sparsejax.per_worker(optax.trace(0.9)).init(params)
        for moment in (state.inner.per_worker[0].mu, waiting.per_worker.trace):
            assert moment["w1"].sharding.spec == P("data", None, "fsdp")
        for t in range(3):
            rows = whole(batches(t, workers=2))
            params, state, losses = _jitted(training.step)(params, state, rows)
            jax.block_until_ready(params)
    assert params["w1"].sharding.spec == P(None, "fsdp")
    np.testing.assert_allclose(flat(params), flat(expected), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(losses, means, rtol=1e-4)


def test_a_broken_worker_starts_again_from_the_shared_parameters():
    training, params = _alone(), start_params()
    params, before, _ = training.step(params, training.init(params), batches(0))
    spoilt = batches(1)
    spoilt[2, 1] = np.nan
    params, after, losses = training.step(params, before, spoilt)
    assert np.isnan(losses[1])
    assert np.isfinite(flat(params)).all()
    dropped = sparsejax.report(after).dropped
    np.testing.assert_array_equal(dropped, np.arange(W) == 2)
    for old, new in zip(
        jax.tree.leaves(before.inner), jax.tree.leaves(after.inner), strict=True
    ):
        np.testing.assert_array_equal(old[2], new[2])
        assert (old[1] != new[1]).any()
    params, after, losses = training.step(params, after, batches(2))
    assert np.isfinite(losses).all()
    assert not sparsejax.report(after).dropped.any()


def test_resumed_in_the_middle_of_a_schedule():
    """A state that went through numpy continues with the same bits."""
    mesh, training = mesh_of(W), _adam_training()
    params, state, _ = _on_mesh(mesh, training, 2)
    host = jax.tree.map(np.asarray, (params, state))
    specs = (
        jax.tree.map(lambda _: P(), params),
        sparsejax.state_specs(state),
    )
    again = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), host, specs
    )
    straight = _on_mesh(mesh, training, 4)
    resumed = _on_mesh(mesh, training, 2, again, first=2)
    jax.tree.map(np.testing.assert_array_equal, straight, resumed)


def test_resized_between_rounds():
    """Pending mass and moments become the mean of the old ones; counters continue."""
    training = _adam_training()
    params, state, _ = _on_mesh(mesh_of(W), training, 3)
    params = jax.tree.map(np.asarray, params)
    resized = sparsejax.resize_workers(training, state, params, mesh_of(2))

    def mean(leaf):
        return np.mean(np.asarray(leaf, np.float64), axis=0)

    for leaf in (lambda s: s.outer[0].memory, lambda s: s.inner.per_worker[0].mu):
        for old, new in zip(
            jax.tree.leaves(leaf(state)), jax.tree.leaves(leaf(resized)), strict=True
        ):
            assert len(new) == 2
            np.testing.assert_allclose(mean(new), mean(old), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(resized.inner.per_worker[0].count, [3 * H] * 2)
    start = (jax.device_put(params, NamedSharding(mesh_of(2), P())), resized)
    _, state, losses = _on_mesh(mesh_of(2), training, 1, start, first=3)
    assert np.isfinite(losses).all()


def test_a_worker_of_other_counts_keeps_the_largest():
    """After a dropped round a worker has made fewer steps than the others."""
    training = _adam_training()
    params, state, _ = _on_mesh(mesh_of(W), training, 1)
    rows = whole(batches(1))
    rows[:, :B] = np.nan
    with jax.set_mesh(mesh_of(W)):
        params, state, _ = _jitted(training.step)(params, state, rows)
    count = state.inner.per_worker[0].count
    np.testing.assert_array_equal(count, [H, 2 * H, 2 * H, 2 * H])
    params = jax.tree.map(np.asarray, params)
    resized = sparsejax.resize_workers(training, state, params, mesh_of(2))
    np.testing.assert_array_equal(resized.inner.per_worker[0].count, [2 * H] * 2)


def test_auxiliary_values_keys_and_bfloat16():
    """In one program: aux of each local step, keys, keywords, and wide sums."""

    def noisy(params, batch, key, *, scale):
        key = sparsejax.worker_key(key)
        noise = jax.random.normal(key, batch.shape, batch.dtype)
        params = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return loss_fn(params, batch + noise, scale=scale), jnp.mean(noise)

    outer = optax.chain(sparsejax.dense(), optax.sgd(1.0))
    training = sparsejax.rounds(
        noisy, optax.sgd(1e-4), outer, steps=H, has_aux=True, microbatches=1
    )
    narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), start_params())
    keys = jax.random.split(jax.random.key(0), H)
    with jax.set_mesh(mesh_of(W)):
        params = jax.device_put(narrow, P())
        state = training.init(params)
        step = jax.jit(training.step)
        params, state, _, aux = step(params, state, whole(batches(0)), keys, scale=2.0)
    assert aux.shape == (W, H)
    assert len(np.unique(aux)) == W * H
    assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_bytes_and_seconds_are_those_of_a_local_step():
    training = _adam_training()
    link = {"workers": 8, "bandwidth": 1e9, "latency": 1e-4}
    moved = sparsejax.wire_bytes(training, start_params(), workers=8).total
    every = sparsejax.wire_bytes(training.outer, start_params(), workers=8).total
    assert moved == pytest.approx(every / H)
    mine = sparsejax.predict(training, start_params(), **link)
    theirs = sparsejax.predict(training.outer, start_params(), **link)
    assert mine.seconds == pytest.approx(theirs.seconds / H)


def test_wrong_calls_name_the_fix():
    sgd, exchange = optax.sgd(0.1), optax.chain(sparsejax.dense(), optax.sgd(1.0))
    mesh, params = mesh_of(W), start_params()

    def made(inner=sgd, outer=exchange, steps=H):
        return sparsejax.rounds(loss_fn, inner, outer, steps=steps)

    for wrong, message in (
        (made(outer=sgd), "holds no recipe.*sparsejax.dense"),
        (made(inner=optax.chain(sparsejax.dense(), sgd)), "inner.*into `outer`"),
    ):
        with pytest.raises(ValueError, match=message):
            sparsejax.init(wrong, params, mesh)
    with pytest.raises(ValueError, match="steps: got 0"):
        made(steps=0)
    clipped = made(inner=optax.chain(sparsejax.clip_by_global_norm(1.0), sgd))
    with jax.set_mesh(mesh):
        state = clipped.init(params)
        with pytest.raises(ValueError, match=r"exchanges in every.*optax\.clip_by"):
            clipped.step(params, state, whole(batches(0)))
    training = made()
    with jax.set_mesh(mesh):
        state = training.init(params)
        for rows, keys, message in (
            (whole(batches(0, H + 1)), (), r"batches.*steps=3.*jnp\.stack"),
            (whole(batches(0)), (jnp.ones(2),), "per_step.*steps=3.*by keyword"),
            (whole(batches(0))[:, :5], (), "first axis is split over 4 workers"),
        ):
            with pytest.raises(ValueError, match=message):
                training.step(params, state, rows, *keys)
    with pytest.raises(NameError, match="rounds: the axis 'data' is not bound"):
        training.step(params, state, whole(batches(0)))
