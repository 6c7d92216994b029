"""The compiled step: its memory, and operations that must not occur."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import mesh_of
from tests.quick import NEWER_EMITTERS

WORKERS = 4
SHAPES = {"a": (784, 512), "b": (512,), "c": (512, 512), "d": (512,), "e": (512, 640)}
N = sum(int(np.prod(shape)) for shape in SHAPES.values())


# Before jax 0.11 XLA:CPU drops the barriers on which the other recipes depend.
WITHOUT_COPIES = ["exdyna", "micro"]
if jax.__version_info__ >= (0, 11):
    later = [
        pytest.param(name, marks=pytest.mark.second_tier)
        for name in ("dgc", "random_k", "sidco")
    ]
    WITHOUT_COPIES += ["topk", *later]


def _loss(params, x):
    x = jnp.tanh(x @ params["a"] + params["b"][None])
    x = jnp.tanh(x @ params["c"] + params["d"][None])
    return jnp.mean((x @ params["e"]) ** 2)


@functools.cache
def compiled(name):
    """A whole donated step of an MLP with `chain(recipe, sgd)`."""
    recipe = sparsejax.dense() if name == "dense" else getattr(sparsejax, name)(0.01)
    mesh = mesh_of(WORKERS)
    tx = optax.chain(recipe, optax.sgd(0.1))
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    state = sparsejax.init(tx, params, mesh)
    specs = (P(), sparsejax.state_specs(state, "data"))

    def step(params, state, x):
        _, grads = sparsejax.value_and_grad(_loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs),
        donate_argnums=(0, 1),
        out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs),
    )
    batch = jax.ShapeDtypeStruct(
        (32, 784), jnp.float32, sharding=NamedSharding(mesh, P("data"))
    )
    return jitted.lower(params, state, batch).compile(NEWER_EMITTERS)


every_recipe = pytest.mark.parametrize("name", ["exdyna", "micro"])


@every_recipe
def test_temporaries(name):
    """Temporaries hold the gradient; later the update reuses the gradient's memory."""
    memory = compiled(name).memory_analysis()
    dense = compiled("dense").memory_analysis()
    assert memory.temp_size_in_bytes <= dense.temp_size_in_bytes + 1.1 * 4 * N
    # With accumulation leaf by leaf, the gradient needs no second copy.
    most = 2.1 if jax.__version_info__ < (0, 11) else 1.2
    assert memory.temp_size_in_bytes <= most * 4 * N
    # Parameters and residual are overwritten.
    assert memory.alias_size_in_bytes >= 2 * 4 * N


@pytest.mark.parametrize("name", WITHOUT_COPIES)
def test_no_copy_of_the_whole_vector(name):
    text = compiled(name).as_text()
    copies = [
        line.strip()
        for line in text.splitlines()
        if re.search(r"= \S+ copy(-start)?\(", line) and re.search(rf"\b{N}\b", line)
    ]
    assert not copies
    assert re.search(rf"f32\[(1,)?{N}\]", text)  # the pattern finds the vector


@every_recipe
def test_residual_is_aliased_to_residual(name):
    header = compiled(name).as_text().splitlines()[0]
    layout = re.search(r"entry_computation_layout=\{\((.*?)\)->\((.*?)\)\}", header)
    arguments, results = (
        [s.split("{")[0] for s in re.findall(r"\w+\[[0-9,]*\](?:\{[^}]*\})?", side)]
        for side in layout.groups()
    )
    source, target = (side.index(f"f32[1,{N}]") for side in (arguments, results))
    assert re.search(rf"\{{{target}\}}: \({source}, ", header)


@every_recipe
def test_nothing_sorts(name):
    text = compiled(name).as_text()
    assert not re.search(r"\b(sort|topk|custom-call)\(", text, re.IGNORECASE)
    assert "TopK" not in text
    assert re.search(r"\bscatter\(", text)  # the pattern finds opcodes
