"""`train`: whole training steps of an MLP, against dense and against no exchange."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.bench._timing import SETTLED, interleaved_medians
from sparsejax.examples._training import RECIPES

SIZES = (784, 4096, 4096, 784)
BATCH = 32  # per worker
NO_EXCHANGE = "no exchange"


def measure(
    recipes: list[str],
    mesh: jax.sharding.Mesh,
    density: float,
    repeats: int,
    local_steps: int = 1,
    delayed: bool = False,
    batch: int = BATCH,
) -> list[dict[str, Any]]:
    """One row per recipe, and one row for steps without an exchange.

    With `delayed`, one more row for each recipe that `sparsejax.delayed` accepts.

    With `local_steps` above 1, recipes train in rounds of that many steps. All numbers
    are still per step.
    """
    exchanges: dict[str, Any] = {NO_EXCHANGE: None}
    exchanges |= {name: RECIPES[name].build(density) for name in recipes}
    if delayed:
        exchanges |= _late(exchanges)
    runs = {
        name: _Training(recipe, mesh, local_steps, batch)
        for name, recipe in exchanges.items()
    }
    medians = interleaved_medians(
        {name: run.advance for name, run in runs.items()}, repeats, warm_up=SETTLED
    )
    medians = {name: ms / local_steps for name, ms in medians.items()}
    return [
        {
            "recipe": name,
            "n": run.n,
            "density": run.density(),
            "workers": mesh.size,
            "local_steps": local_steps,
            "batch": batch,
            "ms_median": medians[name],
            "bytes_per_step": run.bytes_per_step,
            "times_no_exchange": medians[name] / medians[NO_EXCHANGE],
        }
        for name, run in runs.items()
    ]


def _late(exchanges: dict[str, Any]) -> dict[str, Any]:
    """The late form of each exchange that `sparsejax.delayed` accepts."""
    found = {}
    for name, recipe in exchanges.items():
        with contextlib.suppress(TypeError, ValueError):
            found[f"{name}, delayed"] = sparsejax.delayed(recipe)
    return found


class _Training:
    """One recipe's compiled step, with parameters, optimizer state and data."""

    def __init__(
        self, recipe: Any, mesh: jax.sharding.Mesh, local_steps: int, batch: int
    ):
        place = functools.partial(NamedSharding, mesh)
        self.mesh = mesh
        self.params = jax.jit(init, out_shardings=place(P()))()
        self.n = sum(p.size for p in jax.tree.leaves(self.params))
        inner, shape, spec = optax.sgd(1e-3), (batch * mesh.size, SIZES[0]), P("data")
        if local_steps > 1:
            shape, spec = (local_steps, *shape), P(None, "data")
        if recipe is None:
            self.params = jax.jit(
                lambda p: jax.tree.map(
                    lambda x: jnp.broadcast_to(x, (mesh.size, *x.shape)), p
                ),
                out_shardings=place(P("data")),
            )(self.params)
            self.state, self.bytes_per_step = inner.init(()), 0
            step = _plain(jax.value_and_grad, inner)
            step = _apart(_repeated(step) if local_steps > 1 else step, mesh, spec)
        else:
            if local_steps == 1:
                tx = optax.chain(recipe, inner)
                step = _plain(sparsejax.value_and_grad, tx)
            else:
                outer = optax.chain(recipe, optax.sgd(1.0))
                tx = sparsejax.rounds(loss, inner, outer, steps=local_steps)
                step = _in_rounds(tx)
            self.bytes_per_step = round(
                sparsejax.wire_bytes(tx, self.params, workers=mesh.size).least
            )
            self.state = sparsejax.init(tx, self.params, mesh)
        self._step = jax.jit(step, donate_argnums=(0, 1))
        self.batch = jax.jit(
            lambda: jax.random.normal(jax.random.key(1), shape),
            out_shardings=place(spec),
        )()

    def advance(self):
        """Makes the steps between two exchanges, and one exchange."""
        with jax.set_mesh(self.mesh):
            self.params, self.state = self._step(self.params, self.state, self.batch)
        return self.params

    def density(self) -> float:
        found = list(sparsejax.reports(self.state).values())
        return float(jax.device_get(found[0].density)) if found else 0.0


def _plain(gradient: Callable[..., Any], tx: Any) -> Callable[..., Any]:
    """A step: `(params, state, batch) -> (params, state)`."""

    def step(params, state, batch):
        _, grads = gradient(loss)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _repeated(step: Callable[..., Any]) -> Callable[..., Any]:
    """Several steps in one program, like a round; batches are [H, b, ...]."""

    def steps(params, state, batches):
        def one(carry, batch):
            return step(*carry, batch), None

        return jax.lax.scan(one, (params, state), batches)[0]

    return steps


def _in_rounds(training: sparsejax.Rounds) -> Callable[..., Any]:
    """A round: `(params, state, batches) -> (params, state)`."""

    def step(params, state, batches):
        return training.step(params, state, batches)[:2]

    return step


def _apart(
    step: Callable[..., Any], mesh: jax.sharding.Mesh, batch: P
) -> Callable[..., Any]:
    """`step`, run by each worker alone, with parameters [w, ...].

    A plain loop would run products of stacked matrices, which are slower.
    """

    def mine(params, state, batch):
        new, state = step(jax.tree.map(lambda p: p[0], params), state, batch)
        return jax.tree.map(lambda p: p[None], new), state

    specs = (P("data"), P())
    return jax.shard_map(mine, mesh=mesh, in_specs=(*specs, batch), out_specs=specs)


def init() -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(SIZES) - 1)
    return [
        jax.random.normal(key, shape) / jnp.sqrt(float(shape[0]))
        for key, *shape in zip(keys, SIZES, SIZES[1:], strict=False)
    ]


def loss(params, x):
    y = x
    for i, weights in enumerate(params):
        y = y @ weights
        y = jax.nn.relu(y) if i < len(params) - 1 else y
    return jnp.mean((y - x) ** 2)
