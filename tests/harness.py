"""`sparsejax.testing` with the tests' own defaults: eight devices, one small tree."""

from __future__ import annotations

import jax

from sparsejax.testing import _programs
from sparsejax.testing._programs import mesh_of as _mesh_of
from sparsejax.testing._values import flat, memory_leaves, residuals

__all__ = ["flat", "memory_leaves", "residuals"]

WORKERS = 8
PARAMS = _programs.example_params()

# Options for the few programs whose run takes longer than their compilation: see
# `conftest.py`.
OPTIMIZED = {"xla_backend_optimization_level": 3}


def mesh_of(workers=WORKERS, kind=jax.sharding.AxisType.Auto):
    return _mesh_of(workers, kind)


def gradients(step, workers=WORKERS, params=None, dtype=None, seed=0):
    """Laplace gradients [w, ...] whose scale differs between leaves and columns."""
    params = PARAMS if params is None else params
    return _programs.gradients(step, workers, params, dtype, seed)


def trainer(tx, params=None, *, view="shard_map", mesh=None, check_vma=True):
    """The step of `tx` on devices; equal arguments share the compiled step."""
    params = PARAMS if params is None else params
    return _programs.trainer(
        tx, params, WORKERS, view=view, mesh=mesh, check_vma=check_vma
    )


def run(tx, steps, *, params=None, stream=gradients, **options):
    """Yields `(gradients, updates, state)` of each step on devices, on the host."""
    params = PARAMS if params is None else params
    options = {"view": "shard_map", **options}
    return _programs.run(tx, steps, params, WORKERS, stream=stream, **options)


def run_simulated(tx, steps, *, params=None, workers=WORKERS, stream=gradients):
    """Yields the same as `run`, under `sparsejax.simulate`."""
    params = PARAMS if params is None else params
    return _programs.run(tx, steps, params, workers, stream=stream, view="simulate")


def compiled_text(tx):
    """The text of the compiled step of `trainer`."""
    made = trainer(tx)
    lowered = made.step.lower(made.params, made.state, made.shard(gradients(0)))
    return lowered.compile().as_text()
