"""A training process for `test_restarts.py`: saves, is killed, and continues.

    python -m tests.restart_program DIRECTORY WORKERS STEPS [VIEW]

With JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set, the program is
one of several processes. It resumes from the newest checkpoint in DIRECTORY, prints
`step T` after each step, and one line of JSON at the end. A checkpoint of another
number of workers is resized. VIEW is "shard_map", or "jit" for a step that binds no
axis, or "rounds" for rounds of local steps whose exchange is one round late.
`processes_program.py` uses the same functions.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax

SAVE_EVERY = 5
SIZE = 48
BATCH = 24 * 8  # divisible by 8, 4 and 6
LOCAL_STEPS = 2  # in each round


def connect(**options):
    """Joins the other processes, if this is one of several."""
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize(
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
            process_id=int(os.environ["JAX_PROCESS_ID"]),
            **options,
        )


def make_tx():
    return optax.chain(
        sparsejax.per_worker(optax.trace(0.5)),
        sparsejax.exdyna(0.1),
        optax.adam(0.01),
    )


def make_rounds():
    """Rounds, instead of a transformation; the schedule ends after 15 of them."""
    outer = sparsejax.delayed(sparsejax.sparseloco(0.1, chunk=64))
    return sparsejax.rounds(
        loss_of,
        optax.adam(optax.linear_schedule(0.02, 0.0, 15 * LOCAL_STEPS)),
        optax.chain(outer, optax.sgd(1.0)),
        steps=LOCAL_STEPS,
    )


def make_params():
    return {"w": jnp.zeros((SIZE, 4)), "b": jnp.zeros(4)}


def loss_of(params, x):
    target = jnp.sin(jnp.arange(4, dtype=jnp.float32))[None]
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"][None] - target) ** 2)


def batch_of(t):
    rng = np.random.default_rng([5, t])
    return rng.normal(size=(BATCH, SIZE)).astype(np.float32)


def start(tx, mesh):
    """Parameters and state before the first step."""
    params = jax.device_put(make_params(), NamedSharding(mesh, P()))
    state = sparsejax.init(tx, params, mesh)
    # Arrays are placed: the first step compiles for the shardings of later steps.
    state = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)),
        state, sparsejax.state_specs(state),
    )  # fmt: skip
    return params, state


def batches_of(t):
    """The batches of round t, [H, BATCH, SIZE]."""
    first = t * LOCAL_STEPS
    return np.stack([batch_of(s) for s in range(first, first + LOCAL_STEPS)])


def placed(rows, mesh, axis=0):
    """The global array of `rows`; each process provides its own rows."""
    own = np.split(rows, jax.process_count(), axis)[jax.process_index()]
    sharding = NamedSharding(mesh, P(*[None] * axis, "data"))
    return jax.make_array_from_process_local_data(sharding, own, rows.shape)


def make_step(tx, mesh, specs, view="shard_map"):
    def step(params, state, x):
        loss, grads = sparsejax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def mine(params, state, x):
        params, state, loss = step(params, state, x)
        return params, state, jax.lax.pmean(loss, "data")

    def training_round(params, state, x):
        params, state, losses = tx.step(params, state, x)
        return params, state, losses[-1]

    out_specs = (P(), specs, P())
    if view == "rounds":
        step = training_round
    mapped = jax.shard_map(
        mine, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=out_specs
    )
    return jax.jit(
        mapped if view == "shard_map" else step,
        out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs),
    )


def recipe_state(state):
    return state.outer[0] if hasattr(state, "outer") else state[1]


def pending(state):
    """The mean pending gradient, in float64."""
    rows = fetched(recipe_state(state).memory.per_worker)
    return rows.astype(np.float64).mean(axis=0)


def fetched(tree):
    """Fetches the whole of every array to the host of each process."""
    return multihost_utils.process_allgather(tree, tiled=True)


def digest(tree):
    """A hash of all bits of all workers."""
    content = b"".join(x.tobytes() for x in jax.tree.leaves(fetched(tree)))
    return hashlib.sha256(content).hexdigest()


def save(checkpointer, path, params, state, workers):
    checkpointer.save(path / "tree", (params, state))
    checkpointer.wait_until_finished()
    # Written last: a checkpoint without this file is incomplete.
    if jax.process_index() == 0:
        (path / "workers").write_text(str(workers))


def restore(checkpointer, path, tx, params, mesh):
    """The saved step, parameters and state, for the workers of `mesh`."""
    saved = int((path / "workers").read_text())
    if saved == mesh.size:
        state = sparsejax.init(tx, params, mesh)
        target = jax.tree.map(abstract, (params, state))
        return checkpointer.restore(path / "tree", target), None
    # Another number of workers: restores the old rows as numpy arrays on the host.
    old_mesh = jax.sharding.AbstractMesh((saved,), ("data",))
    params = jax.eval_shape(make_params)
    with jax.sharding.use_abstract_mesh(old_mesh):
        shapes = jax.eval_shape(tx.init, params)
    target = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), (params, shapes))
    params, state = checkpointer.restore(path / "tree", target)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    before = pending(state)
    state = sparsejax.resize_workers(tx, state, params, mesh)
    return (params, state), float(np.abs(pending(state) - before).max())


def held_out(params):
    """The loss on many batches that training does not use."""
    own = jax.tree.map(lambda p: p.addressable_data(0), params)
    loss = jax.jit(loss_of)
    return float(np.mean([loss(own, batch_of(1000 + t)) for t in range(16)]))


def abstract(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def main(directory, workers, steps, view="shard_map"):
    connect()
    directory = pathlib.Path(directory)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:workers]), ("data",))
    in_rounds = view == "rounds"
    tx = make_rounds() if in_rounds else make_tx()
    params, state = start(tx, mesh)
    checkpointer = ocp.StandardCheckpointer()
    saved = sorted(directory.glob("step-*/workers"))
    first, error = 0, None
    if saved:
        path = saved[-1].parent
        first = int(path.name.removeprefix("step-"))
        (params, state), error = restore(checkpointer, path, tx, params, mesh)
    step = make_step(tx, mesh, sparsejax.state_specs(state), view)
    for t in range(first, steps):
        rows = batches_of(t) if in_rounds else batch_of(t)
        with jax.set_mesh(mesh):
            params, state, loss = step(params, state, placed(rows, mesh, rows.ndim - 2))
        loss.block_until_ready()
        if (t + 1) % SAVE_EVERY == 0:
            path = directory / f"step-{t + 1:04d}"
            save(checkpointer, path, params, state, workers)
        print(f"step {t + 1}", flush=True)
    sparsejax.check_replicas((params, state), mesh)
    report = sparsejax.report(state)
    result = {
        "first": first,
        "loss": float(loss).hex(),
        "held_out": held_out(params),
        "digest": digest((params, state)),
        "sent": int(report.sent),
        "rows": recipe_state(state).memory.per_worker.shape[0],
        "resize_error": error,
        "steps_of_state": int(recipe_state(state).step),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
