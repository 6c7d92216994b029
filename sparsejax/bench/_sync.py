"""`sync`: the exchange alone, with donated gradients, as inside a training step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.bench._timing import SETTLED, interleaved_medians
from sparsejax.recipes._table import TABLE

if TYPE_CHECKING:
    from jaxtyping import Array, Float

DATA = P("data")


def measure(
    recipes: list[str],
    mesh: jax.sharding.Mesh,
    n: int,
    density: float,
    repeats: int,
    widths: Sequence[int] = (32,),
) -> list[dict[str, Any]]:
    """One row per recipe and width: median times, and the bytes of a usual step."""
    runs = {}
    for name in recipes:
        row = TABLE[name]
        for bits in widths if row.has_widths else (32,):
            label = name if bits == 32 else f"{name} {bits} bits"
            more = {"value_bits": bits} if row.has_widths else {}
            runs[label] = _Exchange(row.build(density, **more), mesh, n)

    def prepare(name, turn):
        runs[name].draw(turn)

    medians = interleaved_medians(
        {name: run.step for name, run in runs.items()},
        repeats,
        warm_up=SETTLED,
        prepare=prepare,
    )
    return [
        {
            "recipe": name,
            "n": n,
            "density": float(run.density()),
            "workers": mesh.size,
            "ms_median": medians[name],
            "bytes_per_step": run.bytes_per_step,
        }
        for name, run in runs.items()
    ]


class _Exchange:
    """One recipe's compiled exchange, its state, and the gradients of the next step."""

    def __init__(
        self, tx: optax.GradientTransformation, mesh: jax.sharding.Mesh, n: int
    ):
        shape = jax.ShapeDtypeStruct((n,), jnp.float32)
        self.bytes_per_step = round(
            sparsejax.wire_bytes(tx, shape, workers=mesh.size).least
        )
        self.state = sparsejax.init(tx, shape, mesh)
        specs = sparsejax.state_specs(self.state, "data")

        def exchange(gradient, state):
            updates, state = tx.update(gradient[0], state)
            # One row per worker, so the updates can reuse the gradient's memory.
            return sparsejax.localize(updates)[None], state

        place = functools.partial(NamedSharding, mesh)
        self._exchange = jax.jit(
            jax.shard_map(
                exchange, mesh=mesh, in_specs=(DATA, specs), out_specs=(DATA, specs)
            ),
            donate_argnums=(0, 1),
            out_shardings=jax.tree.map(place, (DATA, specs)),
        )
        self._draw = jax.jit(
            jax.shard_map(
                lambda old, step: _laplace(old, step),
                mesh=mesh,
                in_specs=(DATA, P()),
                out_specs=DATA,
            ),
            donate_argnums=0,
        )
        zeros = jax.jit(
            lambda: jnp.zeros((mesh.size, n), jnp.float32), out_shardings=place(DATA)
        )
        self.gradient = zeros()

    def draw(self, step: int) -> None:
        """Draws the gradients of the next step, in the memory of the last update."""
        self.gradient = jax.block_until_ready(self._draw(self.gradient, step))

    def step(self) -> Float[Array, "w n"]:
        self.gradient, self.state = self._exchange(self.gradient, self.state)
        return self.gradient

    def density(self) -> float:
        return jax.device_get(sparsejax.report(self.state).density)


def _laplace(old: Float[Array, "1 n"], step: Any) -> Float[Array, "1 n"]:
    """Cheap fresh Laplace noise, from a hash of coordinate, step and worker."""
    worker = jax.lax.axis_index("data").astype(jnp.uint32)
    seed = worker * jnp.uint32(0x9E3779B9) + step.astype(jnp.uint32) * jnp.uint32(
        0x85EBCA6B
    )
    bits = jax.lax.broadcasted_iota(jnp.uint32, old.shape, 1) + seed
    for factor in (0x7FEB352D, 0x846CA68B):
        bits = (bits ^ (bits >> 16)) * jnp.uint32(factor)
    bits = bits ^ (bits >> 16)
    uniform = ((bits >> 8) + 1).astype(jnp.float32) * 2.0**-24
    return jnp.where(bits & 1 == 1, 1.0, -1.0) * jnp.log(uniform) + 0.0 * old
