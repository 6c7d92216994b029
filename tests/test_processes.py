"""Overflow in two processes: agreed, dense, reported, and nobody waits for ever."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
jax.distributed.initialize()
import sparsejax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
w, n = mesh.size, 501
assert jax.process_count() == 2
for exchange in (
    sparsejax.exchanges.hashed_owners(),
    sparsejax.exchanges.recursive_doubling(),
):
    tx = sparsejax.sparsify(
        sparsejax.sparsifiers.nonzero(0.02),
        exchange=exchange,
        memory=sparsejax.memories.none(),
    )
    params = jax.device_put(jnp.zeros(n), NamedSharding(mesh, P()))
    state = sparsejax.init(tx, params, mesh)
    specs = sparsejax.state_specs(state, "data")
    step = jax.jit(jax.shard_map(
        lambda g, s: tx.update(g[0], s), mesh=mesh,
        in_specs=(P("data"), specs), out_specs=(P(), specs),
    ))
    # Only the last worker, in the second process, has too many in the second step.
    for many in (5, 100, 3):
        drawn = np.zeros((w, n), np.float32)
        drawn[:, [0, n - 1]] = 1 + np.arange(w)[:, None]
        drawn[-1, :many] = 7
        update, state = step(
            jax.make_array_from_callback(
                drawn.shape, NamedSharding(mesh, P("data")), lambda i: drawn[i]
            ),
            state,
        )
        found = np.asarray(update.addressable_data(0))
        np.testing.assert_array_equal(found, drawn.sum(axis=0) / w)
        details = sparsejax.report(state).details
        overflow = bool(details.overflow.addressable_data(0))
        assert overflow == (many == 100), (exchange.name, many, overflow)
print("agreed", jax.process_index())
"""


def test_overflow_is_agreed_by_two_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    root = pathlib.Path(__file__).parents[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _started(_PROGRAM, port, index)],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": str(root),
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        results = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index, (out, err) in enumerate(results):
        assert f"agreed {index}" in out, err[-2000:]


def _started(program: str, port: int, index: int) -> str:
    arguments = f"'localhost:{port}', num_processes=2, process_id={index}"
    return program.replace("initialize()", f"initialize({arguments})")
