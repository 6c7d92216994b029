"""State of plain `jax.jit`: other meshes, other trees, other loops."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.jit_training import SHAPES, jit_loop, setting

TX = optax.chain(sparsejax.topk(0.1), optax.sgd(0.1))


def on_sharded():
    at = setting("sharded")
    return at, sparsejax.init(TX, at.params(), at.mesh)


def other(shape, specs=None):
    """The setting of another mesh, and parameters that are placed there."""
    at = setting("sharded")
    count = int(np.prod(shape))
    mesh = jax.make_mesh(shape, at.mesh.axis_names, devices=jax.devices()[:count])
    at = at._replace(mesh=mesh, specs=specs or at.specs)
    return at, at.params()


def test_another_number_of_workers():
    old, state = on_sharded()
    _, state = jit_loop(TX, old).train(3)
    at, params = other((2, 2))
    new = sparsejax.resize_workers(TX, state, params, at.mesh)
    for group, made in new[0].groups.items():
        rows = [
            np.asarray(getattr(x, "per_shard", x).memory.per_worker)
            for x in (made, state[0].groups[group])
        ]
        axis = rows[0].ndim - 2
        assert rows[0].shape[axis] == 2
        mean, expected = (x.mean(axis, dtype=np.float64) for x in rows)
        np.testing.assert_allclose(mean, expected, rtol=1e-6, atol=1e-8)
    sparsejax.check_replicas(new, at.mesh)


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(2, 4), (4, 1)])
def test_another_number_of_shards(shape):
    _, state = on_sharded()
    at, params = other(shape)
    with pytest.raises(ValueError, match="Only the number of workers may change"):
        sparsejax.resize_workers(TX, state, params, at.mesh)


def test_specs_and_replicas():
    at, state = on_sharded()
    specs = sparsejax.state_specs(state)
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
        expected = jax.NamedSharding(at.mesh, spec)
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim)
    sparsejax.check_replicas(state, at.mesh)
    assert list(sparsejax.reports(state)) == ["[0]"]
    assert sparsejax.report(state).demand.shape == (4,)


def update(tx, at, rows, state):
    with jax.set_mesh(at.mesh):
        return jax.eval_shape(tx.update, rows, state)


def test_a_state_of_another_number_of_workers():
    at, _ = on_sharded()
    bare = jax.tree.map(np.asarray, at.params())
    for count in (1, 8):
        mesh = jax.make_mesh((count,), ("data",), devices=jax.devices()[:count])
        state = jax.tree.map(np.asarray, sparsejax.init(TX, bare, mesh))
        with pytest.raises(ValueError, match=rf"{count} workers.*resize_workers"):
            update(TX, at, at.rows(), state)


def test_gradients_of_another_number_of_workers():
    at, state = on_sharded()
    rows = {k: np.zeros((8, *shape), np.float32) for k, shape in SHAPES.items()}
    rows = {k: sparsejax.PerWorker(x) for k, x in rows.items()}
    with pytest.raises(ValueError, match=r"\(8, 8\).*4 workers"):
        update(TX, at, rows, state)


def test_gradients_of_another_tree():
    at, state = on_sharded()
    rows = at.rows()
    rows["z"] = rows.pop("b")
    with pytest.raises(ValueError, match=r"another structure.*`\['b'\]`, `\['z'\]`"):
        update(TX, at, rows, state)


def test_a_state_of_per_shard():
    at, _ = on_sharded()
    params, rows = at.params(), at.rows()
    del params["b"], rows["b"]
    tx = sparsejax.per_shard(sparsejax.topk(0.1))
    state = sparsejax.init(tx, params, at.mesh)
    with pytest.raises(NameError, match=r"leave `per_shard` out"):
        update(tx, at, rows, state)


def test_a_state_of_plain_jit_in_a_loop_over_the_workers_axis_alone():
    at, state = on_sharded()
    rows = {k: row.per_worker for k, row in at.rows().items()}

    def step(rows):
        return TX.update(jax.tree.map(lambda row: row[0], rows), state)[0]

    options = {"in_specs": P("data"), "out_specs": P(), "check_vma": False}
    mapped = jax.shard_map(step, axis_names={"data"}, **options)
    with (
        jax.set_mesh(at.mesh),
        pytest.raises(NameError, match=r"made for plain `jax.jit`"),
    ):
        jax.eval_shape(mapped, rows)
