"""Finds the devices of an example: virtual, local, or of several processes."""

from __future__ import annotations

import os
import sys

import jax

_COUNT_FLAG = "--xla_force_host_platform_device_count"


def connect(workers: int) -> None:
    """Prepares jax to find `workers` devices. Call it before anything else of jax.

    Splits the CPU into virtual devices, unless `XLA_FLAGS` says already into how many,
    and joins the other processes where `JAX_COORDINATOR_ADDRESS` is set. Their number
    and the own index are `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`; under a scheduler
    that jax knows, such as Slurm, it finds them itself. From then on an error ends this
    process at once, and with it the others, which would wait for it.

    Args:
      workers: virtual devices of all processes together.
    """
    processes = os.environ.get("JAX_NUM_PROCESSES")
    flags = os.environ.get("XLA_FLAGS", "")
    if _COUNT_FLAG not in flags:
        local = max(1, workers // int(processes or 1))
        os.environ["XLA_FLAGS"] = f"{flags} {_COUNT_FLAG}={local}".strip()
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        sys.excepthook = _end_at_once
        if not jax.distributed.is_initialized():
            index = os.environ.get("JAX_PROCESS_ID")
            jax.distributed.initialize(
                num_processes=None if processes is None else int(processes),
                process_id=None if index is None else int(index),
            )


def _end_at_once(*error) -> None:
    sys.__excepthook__(*error)
    sys.stdout.flush()
    os._exit(1)  # at a usual exit, jax waits for the other processes


def make_mesh(workers: int | None) -> jax.sharding.Mesh:
    """A mesh of one axis, "data".

    Args:
      workers: how many devices to use; None for all.

    Raises:
      ValueError: if there are fewer devices than workers, or if a worker count would
        leave devices of other processes idle.
    """
    devices = jax.devices()
    count = len(devices) if workers is None else workers
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"--workers: got {count}, and there are {len(devices)} devices. The CPU "
            f"can be split into any number with XLA_FLAGS={_COUNT_FLAG}={count}, set "
            f"before jax starts."
        )
    if jax.process_count() > 1 and count != len(devices):
        raise ValueError(
            f"--workers: got {count}, but the {jax.process_count()} processes have "
            f"{len(devices)} devices, and each must take part with all of its own. "
            f"Leave the option out."
        )
    return jax.make_mesh(
        (count,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[:count],
    )
