"""No gradient mass is lost: sum of updates + mean residual = sum of mean gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import CASES, parametrize
from tests.harness import PARAMS, WORKERS, flat, gradients, residuals, run

STEPS = 200


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@parametrize(case for case in CASES if case.memory and not case.loses)
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
