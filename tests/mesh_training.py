"""A small model, trained on meshes of any axes, and its expected result."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import flat

kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def make_mesh(shape, names, kind=AUTO, **options):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), **options)


def loss_of(params, x):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - 1.0) ** 2)


def start_params(seed=0, hidden=12):
    rng = np.random.default_rng(seed)
    shapes = {"w1": (6, hidden), "w2": (hidden, 4)}
    return {k: np.float32(rng.normal(size=shape) / 4) for k, shape in shapes.items()}


def batch_of(t, size=32):
    rng = np.random.default_rng([7, t])
    return np.float32(rng.normal(size=(size, 6)))


def train(step, mesh, params, state, specs, batch_axes, steps=4, **options):
    param_specs = options.pop("param_specs", P())
    out = (param_specs, specs)
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(param_specs, specs, P(batch_axes)),
            out_specs=out,
            **options,
        )
    )
    # Arrays are placed: the first step compiles for the shardings of later steps.
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out)
    params, state = jax.device_put((params, state), shardings)
    for t in range(steps):
        batch = jax.device_put(batch_of(t), NamedSharding(mesh, P(batch_axes)))
        params, state = mapped(params, state, batch)
    return params, state


@functools.cache
def reference(tx, workers, steps=4):
    """The same training under `simulate`."""
    params = start_params()
    simulated = sparsejax.simulate(tx, workers=workers)
    state = simulated.init(params)

    @jax.jit
    def step(params, state, batch):
        batch = batch.reshape(workers, -1, 6)
        grads = jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(params, batch)
        updates, state = simulated.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for t in range(steps):
        params, state = step(params, state, batch_of(t))
    return params, state


def assert_close(mine, theirs):
    np.testing.assert_allclose(flat(mine), flat(theirs), rtol=1e-5, atol=1e-6)


@functools.cache  # Tests share its compiled programs.
def make_tx(axis_name):
    return optax.chain(sparsejax.exdyna(0.1, axis_name=axis_name), optax.sgd(0.5))
