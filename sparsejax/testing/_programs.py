"""Compiled steps of a transformation, in each view of the workers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax

# An odd number of coordinates, a scalar, and a leaf without coordinates.
SHAPES = {"bias": (20,), "kernel": (30, 20), "scale": (), "unused": (0, 3)}

Stream = Callable[[int], Any]


def example_params(dtype: Any = jnp.float32) -> dict[str, Any]:
    """A small tree of zeros: vectors, a matrix, a scalar and an empty leaf."""
    return {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}


def gradients(step: int, workers: int, params: Any, dtype=None, seed: int = 0) -> Any:
    """Laplace gradients [w, ...] whose scale differs between leaves and columns.

    They are numpy arrays: the caller may change them, and nothing is compiled.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(params)
    shapes = tuple((leaf.shape, np.dtype(dtype or leaf.dtype)) for leaf in leaves)
    return treedef.unflatten([x.copy() for x in _drawn(shapes, step, workers, seed)])


@functools.lru_cache(maxsize=2000)  # Many methods get the same gradients.
def _drawn(shapes, step, workers, seed):
    rng = np.random.default_rng([seed, step])

    def draw(i, shape, dtype):
        size = math.prod(shape)
        profile = np.linspace(0.2, 3.0, max(size, 1))[:size]
        values = rng.laplace(size=(workers, size)) * profile * (i + 1)
        return values.reshape(workers, *shape).astype(dtype)

    return [draw(i, *shape) for i, shape in enumerate(shapes)]


class Trainer(NamedTuple):
    """A compiled step, and the parameters and the state that the step starts from.

    Attributes:
      step: `(params, state, gradients [w, ...]) -> (params, state, updates)`; donates
        the first two arguments.
      mesh: the mesh of the workers; `None` if the workers are simulated.
      state: the state after `init`.
      params: the first parameters, zeros.
    """

    step: Any
    mesh: Mesh | None
    state: Any
    params: Any

    def shard(self, tree: Any) -> Any:
        """Places gradients [w, ...], one row on each worker."""
        if self.mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self.mesh, P("data")))

    def start(self) -> tuple[Any, Any]:
        """Copies of the first parameters and state, since the step donates both."""
        return jax.device_put((self.params, self.state), may_alias=False)

    def advance(self, params: Any, state: Any, drawn: Any) -> tuple[Any, Any, Any]:
        """Runs one step and waits: virtual devices deadlock when steps pile up."""
        return jax.block_until_ready(self.step(params, state, self.shard(drawn)))


def mesh_of(workers: int, kind: AxisType = AxisType.Auto) -> Mesh:
    """The mesh of the first `workers` devices, with the axis "data"."""
    devices = np.asarray(jax.devices()[:workers])
    return Mesh(devices, ("data",), axis_types=(kind,))


def has_devices(workers: int) -> bool:
    """Whether this process alone has a device for each worker."""
    return jax.process_count() == 1 and jax.device_count() >= workers


def trainer(
    tx: optax.GradientTransformation,
    params: Any,
    workers: int,
    *,
    view: str | None = None,
    mesh: Mesh | None = None,
    check_vma: bool = True,
) -> Trainer:
    """The `Trainer` of `tx`; equal arguments share one compiled program.

    Args:
      tx: a transformation that exchanges over the axis "data".
      params: pytree of arrays; only shapes and dtypes count.
      workers: the number of workers.
      view: "shard_map" binds the axis, each worker on a device of its own; "jit" is
        plain `jax.jit` on the same devices; "simulate" uses one device. By default
        "simulate" if there are fewer devices than workers, and "shard_map" otherwise.
      mesh: the mesh, if not the first devices.
      check_vma: as in `jax.shard_map`.
    """
    leaves, treedef = jax.tree.flatten(params)
    shapes = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
    if view is None:
        view = "shard_map" if mesh or has_devices(workers) else "simulate"
    if view == "simulate":
        return _simulated(tx, treedef, shapes, workers)
    return _placed(tx, treedef, shapes, mesh or mesh_of(workers), check_vma, view)


def _zeros(treedef: Any, shapes: Any) -> Any:
    return treedef.unflatten([np.zeros(*shape) for shape in shapes])


@functools.cache
def _simulated(tx, treedef, shapes, workers):
    params = _zeros(treedef, shapes)
    simulated = sparsejax.simulate(tx, workers=workers)

    def step(params, state, gradients):
        updates, state = simulated.update(gradients, state, params, unknown_argument=1)
        return optax.apply_updates(params, updates), state, updates

    return Trainer(jax.jit(step), None, simulated.init(params), params)


@functools.cache
def _placed(tx, treedef, shapes, mesh, check_vma, view):
    params = _zeros(treedef, shapes)
    tx = optax.with_extra_args_support(tx)
    state = sparsejax.init(tx, params, mesh)
    specs = (P(), sparsejax.state_specs(state, "data"))

    step = _plain(tx, mesh) if view == "jit" else _mapped(tx, mesh, specs, check_vma)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (*specs, P()))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings)
    # Placed, so that the first call compiles for the same shardings as the second.
    params = jax.device_put(params, shardings[0])
    state = jax.tree.map(jax.device_put, state, shardings[1])
    return Trainer(jitted, mesh, state, params)


def _mapped(tx, mesh, specs, check_vma=True):
    def step(params, state, gradients):
        mine = jax.tree.map(lambda g: g[0], gradients)
        updates, state = tx.update(mine, state, params, unknown_argument=1)
        return optax.apply_updates(params, updates), state, updates

    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(*specs, P("data")),
        out_specs=(*specs, P()),
        check_vma=check_vma,
    )


def _plain(tx, mesh):
    """The step of plain `jax.jit`, which binds no axis."""

    def step(params, state, gradients):
        rows = jax.tree.map(sparsejax.PerWorker, gradients)
        # As if the mesh was set around the call.
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            updates, state = tx.update(rows, state, params, unknown_argument=1)
        return optax.apply_updates(params, updates), state, updates

    return step


def traced(
    tx: optax.GradientTransformation, params: Any, workers: int
) -> tuple[Any, Any, Any]:
    """Shapes of (state after `init`, state after an update, updates).

    Nothing is compiled, and `init` is traced too.
    """
    drawn = gradients(0, workers, params)
    if not has_devices(workers):
        simulated = sparsejax.simulate(tx, workers=workers)
        before = jax.eval_shape(simulated.init, params)
        updates, after = jax.eval_shape(simulated.update, drawn, before, params)
        return before, after, updates
    tx, mesh = optax.with_extra_args_support(tx), mesh_of(workers)
    with jax.set_mesh(mesh):
        before = jax.eval_shape(tx.init, params)
    step = _mapped(tx, mesh, (P(), sparsejax.state_specs(before, "data")))
    _, after, updates = jax.eval_shape(step, params, before, drawn)
    return before, after, updates


def run(
    tx: optax.GradientTransformation,
    steps: int,
    params: Any,
    workers: int,
    *,
    stream: Stream | None = None,
    **options: Any,
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields `(gradients, updates, state)` of each step, on the host.

    Args:
      tx: see `trainer`.
      steps: the number of steps.
      params: see `trainer`.
      workers: see `trainer`.
      stream: `step -> gradients [w, ...]`; `gradients` by default.
      **options: further arguments of `trainer`.
    """
    made = trainer(tx, params, workers, **options)
    current, state = made.start()
    for t in range(steps):
        drawn = stream(t) if stream else gradients(t, workers, params)
        current, state, updates = made.advance(current, state, drawn)
        yield jax.device_get((drawn, updates, state))
