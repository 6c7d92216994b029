"""No gradient mass is lost: sum of updates + mean residual = sum of mean gradients."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import testing
from sparsejax.testing._programs import example_params
from tests.cases import CASES, PLAIN, RECIPES, param
from tests.harness import WORKERS

STEPS, FIRST_STEPS = 200, 50


def _conserving(cases):
    return [case for case in cases if case.memory and not case.loses]


# Gradients in bfloat16 round more, so variants of a recipe are tested with them alone.
@pytest.mark.parametrize(
    ("case", "dtype", "view"),
    [param(case, jnp.bfloat16, "shard_map") for case in _conserving(CASES)]
    + [
        param(case, jnp.float32, "jit" if case in PLAIN else "shard_map")
        for case in _conserving(RECIPES)
    ],
)
def test_mass_is_conserved(case, dtype, view, every):
    # Each step rounds the residual once; errors are relative to the sum of magnitudes.
    kept = testing.check_conservation(
        case.make(),
        workers=WORKERS,
        params=example_params(dtype),
        steps=STEPS if every else FIRST_STEPS,
        tolerance=1e-6,
        view=view,
    )
    assert np.abs(kept).max() > 0
