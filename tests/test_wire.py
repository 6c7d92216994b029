"""Bytes and collectives in the compiled program, at the size of a real model."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from tests.harness import mesh_of, run_simulated, trainer

N = 1_000_000


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize(
    ("value_dtype", "bound"), [(jnp.float32, 0.012), (jnp.bfloat16, 0.007)]
)
def test_exdyna_moves_one_per_cent(workers, value_dtype, bound):
    tx = sparsejax.exdyna(0.01, value_dtype=value_dtype)
    params = jnp.zeros(N)
    made = trainer(tx, params, mesh=mesh_of(workers))
    gradients = jax.ShapeDtypeStruct((workers, N), jnp.float32)
    text = made.step.lower(made.params, made.state, gradients).compile().as_text()
    moved = sparsejax.compiled_wire_bytes(text)
    static = sparsejax.wire_bytes(tx, params, workers=workers)
    dense = sparsejax.wire_bytes(sparsejax.dense(), params, workers=workers)
    assert moved.total == pytest.approx(static.total)
    assert moved.total <= bound * dense.total
    if value_dtype == jnp.bfloat16:
        assert _floats_on_the_wire(text) == 0
    else:
        assert _floats_on_the_wire(text) >= 10_000


def _floats_on_the_wire(text):
    """Elements of the largest floating-point collective of a compiled program."""
    kinds = r"(?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    found = re.findall(rf"= (\(.*?\)|\S+) {kinds}(?:-start)?\(", text)
    assert found
    sizes = [
        int(np.prod([int(d) for d in dims.split(",") if d]))
        for shape in found
        for dims in re.findall(r"\b(?:f16|bf16|f32|f64)\[([0-9,]*)\]", shape)
    ]
    return max(sizes, default=0)


@pytest.mark.parametrize(
    "make",
    [sparsejax.exdyna, sparsejax.topk, sparsejax.cltk, sparsejax.random_k],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("workers", [1, 3])
def test_both_roundings_are_kept(make, workers):
    """Also if w does not divide the slots, and if bfloat16 cannot hold the values."""
    rng = np.random.default_rng(3)
    drawn = rng.laplace(size=(3, workers, 101)).astype(np.float32)
    # Close to the largest accepted number.
    drawn[0, 0, 5] = 3.4e38 / (2 * workers)

    def stream(t):
        return jnp.asarray(drawn[t] if t < 3 else np.zeros((workers, 101), np.float32))

    params = jnp.zeros(101)
    tx = make(0.2, value_dtype=jnp.bfloat16)
    received = np.zeros(101)
    simulated = run_simulated(tx, 40, params=params, workers=workers, stream=stream)
    steps = list(simulated)
    for _, updates, _ in steps:
        assert np.isfinite(updates).all()
        received += np.asarray(updates, np.float64)
    kept = np.asarray(steps[-1][2].memory.per_worker, np.float64).mean(axis=0)
    given = drawn.astype(np.float64).sum(axis=0).mean(axis=0)
    scale = np.abs(drawn).astype(np.float64).sum(axis=0).mean(axis=0)
    assert np.all(np.abs(received + kept - given) <= 2e-6 * scale + 1e-30)


def test_unknown_value_dtype():
    for wrong in (jnp.float16, None, "int8", 3):
        with pytest.raises(ValueError, match=r"value_dtype: got .*bfloat16"):
            sparsejax.micro(0.1, value_dtype=wrong)
