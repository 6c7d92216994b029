"""Properties on real devices: `shard_map`, replicas, and bytes of the program."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

import sparsejax
from sparsejax._checks import path_name
from sparsejax.testing._programs import example_params, gradients, run, trainer
from sparsejax.testing._values import (
    flat,
    memory_leaves,
    require,
    require_equal,
    require_same_types,
)


def check_devices_equal_simulation(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """Five steps of `shard_map` give the numbers of `simulate`, up to rounding.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`; at most the number of devices.
      params: see `check_contract`.

    Raises:
      AssertionError: with the first value that differs.
    """
    params = example_params() if params is None else params
    real = run(tx, 5, params, workers, view="shard_map")
    simulated = run(tx, 5, params, workers, view="simulate")
    rule = "devices equal the simulation"
    cause = "a part depends on more than its arguments and the collectives of `workers`"
    close = {"rtol": 1e-5, "atol": 1e-6}
    for (_, mine, state), (_, theirs, other) in zip(real, simulated, strict=True):
        when = ("on devices", "simulated")
        require_same_types(state, other, rule, when, cause)
        require_equal(flat(mine), flat(theirs), f"{rule} in updates", cause, **close)
        pairs = zip(memory_leaves(state), memory_leaves(other), strict=True)
        for kept, reference in pairs:
            require_equal(kept, reference, f"{rule} in the memory", cause, **close)
        expected = sparsejax.reports(other)
        for path, report in sparsejax.reports(state).items():
            for field in ("sent", "demand"):
                given, same = getattr(report, field), getattr(expected[path], field)
                require_equal(given, same, f"{rule} in `report.{field}`", cause)


def check_no_recompilation(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """Three steps run one compiled program.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`; at most the number of devices.
      params: see `check_contract`.

    Raises:
      AssertionError: with the number of programs.
    """
    params = example_params() if params is None else params
    made = trainer(tx, params, workers, view="shard_map")
    current, state = made.start()
    for t in range(3):
        drawn = gradients(t, workers, params)
        current, state, _ = made.advance(current, state, drawn)
    count = made.step._cache_size()
    require(
        count == 1,
        "a step compiles once",
        f"3 steps compiled {count} programs",
        "an update changes a type, a sharding or static structure of the state",
    )


def check_replicas_equal(
    tx: optax.GradientTransformation,
    *,
    workers: int = 4,
    params: Any = None,
    steps: int = 50,
) -> None:
    """After many steps all devices hold the same bits of all replicated arrays.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`; at most the number of devices.
      params: see `check_contract`.
      steps: the number of steps.

    Raises:
      AssertionError: naming the first leaf that differs between devices.
    """
    params = example_params() if params is None else params
    made = trainer(tx, params, workers, view="shard_map")
    current, state = made.start()
    specs = sparsejax.state_specs(state, "data")
    for t in range(steps):
        drawn = gradients(t, workers, params)
        current, state, updates = made.advance(current, state, drawn)
    # Per-worker leaves are not compared: `None` is not a leaf.
    replicated = jax.tree.map(
        lambda leaf, spec: None if "data" in spec else leaf, state, specs
    )
    trees = {"params": current, "updates": updates, "state": replicated}
    for path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        first, *others = (np.asarray(s.data) for s in leaf.addressable_shards)
        require(
            len(others) == workers - 1
            and all(first.tobytes() == other.tobytes() for other in others),
            f"replicas stay bitwise equal for {steps} steps",
            f"`{path_name(path)}` differs between devices",
            "a scatter adds duplicate indices in any order, or a worker's own value "
            "takes part in a replicated one",
        )


def check_unchecked_types(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """`check_vma=False` gives the same bits. Not part of `check_contract`.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`; at most the number of devices.
      params: see `check_contract`.

    Raises:
      AssertionError: with the update that is furthest off.
    """
    params = example_params() if params is None else params
    unchecked = run(tx, 2, params, workers, check_vma=False, view="shard_map")
    *_, (_, updates, _) = unchecked
    *_, (_, expected, _) = run(tx, 2, params, workers, view="shard_map")
    require_equal(
        flat(updates),
        flat(expected),
        "updates are the same with `check_vma=False`",
        "a part branches on types instead of calling `workers`",
    )


def check_wire_bytes(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """The collectives of the compiled program move the bytes that `wire_bytes` counts.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`; at most the number of devices.
      params: see `check_contract`.

    Raises:
      AssertionError: with both numbers.
    """
    params = example_params() if params is None else params
    made = trainer(tx, params, workers, view="shard_map")
    current, state = made.start()
    drawn = made.shard(gradients(0, workers, params))
    compiled = made.step.lower(current, state, drawn).compile()
    static = sparsejax.wire_bytes(tx, params, workers=workers)
    moved = sparsejax.compiled_wire_bytes(compiled)
    same = np.isclose(moved.total, static.total) and all(
        np.isclose(moved.by_kind.get(kind, 0), static.by_kind.get(kind, 0))
        for kind in {*moved.by_kind, *static.by_kind}
    )
    require(
        static.total > 0 and same,
        "the program moves the bytes that `wire_bytes` counts",
        f"it moves {moved.by_kind} and {static.by_kind} are counted",
        "the compiler widened narrow floats (bitcast them to uint16), or merged or "
        "removed a collective",
    )
