"""Bytes and collectives in the compiled program, at the size of a real model."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax.recipes._table import TABLE
from tests.harness import mesh_of, run_simulated, trainer

N = 1_000_000


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize(
    ("value_bits", "bound"), [(None, 0.012), (16, 0.007), ((2, 8), 0.0036)]
)
def test_exdyna_moves_one_per_cent(workers, value_bits, bound):
    tx = sparsejax.exdyna(0.01, value_bits=value_bits)
    params = jnp.zeros(N)
    made = trainer(tx, params, mesh=mesh_of(workers))
    gradients = jax.ShapeDtypeStruct((workers, N), jnp.float32)
    text = made.step.lower(made.params, made.state, gradients).compile().as_text()
    moved = sparsejax.compiled_wire_bytes(text)
    static = sparsejax.wire_bytes(tx, params, workers=workers)
    dense = sparsejax.wire_bytes(sparsejax.dense(), params, workers=workers)
    assert moved.total == pytest.approx(static.total)
    assert moved.total <= bound * dense.total
    if value_bits:
        assert _floats_on_the_wire(text) == 0
    else:
        assert _floats_on_the_wire(text) >= 10_000


# Bytes with eight workers, as a fraction of the all-reduce of float32. micro and exdyna
# send values and then means.
_SHARES = {
    ("micro", 8): 0.0040,
    ("micro", (4, 8)): 0.0034,
    ("micro", (2, 8)): 0.0031,
    ("exdyna", 8): 0.0042,
    ("exdyna", (4, 8)): 0.0036,
    ("exdyna", (2, 8)): 0.0033,
    # An all-gather of the dense vectors moves four times an all-reduce.
    ("topk", 2): 4 * 0.0036,
}


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "bits"), _SHARES)
def test_narrow_values_take_few_bytes(name, bits):
    tx, params = getattr(sparsejax, name)(0.01, value_bits=bits), jnp.zeros(N)
    moved = sparsejax.wire_bytes(tx, params, workers=8).total
    dense = sparsejax.wire_bytes(sparsejax.dense(), params, workers=8).total
    assert moved <= _SHARES[name, bits] * dense


@pytest.mark.sampled
@pytest.mark.parametrize("n", [10, 100, 1000, 10_000])
@pytest.mark.parametrize("workers", [8, 64])
@pytest.mark.parametrize(
    ("name", "density"),
    [("micro", 0.01), ("topk", 0.01), ("topk", 0.5), ("random_k", 0.01), ("cltk", 0.1)],
)
def test_fewer_bits_never_take_more_bytes(name, density, workers, n):
    """Even if scales and padding are most of a list, or pairs use an all-reduce."""
    make = functools.partial(getattr(sparsejax, name), density)
    moved = [
        sparsejax.wire_bytes(make(value_bits=b), jnp.zeros(n), workers=workers).total
        for b in (32, 16, 8, 4, 2, 1)
    ]
    assert (np.diff(moved) <= 0).all()
    if (density, workers) == (0.01, 8) and name != "random_k":
        assert moved[1] < moved[0]


@pytest.mark.parametrize("name", ["exdyna", "deft", "cltk", "random_k", "topk"])
def test_a_late_exchange_takes_about_half_as_many_bytes_again(name):
    """An all-reduce adds the indices of one step and the values of the one before."""
    tx, params = getattr(sparsejax, name)(0.01), jnp.zeros(N)
    now = sparsejax.wire_bytes(tx, params, workers=8).total
    late = sparsejax.wire_bytes(sparsejax.delayed(tx), params, workers=8).total
    assert late <= {"topk": 1.001, "cltk": 1.25}.get(name, 1.55) * now


_SENDS_VALUES = [name for name, row in TABLE.items() if row.has_widths]


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [16, 8, 4, 2, 1])
@pytest.mark.parametrize("name", _SENDS_VALUES)
def test_bytes_of_every_recipe_and_width(name, bits):
    """Counted from shapes, as in the compiled program; fewer bits never need more."""
    row, n, workers = TABLE[name], 20_000, 4
    params = jnp.zeros(n)
    tx = row.build(0.05, value_bits=bits)
    made = trainer(tx, params, mesh=mesh_of(workers))
    gradients = jax.ShapeDtypeStruct((workers, n), jnp.float32)
    compiled = made.step.lower(made.params, made.state, gradients).compile()
    found = sparsejax.compiled_wire_bytes(compiled).total
    assert found == sparsejax.wire_bytes(tx, params, workers=workers).total
    wider = row.build(0.05, value_bits=2 * bits)
    assert found <= sparsejax.wire_bytes(wider, params, workers=workers).total


def test_every_recipe_that_sends_values_has_widths():
    assert {"exdyna", "micro", "topk", "cltk", "random_k"} <= set(_SENDS_VALUES)


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


@pytest.mark.sampled
@pytest.mark.parametrize(
    "make",
    [sparsejax.exdyna, sparsejax.topk, sparsejax.cltk, sparsejax.random_k],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize(
    ("workers", "bits"), [(1, 16), (3, 16), (3, 8), (3, 4), (3, 2)]
)
def test_both_roundings_are_kept(make, workers, bits):
    """Even if w does not divide the slots, or bfloat16 cannot hold the values."""
    rng = np.random.default_rng(3)
    drawn = rng.laplace(size=(3, workers, 101)).astype(np.float32)
    # Close to the largest accepted number.
    drawn[0, 0, 5] = 3.4e38 / (2 * workers)

    def stream(t):
        return jnp.asarray(drawn[t] if t < 3 else np.zeros((workers, 101), np.float32))

    params = jnp.zeros(101)
    tx = make(0.2, value_bits=bits)
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


def test_unknown_value_bits():
    for wrong in (jnp.float16, "int8", 3, True, (8, 3), (8,), (8, 8, 8)):
        with pytest.raises(ValueError, match=r"value_bits: got .*, 8, 4, 2 or 1"):
            sparsejax.micro(0.1, value_bits=wrong)
    with pytest.raises(ValueError, match=r"value_bits: got .* bits for each value, "):
        sparsejax.topk(0.1, value_bits=(4, 8))
