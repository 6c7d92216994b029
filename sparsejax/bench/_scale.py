"""`scale`: bytes and compile time for up to 1024 workers, on virtual devices."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.examples._training import RECIPES


def measure(
    recipes: list[str], n: int, density: float, sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """One row per recipe and number of workers in `sizes`."""
    return [_row(name, n, density, w) for name in recipes for w in sizes]


def _row(name: str, n: int, density: float, workers: int) -> dict[str, Any]:
    devices = jax.devices()
    if workers > len(devices):
        raise ValueError(
            f"scale: {workers} workers need as many devices, jax has {len(devices)}."
        )
    mesh = jax.make_mesh(
        (workers,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[:workers],
    )
    tx = RECIPES[name].build(density)
    shape = jax.ShapeDtypeStruct((n,), jnp.float32)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(tx.init, shape)
    specs = sparsejax.state_specs(state, "data")

    def step(gradient, state):
        updates, state = tx.update(gradient[0], state)
        return updates, state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
    )
    place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (P("data"), specs))
    gradient = jax.ShapeDtypeStruct((workers, n), jnp.float32)
    lowered = jax.jit(mapped, in_shardings=place).lower(gradient, state)
    start = time.perf_counter()
    lowered.compile()
    seconds = time.perf_counter() - start
    return {
        "recipe": name,
        "n": n,
        "density": density,
        "workers": workers,
        "bytes_per_step": round(sparsejax.wire_bytes(tx, shape, workers=workers).least),
        "compile_seconds": seconds,
    }
