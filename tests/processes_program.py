"""One of several processes for `test_processes.py`: runs a whole training job.

    python -m tests.processes_program DIRECTORY [CHECKPOINT]

The program trains from the start, or from the CHECKPOINT of a job with other processes,
and compares the result with the same workers simulated on one device. It saves into
DIRECTORY, restores from there, continues with fewer workers, and prints one line of
JSON.
"""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.restart_program import (
    abstract,
    batch_of,
    connect,
    digest,
    fetched,
    loss_of,
    make_step,
    make_tx,
    pending,
    placed,
    restore,
    save,
    start,
)

STEPS = 5


def mesh_of(devices):
    return jax.sharding.Mesh(np.asarray(devices), ("data",))


def train(step, mesh, params, state, steps, first=0):
    """Parameters, state, and the losses."""
    losses = []
    for t in range(first, first + steps):
        params, state, loss = step(params, state, placed(batch_of(t), mesh))
        losses.append(float(loss))
    return params, state, losses


def simulate(tx, workers, params, state, steps):
    """Trains like `train`, but on one device, from numpy arrays."""
    tx = sparsejax.simulate(tx, workers=workers)

    @jax.jit
    def step(params, state, rows):
        rows = rows.reshape(workers, -1, rows.shape[-1])
        gradients = jax.vmap(jax.grad(loss_of), in_axes=(None, 0))(params, rows)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for t in range(steps):
        params, state = step(params, state, batch_of(t))
    return params, state


def difference(found, expected):
    """The largest relative difference of floats, and whether all else is equal."""
    worst, equal = 0.0, True
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            scale = max(np.abs(b).max(), 1e-30)
            worst = max(worst, float(np.abs(a - np.asarray(b)).max() / scale))
        else:
            equal = equal and bool((np.asarray(a) == np.asarray(b)).all())
    return worst, equal


def main(directory, checkpoint=None):
    connect()
    path = pathlib.Path(directory)
    mesh = mesh_of(jax.devices())
    tx = make_tx()
    params, state = start(tx, mesh)
    target = jax.tree.map(abstract, (params, state))
    checkpointer = ocp.StandardCheckpointer()
    error = None
    if checkpoint:
        old = pathlib.Path(checkpoint)
        (params, state), error = restore(checkpointer, old, tx, params, mesh)
    step = make_step(tx, mesh, sparsejax.state_specs(state))
    result = {"started": digest((params, state)), "errors": [error]}

    begin = fetched((params, state))
    params, state, result["losses"] = train(step, mesh, params, state, STEPS)
    result["row"] = sparsejax.log_row(sparsejax.report(state))
    sparsejax.check_replicas((params, state), mesh)
    found = fetched((params, state))
    if jax.process_index() == 0:
        expected = simulate(tx, mesh.size, *begin, STEPS)
        result["difference"] = difference(found, expected)
        result["expected_row"] = sparsejax.log_row(sparsejax.report(expected[1]))

    save(checkpointer, path, params, state, mesh.size)
    result["saved"] = digest((params, state))
    again = checkpointer.restore(path / "tree", target)
    result["next"] = [
        digest(train(step, mesh, *begin, 1, first=STEPS)[:2])
        for begin in ((params, state), again)
    ]

    if jax.local_device_count() > 1:
        # Every process continues with its first device.
        first = {d.process_index: d for d in reversed(jax.devices())}
        mesh = mesh_of([first[i] for i in range(jax.process_count())])
        before = pending(state)
        # The copy goes through the host: jax cannot move arrays between meshes of
        # several processes.
        params = jax.device_put(jax.device_get(params), NamedSharding(mesh, P()))
        state = sparsejax.resize_workers(tx, state, params, mesh)
        result["errors"].append(float(np.abs(pending(state) - before).max()))
        step = make_step(tx, mesh, sparsejax.state_specs(state))
        params, state, losses = train(step, mesh, params, state, 2, first=STEPS)
        result["losses"] += losses
        sparsejax.check_replicas((params, state), mesh)
    result["workers"] = state[1].memory.per_worker.shape[0]
    result["steps_of_state"] = int(state[1].step)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
