"""Checkpoints: save, restore, and continue with another number of workers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import PARAMS, WORKERS, flat, gradients, mesh_of, residuals, trainer

N = sum(p.size for p in PARAMS.values())


def _abstract(tree):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


def _same(mine, theirs):
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


TX = optax.chain(
    sparsejax.per_worker(optax.trace(0.9)), sparsejax.exdyna(0.05), optax.adam(0.1)
)


def _trained(steps):
    made = trainer(TX)
    params, state = made.start()
    for t in range(steps):
        params, state, _ = made.advance(params, state, gradients(t))
    return params, state


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("kind", "view"), [(AxisType.Auto, "shard_map"), (AxisType.Explicit, "jit")]
)
def test_orbax_round_trip(kind, view, tmp_path):
    nonempty = {k: v for k, v in PARAMS.items() if v.size}  # orbax refuses empty arrays

    def drawn(t):
        return gradients(t, params=nonempty)

    made = trainer(TX, nonempty, mesh=mesh_of(kind=kind), view=view)
    params, state = made.start()
    for t in range(3):
        params, state, _ = made.advance(params, state, drawn(t))
    tree = {"params": params, "state": state, "step": jnp.int32(3)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        checkpointer.wait_until_finished()
        # The target comes from `init` alone, as after a restart.
        fresh_params, fresh_state = made.start()
        target = {"params": fresh_params, "state": fresh_state, "step": jnp.int32(0)}
        restored = checkpointer.restore(tmp_path / "saved", _abstract(target))
    _same(restored, tree)
    memory = restored["state"][1].memory.per_worker
    assert {s.data.shape for s in memory.addressable_shards} == {(1, N)}
    after = made.advance(params, state, drawn(3))
    again = made.advance(restored["params"], restored["state"], drawn(3))
    _same(again, after)


def test_orbax_with_nnx(tmp_path):
    """The state from `nnx.split`, in which only the marker shows the owner of a row."""
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))
    specs = sparsejax.state_specs(state)
    state = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, specs
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", _abstract(state))
    _same(restored, state)
    _, merged = nnx.merge(graphdef, restored)
    assert isinstance(merged.opt_state[1].memory, sparsejax.PerWorker)


def _mesh(workers):
    return jax.sharding.Mesh(np.asarray(jax.devices()[:workers]), ("data",))


def test_resize_conserves_the_mean_pending_gradient():
    params, state = _trained(4)
    pending = residuals(state).mean(axis=0)
    assert np.abs(pending).max() > 0.1
    momentum = np.asarray(state[0].per_worker.trace["kernel"], np.float64)
    for workers in (4, 6, 1, 8):
        mesh = _mesh(workers)
        placed = jax.device_put(params, NamedSharding(mesh, P()))
        state = sparsejax.resize_workers(TX, state, placed, mesh)
        rows = residuals(state)
        assert rows.shape == (workers, N)
        np.testing.assert_allclose(rows.mean(axis=0), pending, rtol=1e-6, atol=1e-6)
        leaf = state[1].memory.per_worker
        assert {s.data.shape for s in leaf.addressable_shards} == {(1, N)}
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 2)
        trace = np.asarray(state[0].per_worker.trace["kernel"])
        assert trace.shape == (workers, 30, 20)
        np.testing.assert_allclose(
            trace.mean(axis=0), momentum.mean(axis=0), rtol=1e-6, atol=1e-6
        )
        # State that does not depend on the number of workers stays.
        assert int(state[1].step) == 4
        assert int(state[2][0].count) == 4
        assert flat(state[2][0].mu).any()
        expected = sparsejax.init(TX, placed, mesh)
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), expected)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == shapes


def test_resize_to_as_many_keeps_all():
    _, state = _trained(2)
    host = jax.device_get(state)  # numpy, like a checkpoint restored without devices
    same = sparsejax.resize_workers(TX, host, PARAMS, mesh_of())
    _same(same, state)


def test_resized_state_trains_on():
    """The next update sends pending gradients at the given density, in another view."""
    tx = sparsejax.exdyna(0.05)
    eight = trainer(tx)
    params, state = eight.start()
    total, sent = np.zeros(N), np.zeros(N)
    for t in range(3):
        drawn = gradients(t)
        total += flat(drawn, (WORKERS,)).mean(axis=0)
        params, state, updates = eight.advance(params, state, drawn)
        sent += flat(updates)
    six = trainer(tx, mesh=_mesh(6), view="jit")
    state = sparsejax.resize_workers(tx, state, six.params, _mesh(6))
    params, _ = six.start()
    for t in range(3, 6):
        drawn = gradients(t, workers=6)
        total += flat(drawn, (6,)).mean(axis=0)
        params, state, updates = six.advance(params, state, drawn)
        sent += flat(updates)
        assert int(sparsejax.report(state).sent) == int(0.05 * N)
    assert six.step._cache_size() == 1
    np.testing.assert_allclose(
        total - sent, residuals(state).mean(axis=0), rtol=1e-4, atol=1e-4
    )


def test_resize_of_per_worker_counters():
    """Moments are averaged, and the count for their bias correction stays."""
    tx = sparsejax.per_worker(optax.scale_by_adam())
    state = sparsejax.init(tx, jnp.zeros(3), mesh_of())
    inner = state.per_worker._replace(
        count=np.full(8, 7, np.int32), mu=np.ones((8, 3), np.float32)
    )
    state = sparsejax.resize_workers(
        tx, sparsejax.PerWorker(inner), jnp.zeros(3), _mesh(4)
    )
    np.testing.assert_array_equal(state.per_worker.count, [7] * 4)
    np.testing.assert_array_equal(state.per_worker.mu, np.ones((4, 3)))


def test_resize_of_the_state_of_nnx():
    with jax.set_mesh(mesh_of()):
        model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    state = sparsejax.resize_workers(
        TX, optimizer.opt_state, nnx.state(model, nnx.Param), _mesh(4)
    )
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.opt_state)
    (memory,) = jax.tree.leaves(state[1].memory)
    assert {s.data.shape for s in memory.addressable_shards} == {(1, 28)}
    assert len(memory.addressable_shards) == 4


def test_resize_of_model_shards():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs = NamedSharding(mesh, P(None, "model"))
    params = {"w": jax.device_put(jnp.zeros((10, 6)), specs)}
    tx = sparsejax.per_shard(sparsejax.micro(0.1))
    state = sparsejax.init(tx, params, mesh)
    memory = state.per_shard.memory.per_worker
    rows = np.arange(memory.size, dtype=np.float32).reshape(memory.shape)
    inner = state.per_shard._replace(memory=sparsejax.PerWorker(rows))
    smaller = jax.sharding.Mesh(mesh.devices[:3], ("data", "model"))
    params = jax.device_put(params, NamedSharding(smaller, P(None, "model")))
    state = sparsejax.resize_workers(tx, sparsejax.PerShard(inner), params, smaller)
    after = np.asarray(state.per_shard.memory.per_worker)
    assert after.shape == (2, 3, 30)
    np.testing.assert_allclose(after.mean(axis=1), rows.mean(axis=1), rtol=1e-6)


def test_resize_of_a_foreign_state():
    state = sparsejax.init(sparsejax.dense(), PARAMS, mesh_of())
    with pytest.raises(ValueError, match=r"resize_workers: .*`tx` and `params`"):
        sparsejax.resize_workers(sparsejax.exdyna(0.1), state, PARAMS, mesh_of())
    other = {"w": jnp.zeros(7)}
    state = sparsejax.init(sparsejax.exdyna(0.1), other, mesh_of())
    with pytest.raises(ValueError, match=r"resize_workers: .*`tx` and `params`"):
        sparsejax.resize_workers(sparsejax.exdyna(0.1), state, PARAMS, _mesh(4))


# -- replicas --------------------------------------------------------------------------


def _astray(mesh, spec, shape):
    """An array of zeros whose copy on the last device is off by one bit."""
    sharding = NamedSharding(mesh, spec)
    part = sharding.shard_shape(shape)
    copies = [np.zeros(part, np.float32) for _ in range(mesh.size)]
    copies[-1].view(np.uint32)[..., -1] = 1
    return jax.make_array_from_single_device_arrays(
        shape,
        sharding,
        [jax.device_put(c, d) for c, d in zip(copies, mesh.devices.flat, strict=True)],
    )


def test_check_replicas():
    mesh = mesh_of()
    _, state = _trained(1)
    sparsejax.check_replicas(state, mesh)  # per-worker rows have no copies to differ
    sparsejax.check_replicas({"host": np.ones(3), "key": jax.random.key(0)}, mesh)
    bad = {"good": state[1].step, "bad": _astray(mesh, P(), (3,))}
    with pytest.raises(ValueError, match=r"copies of `\['bad'\]` on .*differ"):
        sparsejax.check_replicas(bad, mesh)
    with pytest.raises(ValueError, match="outside of the mesh"):
        sparsejax.check_replicas(state, _mesh(4))


def test_check_replicas_of_shards():
    """Compares copies of the same shard, not different shards."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    good = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("model")))
    sparsejax.check_replicas(good, mesh)
    with pytest.raises(ValueError, match=r"copies of `\(root\)`"):
        sparsejax.check_replicas(_astray(mesh, P("model"), (8,)), mesh)


def test_state_is_independent_of_capacity():
    """A transformation with another density accepts the same state."""
    first, second = sparsejax.exdyna(0.25), sparsejax.exdyna(0.01)
    made = trainer(first)
    _, state, _ = made.advance(*made.start(), gradients(0))
    other = trainer(second)
    assert jax.tree.structure(state) == jax.tree.structure(other.state)
    _, state, updates = other.advance(other.start()[0], state, gradients(1))
    assert int(sparsejax.report(state).sent) == 6
    assert np.isfinite(np.asarray(updates["bias"])).all()


@pytest.mark.parametrize(
    ("made", "other", "message"),
    [
        ({"value_bits": 16}, {"value_bits": 8}, "pairs in 16 bits.*pairs in 8 bits"),
        ({}, {"value_bits": 2}, "pairs in 32 bits.*pairs in 2 bits"),
        ({"density": 0.1}, {"density": 0.05}, r"message.*made with another density"),
    ],
)
def test_messages_on_their_way_belong_to_their_code(made, other, message):
    """Another code would decode other numbers from them."""
    made, other = (
        sparsejax.simulate(
            sparsejax.delayed(sparsejax.topk(**({"density": 0.1} | options))), workers=4
        )
        for options in (made, other)
    )
    drawn = jnp.zeros((4, 103))
    state = jax.eval_shape(made.init, drawn[0])
    jax.eval_shape(made.update, drawn, state)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        jax.eval_shape(other.update, drawn, state)


def test_state_of_another_number_of_workers():
    tx = sparsejax.exdyna(0.1)
    state = sparsejax.init(tx, PARAMS, mesh_of())
    specs = sparsejax.state_specs(state)
    with pytest.raises(ValueError, match=r"leading axis of 1.*resize_workers"):
        jax.eval_shape(
            jax.shard_map(
                lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s)[0],
                mesh=mesh_of(4),
                in_specs=(P("data"), specs),
                out_specs=P(),
            ),
            gradients(0, workers=4),
            state,
        )
