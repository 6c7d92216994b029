"""One of several processes for `test_processes.py`: a sharded model, plain `jax.jit`.

    python -m tests.sharded_program DIRECTORY RECIPE ...

The mesh is ("data", "model"): the shards of the model are the devices of one process,
and the exchange is between processes. The program trains with each RECIPE, exdyna
included; one worker's gradient is NaN in one step. It prints one line of JSON.
"""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType

import sparsejax
from tests.jit_training import SHARDED, Setting, jit_loop
from tests.restart_program import abstract, connect

STEPS, BAD_STEP = 5, 2
RECIPES = {
    "exdyna": lambda: sparsejax.exdyna(0.1),
    "topk": lambda: sparsejax.topk(0.1),
    "marsit": lambda: sparsejax.marsit(period=None),
}


class Spoilt(Setting):
    """In one step the batch of the last worker has a NaN."""

    def drawn(self, step):
        batch = super().drawn(step)
        if step == BAD_STEP:
            batch["x"][-1, 0] = np.nan
        return batch

    def place(self, tree, specs):
        # `jax.device_put` compares the values of all processes, and NaN equals nothing.
        def put(x, spec):
            sharding = jax.NamedSharding(self.mesh, spec)
            return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

        return {name: put(x, specs[name]) for name, x in tree.items()}


def setting(devices):
    """Workers along the first axis, and two shards of the model along the second."""
    devices = np.asarray(devices).reshape(-1, 2)
    assert all(a.process_index == b.process_index for a, b in devices)
    kinds = (AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=kinds)
    return Spoilt(mesh, "data", SHARDED, explicit=False)


def local(x):
    """The part of an array that this process holds, and zeros elsewhere."""
    whole = np.zeros(x.shape, x.dtype)
    for shard in x.addressable_shards:
        whole[shard.index] = shard.data
    return whole


def result(name, at, directory=None):
    """The common results of all processes; with a directory, restored ones too."""
    tx = optax.chain(RECIPES[name](), optax.sgd(0.1))
    loop, dropped = jit_loop(tx, at), []
    now = (loop.params, loop.state)
    for t in range(STEPS):
        now = loop.train(1, (t, *now))
        dropped.append(local(sparsejax.report(now[1]).dropped).tolist())
    sparsejax.check_replicas(now, at.mesh)
    # Each process holds all shards of the model.
    params = {k: local(x).tolist() for k, x in now[0].items()}
    said = {"params": params, "dropped": dropped}
    if directory:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory / name, now)
            checkpointer.wait_until_finished()
            target = jax.tree.map(abstract, (loop.params, loop.state))
            again = checkpointer.restore(directory / name, target)
        after = [loop.train(1, (STEPS, *start)) for start in (now, again)]
        said["restored"] = all(
            local(a).tobytes() == local(b).tobytes()
            for a, b in zip(*map(jax.tree.leaves, after), strict=True)
        )
    return said


def main(directory, *recipes):
    connect()
    at = setting(jax.devices())
    saved = {"exdyna": pathlib.Path(directory)}
    said = {name: result(name, at, saved.get(name)) for name in recipes}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
