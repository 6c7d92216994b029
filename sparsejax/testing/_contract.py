"""`check_contract`: all properties, in the order in which failures explain most."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax._checks import check_count
from sparsejax._transform import SparsifyTransformation
from sparsejax.parts import Exchange, Memory, Sparsifier
from sparsejax.testing import _choices, _devices, _mass, _memory, _shapes, _steps
from sparsejax.testing._programs import example_params, has_devices


def check_contract(
    tx: optax.GradientTransformation,
    *,
    workers: int = 4,
    params: Any = None,
    conserves: bool = True,
) -> None:
    """Checks that your method keeps all promises of sparsejax's own methods.

    With at least `workers` devices in this process the steps run on them, and also
    simulated; with fewer they are simulated only. A CPU has four devices with
    `XLA_FLAGS=--xla_force_host_platform_device_count=4`. Most of the time goes into
    compiling five or six small programs.

    Each property is a function of this module:

    - `check_memory`: the leaves of the residual, and no collective;
    - `check_replicated`: the update traces, and outputs are proven to be replicated;
    - `check_choices`: choices are as the sparsifier declares;
    - `check_state_types`, `check_strict_promotion`, `check_wide_types`,
      `check_abstract_init`, `check_update_types`: structure, shapes and dtypes;
    - `check_conservation`, in float32, and for methods with a memory in bfloat16 too:
      no gradient mass is lost;
    - `check_zero_gradients`, `check_nonfinite`: zeros, NaN and infinity. In each step,
      counts and thresholds of the report agree with each other;
    - `check_tiny_tree`, `check_one_worker`, `check_few_coordinates`: edges;
    - on devices `check_devices_equal_simulation`, `check_no_recompilation`,
      `check_replicas_equal`, `check_wire_bytes`.

    Args:
      tx: a transformation made with `sparsejax.sparsify` over the axis "data", with the
        policy `nonfinite="drop"`.
      workers: the number of workers, at least 2.
      params: pytree of float32 arrays whose shapes the gradients have, with at least
        one coordinate; by default a small tree with a matrix, a scalar and an empty
        leaf.
      conserves: whether the method promises that the sum of updates + the mean residual
        is the sum of mean gradients. False for momentum in the memory, and for
        methods without a memory that leave coordinates out.

    Raises:
      AssertionError: for the first property that does not hold, in one sentence that
        names the property, the value found and a likely cause.
      TypeError: if `tx` is not a transformation, but for example a `Sparsifier`.
      ValueError: if `workers` is less than 2, if `params` has no coordinate, or for a
        transformation over another axis, or with another policy.

    Example:
      >>> import jax.numpy as jnp, sparsejax
      >>> from sparsejax import testing
      >>> from sparsejax.parts import Choice, Sparsifier
      >>> def select(vector, state, step):  # the odd coordinates, then the even ones
      ...     slots = -(-step.n // 2)
      ...     indices = 2 * jnp.arange(slots, dtype=jnp.int32) + step.index % 2
      ...     indices = jnp.minimum(indices, step.n)  # empty slots hold n
      ...     return Choice(indices, jnp.int32(slots), jnp.float32(0)), state
      >>> tx = sparsejax.sparsify(
      ...     Sparsifier(select, "agreed"),
      ...     exchange=sparsejax.exchanges.union(),
      ...     memory=sparsejax.memories.error_feedback(),
      ... )
      >>> testing.check_contract(tx, workers=2)
    """
    _check_arguments(tx, workers, params)
    params = example_params() if params is None else params
    given: dict[str, Any] = {"workers": workers, "params": params}
    for check in (
        _memory.check_memory,
        _shapes.check_replicated,
        _choices.check_choices,
        _shapes.check_state_types,
        _shapes.check_strict_promotion,
        _shapes.check_wide_types,
        _shapes.check_abstract_init,
    ):
        check(tx, **given)
    _shapes.check_update_types(tx, workers=workers)
    if conserves:
        kept = _mass.check_conservation(tx, **given, tolerance=1e-5)
        # Without a memory, the rounding of a mean to bfloat16 has no place to stay.
        if kept is not None:
            narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            _mass.check_conservation(tx, workers=workers, params=narrow, tolerance=1e-5)
    _steps.check_zero_gradients(tx, **given)
    _steps.check_nonfinite(tx, **given)
    _steps.check_tiny_tree(tx, workers=workers)
    _mass.check_one_worker(tx, params=params, conserves=conserves)
    _mass.check_few_coordinates(tx, workers=workers, conserves=conserves)
    if has_devices(workers):
        for check in (
            _devices.check_devices_equal_simulation,
            _devices.check_no_recompilation,
            _devices.check_replicas_equal,
            _devices.check_wire_bytes,
        ):
            check(tx, **given)


def _check_arguments(tx: Any, workers: Any, params: Any) -> None:
    """Raises TypeError or ValueError, as `check_contract` says."""
    if isinstance(tx, Sparsifier | Exchange | Memory):
        raise TypeError(
            f"tx: got a `{type(tx).__name__}`, expected a transformation. Build it "
            f"first: `sparsejax.sparsify(sparsifier, exchange=..., memory=...)`."
        )
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"tx: got a `{type(tx).__name__}`, expected a transformation, such as the "
            f"result of `sparsejax.sparsify(...)`."
        )
    if check_count("workers", workers) < 2:
        raise ValueError(f"workers: got {workers}, expected 2 or more.")
    if params is not None and not sum(map(jnp.size, jax.tree.leaves(params))):
        raise ValueError(
            "params: got a tree without coordinates, expected at least one. "
            "`testing.check_tiny_tree(tx)` alone checks a tree without leaves."
        )
    if not isinstance(tx, SparsifyTransformation):
        return
    if tx.parts.workers.axes != ("data",):
        raise ValueError(
            f"tx: got a transformation over the axis {tx.parts.workers.axis_name!r}, "
            f"and the checks bind the axis 'data'. Make it with `axis_name=\"data\"` "
            f"to check it: the parts see their workers through `step.workers` alone."
        )
    if tx.nonfinite != "drop":
        raise ValueError(
            f"tx: got a transformation with `nonfinite={tx.nonfinite!r}`, whose "
            f"updates may be NaN, and `check_nonfinite` expects that a gradient that "
            f'is not finite is left out. Make it with `nonfinite="drop"` to check '
            f"it: the policy belongs to `sparsify`, not to the parts."
        )
