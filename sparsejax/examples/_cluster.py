"""Finds the devices for an example: virtual, local, or those of several processes."""

from __future__ import annotations

import os
import sys

import jax

_COUNT_FLAG = "--xla_force_host_platform_device_count"


def connect(workers: int) -> None:
    """Prepares jax to find `workers` devices. Call this before any other jax function.

    Splits the CPU into virtual devices, unless `XLA_FLAGS` already sets their number.
    Joins the other processes if `JAX_COORDINATOR_ADDRESS` is set: `JAX_NUM_PROCESSES`
    is their number, and `JAX_PROCESS_ID` the index of this process. Under a scheduler
    that jax supports, such as Slurm, jax finds both numbers. From then on an error ends
    this process and all others at once; the others would otherwise wait forever.

    Args:
      workers: the number of virtual devices of all processes together.
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
    os._exit(1)  # a normal exit of jax waits for the other processes


def make_mesh(
    workers: int | None, axes: tuple[str, ...] = ("data",)
) -> jax.sharding.Mesh:
    """A mesh of the devices.

    Args:
      workers: the number of devices to use; None for all.
      axes: the names of its axes. From the last axis to the second, each gets two
        devices if the number of devices left is a multiple of four, and otherwise one.
        The first axis gets the other devices.

    Raises:
      ValueError: if there are fewer devices than workers, or if devices of other
        processes would be idle.
    """
    devices = jax.devices()
    count = len(devices) if workers is None else workers
    if not 1 <= count <= len(devices):
        raise ValueError(
            f"--workers: got {count}, but jax has {len(devices)} devices. To split the "
            f"CPU into as many, set XLA_FLAGS={_COUNT_FLAG}={count} before jax starts."
        )
    if jax.process_count() > 1 and count != len(devices):
        raise ValueError(
            f"--workers: got {count}, but the {jax.process_count()} processes have "
            f"{len(devices)} devices, and every device must take part. Leave the "
            f"option out."
        )
    return jax.make_mesh(
        _shape(count, len(axes)),
        axes,
        axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
        devices=devices[:count],
    )


def _shape(count: int, axes: int) -> tuple[int, ...]:
    """Sizes of the axes: the first one gets all devices that the others leave."""
    others: list[int] = []
    for _ in range(axes - 1):
        halves = count % 4 == 0
        others.insert(0, 2 if halves else 1)
        count = count // 2 if halves else count
    return (count, *others)
