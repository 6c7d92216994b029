"""No gradient mass is lost: sum of updates + mean residual = sum of mean gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, RECIPES, param
from tests.harness import PARAMS, WORKERS, flat, gradients, residuals, run

STEPS = 200


def _conserving(cases):
    return [case for case in cases if case.memory and not case.loses]


# Gradients in bfloat16 round more: it is they that variants of a recipe are tried with.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [param(case, jnp.bfloat16) for case in _conserving(CASES)]
    + [param(case, jnp.float32) for case in _conserving(RECIPES)],
)
def test_mass_is_conserved(case, dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)

    def stream(t):
        return gradients(t, params=params)

    given = np.zeros(flat(params).size)
    received = np.zeros_like(given)
    scale = np.zeros_like(given)
    for drawn, updates, state in run(case.make(), STEPS, params=params, stream=stream):
        mine = flat(drawn, (WORKERS,))
        given += mine.mean(axis=0)
        received += flat(updates)
        scale += np.abs(mine).mean(axis=0)
        kept = residuals(state)
    # Each step adds one rounding of what is kept; relative to all that was added up.
    error = np.abs(received + kept.mean(axis=0) - given) / scale
    assert error.max() < 1e-6
    assert np.abs(kept).max() > 0
