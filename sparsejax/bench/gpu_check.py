"""`python -m sparsejax.bench.gpu_check`: programs for GPUs, compiled without one.

Compiles a step of every recipe for H100s that exist for the compiler only, and prints
the costs of the programs. Nothing runs: the table describes the programs and measures
no time. `make gpu-check` installs the compiler's packages and runs this.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import _xla
from sparsejax.bench import _train
from sparsejax.bench._command import format_rows
from sparsejax.bench._gpu_program import cost_of
from sparsejax.examples._training import RECIPES

DEVICE = pathlib.Path(__file__).with_name("h100_sxm.txtpb")
BANDWIDTH = 3.35e12  # bytes per second of an H100's memory
EXCHANGE, TRAIN = "exchange", "train"
# There is no device to tune kernels on. The tuner would compile each kernel by itself
# and use the first setting that compiles: the same program, in nearly twice the time.
_UNTUNED: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}
# name -> function of a density.
BUILDERS = {name: row.build for name, row in RECIPES.items()} | {"zen": sparsejax.zen}


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles a step of each recipe, and prints one table."""
    parser = argparse.ArgumentParser(
        prog="python -m sparsejax.bench.gpu_check", description=__doc__.split("\n")[0]
    )
    add = parser.add_argument
    add("--recipe", type=lambda text: text.split(","), default=list(BUILDERS))
    add(
        "--step",
        choices=(EXCHANGE, TRAIN),
        default=EXCHANGE,
        help="exchange: one vector with SGD; train: the perceptron of `bench train`; "
        "default: %(default)s",
    )
    add("--n", type=lambda text: int(float(text)), default=100_000_000)
    add("--workers", type=int, default=8)
    add("--density", type=float, default=0.01)
    add("--json", type=pathlib.Path, metavar="FILE", help="also write the rows here")
    options = parser.parse_args(argv)
    if unknown := sorted(set(options.recipe) - set(BUILDERS)):
        parser.error(f"--recipe: unknown {unknown[0]!r}; one of {', '.join(BUILDERS)}")
    mesh = gpu_mesh(options.workers)
    rows = []
    for name in options.recipe:
        recipe = BUILDERS[name](options.density)
        rows.append({"recipe": name, **check(recipe, mesh, options.n, options.step)})
        print(format_rows(rows[-1:]), flush=True)
    print(f"\n{options.step}: {options.workers} H100, jax {jax.__version__}\n")
    print(format_rows(rows))
    if options.json:
        found = {"step": options.step, "n": options.n, "workers": options.workers}
        found |= {"jax": jax.__version__, "rows": rows}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def gpu_mesh(workers: int, hosts: int = 1) -> Mesh:
    """A mesh of H100s that exist for the compiler only.

    Args:
      workers: the number of GPUs.
      hosts: the number of machines with these GPUs, joined by a network.

    Raises:
      RuntimeError: from jax, if the packages of the compiler are missing.
    """
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=DEVICE.read_text(),
        topology=f"{hosts}x1x{workers // hosts}",
    )
    kinds = (AxisType.Auto,)
    return Mesh(np.array(topology.devices), ("data",), axis_types=kinds)


def compiled_step(tx: Any, mesh: Mesh, n: int, kind: str) -> jax.stages.Compiled:
    """A step of `tx`, compiled for the devices of `mesh`."""
    with _xla.traced_for("gpu"):
        return _lowered(tx, mesh, n, kind).compile(compiler_options=_UNTUNED)


def check(recipe: Any, mesh: Mesh, n: int, kind: str = EXCHANGE) -> dict[str, Any]:
    """Compiles a step of `recipe`; returns a row of the table."""
    began = time.perf_counter()
    compiled = compiled_step(optax.chain(recipe, optax.sgd(1e-3)), mesh, n, kind)
    took = time.perf_counter() - began
    cost = cost_of(str(compiled.as_text()))
    memory: Any = compiled.memory_analysis()
    return {
        "passes": round(cost.moved / 4 / n, 2),
        "kernels": cost.kernels,
        "host_loops": cost.host_loops,
        "conditionals": cost.conditionals,
        "sorts": cost.sorts,
        "temporaries": round(memory.temp_size_in_bytes / 4 / n, 2),
        "compile_s": round(took, 1),
        "roofline_ms": round(1e3 * cost.moved / BANDWIDTH, 3),
    }


def _lowered(tx: Any, mesh: Mesh, n: int, kind: str) -> jax.stages.Lowered:
    if kind == TRAIN:
        params = jax.eval_shape(_train.init)
        local = jax.ShapeDtypeStruct((_train.BATCH, _train.SIZES[0]), jnp.float32)
    else:
        params = local = jax.ShapeDtypeStruct((n,), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        state = jax.eval_shape(tx.init, params)
    specs = (P(), sparsejax.state_specs(state, "data"))

    def step(params, state, given):
        if kind == TRAIN:
            _, grads = sparsejax.value_and_grad(_train.loss)(params, given)
        else:
            grads = given[0]
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs
    )

    def placed(spec, tree):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    rows = mesh.size * local.shape[0] if kind == TRAIN else mesh.size
    given = jax.ShapeDtypeStruct((rows, *local.shape[kind == TRAIN :]), jnp.float32)
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(
        placed(P(), params),
        jax.tree.map(placed, specs[1], state, is_leaf=lambda x: isinstance(x, P)),
        placed(P("data"), given),
    )


if __name__ == "__main__":
    main()
