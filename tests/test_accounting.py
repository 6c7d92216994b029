"""`wire_bytes`: correct bytes, and errors for wrong arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import PARAMS, mesh_of


def test_wire_bytes_asks_for_one_number_per_axis():
    tx = sparsejax.exdyna(0.1)
    for workers in ((2, 4), ()):
        with pytest.raises(ValueError, match=r"workers: got .*each axis"):
            sparsejax.wire_bytes(tx, PARAMS, workers=workers)
    with pytest.raises(ValueError, match="workers: got 0"):
        sparsejax.wire_bytes(tx, PARAMS, workers=0)
    other = sparsejax.exdyna(0.1, axis_name="host")
    with pytest.raises(NameError, match=r"axis 'host'.*not bound.*`wire_bytes`"):
        sparsejax.wire_bytes(other, PARAMS, workers=4)


def test_wire_bytes_whatever_mesh_is_set():
    expected = sparsejax.wire_bytes(sparsejax.exdyna(0.1), PARAMS, workers=4)
    with jax.set_mesh(mesh_of()):  # a new recipe, not traced before
        found = sparsejax.wire_bytes(sparsejax.exdyna(0.1), PARAMS, workers=4)
    assert found == expected


def predict(tx, params, workers):
    link = {"bandwidth": 1e9, "latency": 1e-4}
    return sparsejax.predict(tx, params, workers=workers, **link)


@pytest.mark.parametrize("count", [sparsejax.wire_bytes, predict])
def test_a_transformation_and_its_parameters(count):
    for recipe in (sparsejax.exdyna, sparsejax.dense):
        call = rf"`{recipe.__name__}\(\.\.\.\)`, with the parentheses"
        with pytest.raises(TypeError, match=f"tx: got the function .*{call}"):
            count(recipe, PARAMS, workers=4)
    with pytest.raises(TypeError, match="tx: got float, expected a transformation"):
        count(0.01, PARAMS, workers=4)
    for n in (1000, 1e3, np.int32(1000)):
        with pytest.raises(TypeError, match=r"params: got the number 1.*ShapeDtype"):
            count(sparsejax.exdyna(), n, workers=4)


def test_only_compiled_programs_have_compiled_bytes():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert sparsejax.compiled_wire_bytes(lowered.compile()).total == 0
    with pytest.raises(TypeError, match=r"compiled: got Lowered.*compile\(\)"):
        sparsejax.compiled_wire_bytes(lowered)
    with pytest.raises(ValueError, match=r"no ENTRY.*compile\(\)"):
        sparsejax.compiled_wire_bytes(lowered.as_text())


def _sharded(kind, struct=False):
    """A mesh of four workers and two shards, and a sharded and a shared parameter."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    specs = {"bias": P(), "kernel": P(None, "model")}
    params = {"bias": jnp.zeros(60), "kernel": jnp.zeros((20, 60))}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    placed = jax.device_put(params, shardings)
    if not struct:
        return placed
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), placed
    )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("struct", [False, True])
def test_each_shard_has_its_own_bytes(kind, struct):
    sparse = optax.chain(sparsejax.exdyna(0.1), optax.adamw(0.1))
    groups = {"sparse": sparsejax.per_shard(sparse), "dense": sparsejax.dense()}
    tx = optax.partition(groups, {"kernel": "sparse", "bias": "dense"})
    found = sparsejax.wire_bytes(tx, _sharded(kind, struct), workers=4)
    parts = [
        sparsejax.wire_bytes(sparse, jnp.zeros((20, 30)), workers=4),
        sparsejax.wire_bytes(sparsejax.dense(), jnp.zeros(60), workers=4),
    ]
    assert found.total == sum(part.total for part in parts) > 0


def test_shards_that_nothing_tells_of():
    tx = sparsejax.per_shard(sparsejax.exdyna(0.1))
    with pytest.raises(ValueError, match=r"`wire_bytes` reads .* pass placed ones"):
        sparsejax.wire_bytes(tx, {"w": jnp.zeros((20, 60))}, workers=4)


def test_workers_axes_are_not_those_of_shards():
    """Parameters sharded over the workers' axis count in full."""
    tx, zeros = sparsejax.exdyna(0.1), jnp.zeros(80)
    placed = jax.device_put(zeros, NamedSharding(mesh_of(), P("data")))
    expected = sparsejax.wire_bytes(tx, zeros, workers=4)
    assert sparsejax.wire_bytes(tx, placed, workers=4) == expected
