"""Accumulation piece by piece equals accumulation in one go."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import _gradient, _xla
from sparsejax._gradient import Gradient
from sparsejax._layout import Layout
from tests.harness import flat, gradients, run

# Leaves shorter than a piece, alone and in sequence; of one piece; of several pieces,
# with and without a rest; without coordinates; and in two precisions.
PIECE = 64
PARAMS = {
    "a": jnp.zeros((3,)),
    "b": jnp.zeros((5, 7)),
    "c": jnp.zeros((PIECE,)),
    "d": jnp.zeros((2, PIECE)),
    "e": jnp.zeros((11, 23)),
    "f": jnp.zeros((0, 3)),
    "g": jnp.zeros(()),
    "h": jnp.zeros((PIECE + 1,), jnp.bfloat16),
    "i": jnp.zeros((9,), jnp.bfloat16),
}

RECIPES = {
    "exdyna": lambda **options: sparsejax.exdyna(0.05, **options),
    "topk": lambda **options: sparsejax.topk(0.05, **options),
    "dgc": lambda **options: sparsejax.dgc(0.05, **options),  # two buffers
}


def poisoned(step):
    """Gradients with NaN on one worker in one step."""
    drawn = gradients(step, params=PARAMS)
    if step == 2:
        drawn["e"][3, 0, 0] = np.nan
    return drawn


def both(monkeypatch, make, steps):
    """The steps of `make()` with accumulation in one go, and piece by piece."""
    monkeypatch.setattr(_gradient, "_PIECE", PIECE)
    monkeypatch.setattr(_xla, "barriers_are_dropped", lambda: False)
    results = []
    for large in (1 << 30, 0):
        monkeypatch.setattr(_gradient, "_LARGE", large)
        results.append(list(run(make(), steps, params=PARAMS, stream=poisoned)))
    return results


@pytest.mark.sampled
@pytest.mark.parametrize("nonfinite", ["drop", "propagate"])
@pytest.mark.parametrize("name", RECIPES)
def test_by_piece_as_at_once(monkeypatch, name, nonfinite):
    whole, pieces = both(monkeypatch, lambda: RECIPES[name](nonfinite=nonfinite), 4)
    assert np.any(whole[2][2].report.dropped)
    for one, other in zip(*map(jax.tree.leaves, (whole, pieces)), strict=True):
        # NumPy treats two NaN as equal in its own types only.
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        np.testing.assert_array_equal(one, other)


def test_mean_square_by_piece(monkeypatch):
    """The scale of marsit follows the gradient's root mean square."""
    whole, pieces = both(monkeypatch, sparsejax.marsit, 1)
    one, other = (np.abs(flat(result[0][1])) for result in (whole, pieces))
    assert np.all(one > 0)
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_rows_are_joined_where_they_are_small(monkeypatch):
    monkeypatch.setattr(_gradient, "_PIECE", PIECE)
    monkeypatch.setattr(_gradient, "_LARGE", 0)
    monkeypatch.setattr(_xla, "barriers_are_dropped", lambda: False)
    sizes = [3, 35, PIECE, 2 * PIECE, 0, 1, PIECE + 1, 9]
    leaves = [jnp.full((size,), i, jnp.bfloat16) for i, size in enumerate(sizes)]
    layout = Layout.of(leaves)
    rows = Gradient.of(leaves, layout, jnp.zeros((1, layout.n))).rows
    assert [row.size for row in rows] == [38, PIECE, 2 * PIECE, 1, PIECE + 1, 9]
    # Without a residual to overwrite, there is one row.
    (whole,) = Gradient.of(leaves, layout, ()).rows
    np.testing.assert_array_equal(
        jnp.concatenate([row.astype(jnp.float32) for row in rows], axis=1), whole
    )
