"""The compiled step of plain `jax.jit`: bytes on the wire and in memory."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import mesh_of
from tests.jit_training import SHAPES as SMALL
from tests.jit_training import jit_loop, setting

SHAPES = {"w": (1000, 1000), "b": (1000,)}
N = 1_001_000
RECIPES = {
    "exdyna": functools.partial(sparsejax.exdyna, 0.01),
    "topk": functools.partial(sparsejax.topk, 0.01),
    "marsit": functools.partial(sparsejax.marsit, period=None),
}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


def compiled(tx, view):
    """The donated step, compiled from shapes alone."""
    mesh = mesh_of()
    gradient = sparsejax.value_and_grad(loss_fn)

    def step(params, state, batch):
        loss, grads = gradient(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def mine(params, state, batch):
        params, state, loss = step(params, state, batch)
        return params, state, jax.lax.pmean(loss, "data")

    def struct(spec, leaf):
        sharding = jax.NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = {k: jax.ShapeDtypeStruct(s, np.float32) for k, s in SHAPES.items()}
    batch = jax.ShapeDtypeStruct((16, 1000), np.float32)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(tx.init, params)
        specs = (jax.tree.map(lambda _: P(), params), sparsejax.state_specs(state))
        inputs = (*specs, P("data"))
        run = step
        if view == "shard_map":
            run = jax.shard_map(
                mine, mesh=mesh, in_specs=inputs, out_specs=(*specs, P())
            )
        args = jax.tree.map(struct, inputs, (params, state, batch))
        return jax.jit(run, donate_argnums=(0, 1)).lower(*args).compile()


@pytest.mark.sampled
@pytest.mark.parametrize("name", list(RECIPES))
def test_bytes_and_memory_of_the_shard_map_loop(name):
    tx = optax.chain(RECIPES[name](), optax.sgd(0.1))
    program, loop = (compiled(tx, view) for view in ("jit", "shard_map"))
    params = {k: jax.ShapeDtypeStruct(s, np.float32) for k, s in SHAPES.items()}
    planned = sparsejax.wire_bytes(tx, params, workers=8).total
    loss = 2 * 7 / 8 * 4
    measured = sparsejax.compiled_wire_bytes(program).total
    assert measured == sparsejax.compiled_wire_bytes(loop).total
    assert measured == pytest.approx(planned + loss)
    assert measured < 4 * N / 8
    mine, theirs = program.memory_analysis(), loop.memory_analysis()
    assert mine.alias_size_in_bytes == theirs.alias_size_in_bytes >= 2 * 4 * N
    assert mine.temp_size_in_bytes <= 1.02 * theirs.temp_size_in_bytes


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["exdyna", "marsit"])
def test_bytes_of_a_model_in_shards(name):
    """All groups of leaves count, and optimizers after the recipe do not."""
    at, recipe = setting("sharded"), RECIPES[name]()
    with jax.set_mesh(at.mesh):
        state = recipe.init(at.params())
        program = jax.jit(recipe.update).lower(at.rows(), state).compile()
    chain = optax.chain(
        sparsejax.per_worker(optax.trace(0.9)),
        recipe,
        optax.clip_by_global_norm(1.0),
        optax.adamw(0.1),
    )
    measured = sparsejax.compiled_wire_bytes(program)
    planned = sparsejax.wire_bytes(chain, at.params(), workers=4)
    assert (measured.total, measured.least) == (planned.total, planned.least)
    assert measured.by_kind == planned.by_kind


def test_shards_of_parameters_stay_where_they_are():
    at = setting("sharded")
    loop = jit_loop(optax.chain(sparsejax.topk(0.1), optax.sgd(0.1)), at)
    with jax.set_mesh(at.mesh):
        args = (loop.params, loop.state, at.batch(0))
        program = loop.step.lower(*args).compile()
    text = program.as_text()
    for name, shape in at.specs.items():
        whole = ",".join(map(str, SMALL[name]))
        gathered = rf"\[(1,)?{whole}\]\S* all-gather\("
        assert not any(shape) or not re.search(gathered, text)


def test_groups_along_named_axes():
    text = """ENTRY %main (p: f32[8]) -> f32[32] {
  ROOT %g = f32[32]{0} all-gather(%p), replica_groups=mesh['d'=4,'m'=2] AXES, d={0}
}
"""
    for axes, count in (
        ("{'d'}", 4),
        ("{'m'}", 2),
        ("{'d','m'}", 8),
        ("{'d':(1)2}", 2),
    ):
        counted = sparsejax.compiled_wire_bytes(text.replace("AXES", axes), devices=64)
        assert counted.total == (count - 1) / count * 128
