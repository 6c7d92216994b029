"""Runs a transformation on eight virtual devices, as a user's step would."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax

WORKERS = 8

PARAMS = {
    "bias": jnp.zeros((20,)),
    "kernel": jnp.zeros((30, 20)),
    "scale": jnp.zeros(()),
    "unused": jnp.zeros((0, 3)),
}


def mesh_of(workers=WORKERS, kind=AxisType.Auto):
    devices = np.asarray(jax.devices()[:workers])
    return jax.sharding.Mesh(devices, ("data",), axis_types=(kind,))


def gradients(step, workers=WORKERS, params=None, dtype=None, seed=0):
    """Laplace gradients [w, ...] whose scale differs between leaves and columns."""
    leaves, treedef = jax.tree.flatten(PARAMS if params is None else params)
    rng = np.random.default_rng([seed, step])

    def draw(i, leaf):
        profile = np.linspace(0.2, 3.0, max(leaf.size, 1))[: leaf.size]
        values = rng.laplace(size=(workers, leaf.size)) * profile * (i + 1)
        return jnp.asarray(values.reshape(workers, *leaf.shape), dtype or leaf.dtype)

    return treedef.unflatten([draw(i, leaf) for i, leaf in enumerate(leaves)])


# For the few programs that run for longer than they compile: see `conftest.py`.
OPTIMIZED = {"xla_backend_optimization_level": 3}


class Trainer(NamedTuple):
    """A jitted, donated step, and the state and parameters that it starts from."""

    step: object  # (params, state, gradients [w, ...]) -> (params, state, updates)
    mesh: jax.sharding.Mesh
    state: object
    params: object

    def shard(self, tree):
        return jax.device_put(tree, NamedSharding(self.mesh, P("data")))

    def start(self):
        """Copies of the first parameters and state: the step donates its inputs."""
        return jax.tree.map(lambda x: x.copy(), (self.params, self.state))

    def advance(self, params, state, drawn):
        """One step, waited for: virtual devices deadlock when steps pile up."""
        return jax.block_until_ready(self.step(params, state, self.shard(drawn)))


def trainer(tx, params=None, *, mesh=None, check_vma=True):
    """The `Trainer` of `tx`; equal arguments share what is compiled."""
    leaves, treedef = jax.tree.flatten(PARAMS if params is None else params)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    strict = jax.config.jax_numpy_dtype_promotion
    return _trainer(tx, treedef, shapes, mesh or mesh_of(), check_vma, strict)


@functools.cache
def _trainer(tx, treedef, shapes, mesh, check_vma, _):
    params = treedef.unflatten([jnp.zeros(*shape) for shape in shapes])
    tx = optax.with_extra_args_support(tx)
    state = sparsejax.init(tx, params, mesh)
    specs = (P(), sparsejax.state_specs(state, "data"))

    def step(params, state, gradients):
        mine = jax.tree.map(lambda g: g[0], gradients)
        updates, state = tx.update(mine, state, params, unknown_argument=1)
        return optax.apply_updates(params, updates), state, updates

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(*specs, P("data")),
        out_specs=(*specs, P()),
        check_vma=check_vma,
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (*specs, P()))
    jitted = jax.jit(mapped, donate_argnums=(0, 1), out_shardings=shardings)
    # Placed, so that the first call compiles for the same shardings as the second.
    params = jax.device_put(params, shardings[0])
    state = jax.tree.map(jax.device_put, state, shardings[1])
    return Trainer(jitted, mesh, state, params)


def run(tx, steps, *, params=None, mesh=None, stream=gradients, **options):
    """Yields `(gradients, updates, state)` of each step, on the host."""
    made = trainer(tx, params, mesh=mesh, **options)
    current, state = made.start()
    for t in range(steps):
        drawn = stream(t)
        current, state, updates = made.advance(current, state, drawn)
        yield jax.device_get((drawn, updates, state))


@functools.cache
def _simulated(tx, workers):
    simulated = sparsejax.simulate(tx, workers=workers)
    return simulated.init, jax.jit(simulated.update)


def run_simulated(tx, steps, *, params=None, workers=WORKERS, stream=gradients):
    """The same under `sparsejax.simulate`."""
    params = PARAMS if params is None else params
    init, update = _simulated(tx, workers)
    state = init(params)
    for t in range(steps):
        drawn = stream(t)
        updates, state = update(drawn, state, params)
        yield jax.device_get((drawn, updates, state))


def flat(tree, lead=()):
    """All leaves as one float64 vector, in the order of the tree."""
    return np.concatenate(
        [
            np.asarray(leaf, np.float64).reshape(*lead, -1)
            for leaf in jax.tree.leaves(tree)
        ],
        axis=-1,
    )


def memory_leaves(state):
    """All arrays of the memories of the sparsejax states in `state`."""
    nodes = jax.tree.leaves(
        state, is_leaf=lambda x: isinstance(x, sparsejax.SparsifyState)
    )
    return jax.tree.leaves(
        [x.memory for x in nodes if isinstance(x, sparsejax.SparsifyState)]
    )


def residuals(state):
    """The residuals [w, n] of the one sparsejax state in `state`, as float64."""
    return np.asarray(memory_leaves(state)[0], np.float64)


def compiled_text(tx):
    """The whole step of `trainer`, as the compiler leaves it."""
    made = trainer(tx)
    lowered = made.step.lower(made.params, made.state, made.shard(gradients(0)))
    return lowered.compile().as_text()
