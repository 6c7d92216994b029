"""Plain `jax.jit` at the edges: sizes, precisions, NaN, and islands of shards."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import parts
from tests.harness import mesh_of
from tests.jit_training import AUTO, EXPLICIT, OLD, Setting, assert_copies_equal

BATCH = np.arange(16, dtype=np.float32)


def loss_fn(params, batch):
    mean = jnp.mean(batch)
    parts = [jnp.sum((x - mean.astype(x.dtype)) ** 2) for x in jax.tree.leaves(params)]
    return sum((x.astype(jnp.float32) for x in parts), 0 * mean)


def train(
    tx, params, *, mesh=None, specs=None, axis_name="data", batch=BATCH, split=()
):
    """Two steps with the learning rate 0.1."""
    at = Setting(mesh or mesh_of(), axis_name, {}, explicit=False)
    gradient = sparsejax.value_and_grad(loss_fn, axis_name=axis_name)

    @jax.jit
    def step(params, state, batch):
        _, grads = gradient(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    specs = specs or jax.tree.map(lambda _: P(), params)
    with jax.set_mesh(at.mesh):
        batch = at.place(batch, P(split or axis_name))
        now = at.place(params, specs)
        now = now, tx.init(now)
        for _ in range(2):
            now = jax.block_until_ready(step(*now, batch))
    assert_copies_equal(now)
    return now


def expected(x, mean=7.5, steps=2):
    """The dense result of that many steps."""
    for _ in range(steps):
        x = x - 0.1 * 2 * (x - mean)
    return x


@pytest.mark.sampled
@pytest.mark.parametrize(
    "params",
    [
        {},
        jnp.ones(()),
        {"a": jnp.ones(3), "b": jnp.ones(())},
        {"a": jnp.ones((7, 3)), "none": jnp.zeros((0, 3))},
        {"a": jnp.ones((8, 3), jnp.bfloat16), "b": jnp.ones(3)},
    ],
    ids=["empty", "scalar", "few", "odd", "bfloat16"],
)
def test_any_size_and_precision(params):
    tx = optax.chain(sparsejax.topk(1.0), optax.sgd(0.1))
    made, _ = train(tx, params)
    for mine, start in zip(*map(jax.tree.leaves, (made, params)), strict=True):
        assert (mine.shape, mine.dtype) == (start.shape, start.dtype)
        wide = np.asarray(mine, np.float32)
        np.testing.assert_allclose(wide, expected(np.ones(start.shape)), rtol=1e-2)


def test_one_worker():
    tx = optax.chain(sparsejax.exdyna(1.0), optax.sgd(0.1))
    made, _ = train(tx, jnp.ones(9), mesh=mesh_of(1))
    np.testing.assert_allclose(made, expected(np.ones(9)), rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("policy", ["drop", "propagate"])
def test_a_worker_that_is_not_finite(policy):
    batch = BATCH.copy()
    batch[5] = np.nan
    tx = optax.chain(sparsejax.topk(1.0, nonfinite=policy), optax.sgd(0.1))
    made, state = train(tx, jnp.ones(9), batch=batch)
    # With parameters that are NaN since the first step, no gradient is finite.
    who = [2] if policy == "drop" else list(range(8))
    assert np.flatnonzero(sparsejax.report(state).dropped).tolist() == who
    assert np.isfinite(made).all() == (policy == "drop")


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_specs_may_name_an_axis_of_size_1(kind):
    mesh = jax.make_mesh((8, 1), ("data", "model"), axis_types=(kind,) * 2)
    params, specs = {"w": jnp.ones((3, 4))}, {"w": P(None, "model")}
    tx = optax.chain(sparsejax.topk(1.0), optax.sgd(0.1))
    tx = sparsejax.with_param_specs(tx, specs)
    made, _ = train(tx, params, mesh=mesh, specs=specs)
    np.testing.assert_allclose(made["w"], expected(params["w"]), rtol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_exchange_between_islands_of_shards(kind):
    axes = ("replica", "fsdp", "model")
    mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(kind,) * 3)
    params = {"w": jnp.ones((8, 4)), "v": jnp.ones((6,)), "b": jnp.ones((4,))}
    specs = {"w": P("fsdp", "model"), "v": P("model"), "b": P()}
    tx = optax.chain(
        sparsejax.topk(1.0, axis_name="replica"),
        optax.clip_by_global_norm(1.0),
        optax.adam(0.1),
    )
    options = {"mesh": mesh, "specs": specs, "axis_name": "replica"}
    if OLD and kind == EXPLICIT:
        with pytest.raises(ValueError, match=r"need jax 0\.11"):
            train(tx, params, split=("replica", "fsdp"), **options)
        return
    made, state = train(tx, params, split=("replica", "fsdp"), **options)
    assert set(state[0].groups) == {"fsdp,model", "model", "replicated"}
    dense = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))

    @jax.jit
    def two_steps(theirs):
        moments = dense.init(theirs)
        for _ in range(2):
            grads = jax.grad(loss_fn)(theirs, BATCH)
            updates, moments = dense.update(grads, moments, theirs)
            theirs = optax.apply_updates(theirs, updates)
        return theirs

    theirs = two_steps(params)
    for k, leaf in made.items():
        assert leaf.sharding.is_equivalent_to(
            jax.NamedSharding(mesh, specs[k]), leaf.ndim
        )
        np.testing.assert_allclose(leaf, theirs[k], rtol=1e-5)


def test_an_exchange_stays_compiled_under_disable_jit():
    """Hundreds of small operations on every device would take a minute."""
    seen = []

    def select(vector, state, step):
        seen.append((jax.config.jax_disable_jit, isinstance(vector, jax.core.Tracer)))
        indices = jnp.arange(2, dtype=jnp.int32)
        return parts.Choice(indices, jnp.int32(2), jnp.float32(0)), state

    tx = sparsejax.sparsify(
        parts.Sparsifier(select, "agreed"),
        exchange=sparsejax.exchanges.union(),
        memory=sparsejax.memories.error_feedback(),
    )
    mesh, params = mesh_of(2), jnp.arange(3.0)
    rows = np.stack([np.ones(3), 2 * np.ones(3)]).astype(np.float32)
    with jax.set_mesh(mesh):
        state = tx.init(params)
        del seen[:]
        with jax.disable_jit():
            updates, _ = tx.update(sparsejax.PerWorker(rows), state)
    np.testing.assert_array_equal(updates, [1.5, 1.5, 0.0])
    mapped = jax.shard_map(
        lambda row, state: tx.update(row[0], state)[0],
        mesh=mesh,
        in_specs=(P("data"), sparsejax.state_specs(state)),
        out_specs=P(),
    )
    with jax.disable_jit():
        np.testing.assert_array_equal(mapped(rows, state), [1.5, 1.5, 0.0])
    assert seen == [(False, True)] * len(seen)
    assert len(seen) >= 2
