"""`best_exchange`: the exchange with the fewest bytes, by sparsity and overlap."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import exchanges, memories, sparsifiers
from sparsejax.exchanges.sums._sizes import lengths
from tests.harness import mesh_of, trainer

N = 40_000
SCHEMES = ("dense", "hashed_owners", "pairs", "recursive_doubling")


def compiled_bytes(name, density, densification, workers, n=N):
    """Bytes of a compiled step in which everything fits, by kind."""
    sizes = {} if name in ("dense", "pairs") else {"densification": densification}
    tx = sparsejax.sparsify(
        sparsifiers.nonzero(density),
        exchange=getattr(exchanges, name)(**sizes),
        memory=memories.none(),
    )
    made = trainer(tx, jnp.zeros((n,)), mesh=mesh_of(workers))
    gradients = made.shard(jnp.zeros((workers, n)))
    moved = sparsejax.compiled_wire_bytes(
        made.step.lower(made.params, made.state, gradients).compile()
    )
    usual = {}
    for kind, size, branch, _ in moved.collectives:
        if not branch:
            usual[kind] = usual.get(kind, 0.0) + size
    return usual


def densifications(workers):
    """Densifications: no overlap, half overlap, the same support everywhere."""
    return {"none": float(workers), "half": (workers + 1) / 2, "full": 1.0}


@pytest.mark.newer_waits
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("workers", "density", "overlap"),
    [
        (2, 0.05, "none"),
        (4, 0.01, "half"),
        # With more workers, a program has more exchanges one after the other.
        pytest.param(8, 0.001, "full", marks=pytest.mark.second_tier),
        pytest.param(8, 0.05, "none", marks=pytest.mark.second_tier),
    ],
)
def test_picks_the_fewest_compiled_bytes(workers, density, overlap):
    growth = densifications(workers)[overlap]
    choice = sparsejax.best_exchange(density, growth, workers, n=N)
    compiled = {
        name: sum(compiled_bytes(name, density, growth, workers).values())
        for name in SCHEMES
    }
    assert choice.bytes == pytest.approx(compiled)
    assert choice.name == min(compiled, key=compiled.get)
    assert choice.exchange.name == choice.name


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_bytes_of_recursive_doubling_equal_the_formula(workers):
    density, growth = 0.02, densifications(workers)["half"]
    slots = math.ceil(density * N)
    made = lengths(N, slots, workers, None, growth)
    core = 1 << (workers.bit_length() - 1)
    extra = workers - core
    swapped, held = 0.0, 1
    entry, flag = 2 + 4, 2  # N has 16-bit indices
    if extra:
        swapped += made[1] * entry + flag
        held = 2
    for i in range(core.bit_length() - 2):
        swapped += made[held] * entry + flag
        held = (2 << i) + min(2 << i, extra)
    share = math.ceil(made[held] / max(1, core // 2))
    facts = 4 + 4 + 2 + 2
    gathered = (workers - 1) * (facts + share * entry + flag)
    expected = {"permute": swapped, "all-gather": gathered}
    found = compiled_bytes("recursive_doubling", density, growth, workers)
    assert found == pytest.approx({k: v for k, v in expected.items() if v})


def test_capacities_grow_as_supports_do():
    slots = 100
    assert lengths(10**6, slots, 8, None, 1.0)[-1] <= 1.5 * slots
    assert lengths(10**6, slots, 8, None, 8.0)[1:] == tuple(
        slots * j for j in range(1, 9)
    )
    independent = lengths(1000, slots, 8, None, None)
    assert all(np.diff(independent) >= 0)
    assert 1000 * (1 - 0.9**8) <= independent[-1] <= 1000


def test_characteristics_of_known_supports():
    gradients = np.zeros((4, 16), np.float32)
    gradients[0, :4] = 1  # all in the first part
    gradients[1, 2:6] = -1  # half of them shared with worker 0
    gradients[2, ::4] = 3  # even
    found = sparsejax.characteristics({"a": gradients[:, :6], "b": gradients[:, 6:]})
    np.testing.assert_allclose(found.density, [0.25, 0.25, 0.25, 0])
    expected = np.diag([1.0, 1, 1, 0])
    expected[0, 1] = expected[1, 0] = 0.5
    expected[0, 2] = expected[2, 0] = 0.25
    expected[1, 2] = expected[2, 1] = 0.25
    np.testing.assert_allclose(found.overlap, expected)
    np.testing.assert_allclose(found.skewness, [4, 2, 1, 0])
    # Workers 0 and 1 have {0..5}, worker 2 adds {8, 12}: 8 of a mean of 3.
    np.testing.assert_allclose(found.densification, 8 / 3, rtol=1e-6)


def test_skewness_of_parts_that_differ_in_length():
    """Five coordinates in parts of three and two: even gradients exceed 1."""
    found = sparsejax.characteristics(np.ones((2, 5)))
    np.testing.assert_allclose(found.skewness, [1.2, 1.2])


def test_characteristics_of_rows():
    gradients = np.zeros((2, 6, 3), np.float32)
    gradients[0, 1, 2] = gradients[1, 1, 0] = gradients[1, 4, 0] = 1
    elements = sparsejax.characteristics(gradients)
    rows = sparsejax.characteristics(gradients, rows=True)
    np.testing.assert_allclose(elements.density, [1 / 18, 2 / 18], rtol=1e-6)
    np.testing.assert_allclose(rows.density, [1 / 6, 2 / 6], rtol=1e-6)
    assert elements.overlap[0, 1] == 0
    assert rows.overlap[0, 1] == 1


@pytest.mark.parametrize(
    "leaves", [[], [jnp.zeros(())], [np.ones(2), np.ones(3)], [np.ones((0, 4))]]
)
def test_characteristics_need_a_worker_axis(leaves):
    with pytest.raises(ValueError, match="gradients: got leaves of shapes"):
        sparsejax.characteristics(leaves)
