"""Properties that tracing shows: nothing runs here but `init`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax
from sparsejax.testing._programs import (
    example_params,
    gradients,
    has_devices,
    mesh_of,
    traced,
    trainer,
)
from sparsejax.testing._traces import require_kept_types, traces
from sparsejax.testing._values import (
    first_line,
    memory_leaves,
    require,
    require_same_types,
)


def check_replicated(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """`init` and `update` trace, and replicated outputs are proven to be replicated.

    `vmap` refuses an output that is not derived from collectives or constants alone,
    even if the types of `shard_map` accept it.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      params: see `check_contract`.

    Raises:
      AssertionError: with the error of the trace.
    """
    params = example_params() if params is None else params
    with traces(tx, params, workers):
        made = trainer(tx, params, workers, view="simulate")
        drawn = gradients(0, workers, params)
        jax.eval_shape(made.step, params, made.state, drawn)


def check_state_types(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """The state keeps its structure, shapes and dtypes from `init` on.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      params: see `check_contract`.

    Raises:
      AssertionError: naming the first leaf that changes.
    """
    params = example_params() if params is None else params
    made = trainer(tx, params, workers)
    drawn = gradients(0, workers, params)
    _, state, _ = jax.eval_shape(made.step, made.params, made.state, drawn)
    require_kept_types(state, made.state)


def check_strict_promotion(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """The step traces with `jax.numpy_dtype_promotion("strict")`, with equal types.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      params: see `check_contract`.

    Raises:
      AssertionError: with the promotion that is refused.
    """
    params = example_params() if params is None else params
    with jax.numpy_dtype_promotion("strict"):
        try:
            before, after, _ = traced(tx, params, workers)
            require_kept_types(after, before)
        except jax.dtypes.TypePromotionError as error:
            raise AssertionError(
                f"no dtype is promoted implicitly: the trace says {first_line(error)}; "
                f"two arrays of different dtypes meet without `astype`."
            ) from error


def check_wide_types(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """With `jax.enable_x64` the state and the updates have the same types as without.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      params: see `check_contract`.

    Raises:
      AssertionError: naming the first leaf that changes.
    """
    params = example_params() if params is None else params
    simulated = sparsejax.simulate(tx, workers=workers)
    drawn = gradients(0, workers, params)
    rule = "64-bit types change nothing"
    cause = (
        "an array is made without a dtype: give it one, such as "
        "`jnp.zeros(n, jnp.float32)` or `jnp.arange(k, dtype=jnp.int32)`"
    )

    def compare(given, expected, when):
        both = (f"{when} with 64-bit types", "without")
        require_same_types(given, expected, rule, both, cause)

    state = jax.eval_shape(simulated.init, params)
    with jax.enable_x64(True):
        wide = jax.eval_shape(simulated.init, params)
    # An update may refuse a wide state with an error that does not name it.
    compare(wide, state, "after `init`")
    try:
        with jax.enable_x64(True):
            updates, after = jax.eval_shape(simulated.update, drawn, wide)
    except Exception as error:
        found = f"`update` does not trace, {type(error).__name__}: {first_line(error)}"
        raise AssertionError(f"{rule}: {found}; {cause}.") from error
    compare(after, state, "after an update")
    compare(updates, params, "as an update")


def check_abstract_init(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """`init` on `jax.ShapeDtypeStruct`s gives the types of the state.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      params: see `check_contract`.

    Raises:
      AssertionError: naming the first leaf that differs.
    """
    params = example_params() if params is None else params
    shapes = jax.eval_shape(lambda: params)
    if has_devices(workers):
        with jax.set_mesh(mesh_of(workers)):
            abstract, made = jax.eval_shape(tx.init, shapes), tx.init(params)
    else:
        simulated = sparsejax.simulate(tx, workers=workers)
        abstract, made = jax.eval_shape(simulated.init, shapes), simulated.init(params)
    when = ("from shapes", "from arrays")
    cause = "`init` of a part reads values of its arguments"
    require_same_types(abstract, made, "`init` needs shapes only", when, cause)


def check_update_types(
    tx: optax.GradientTransformation, *, workers: int = 4, params: Any = None
) -> None:
    """Updates have the gradient's structure and dtypes, and memories are float32.

    Args:
      tx: see `check_contract`.
      workers: see `check_contract`.
      params: see `check_contract`; by default with leaves in bfloat16 and float16.

    Raises:
      AssertionError: naming the first leaf that differs.
    """
    if params is None:
        params = example_params()
        params["bias"] = params["bias"].astype(jnp.bfloat16)
        params["scale"] = params["scale"].astype(jnp.float16)
    _, state, updates = traced(tx, params, workers)
    require_same_types(
        updates,
        params,
        "updates have the types of the gradients",
        ("as an update", "as a gradient"),
        "a transformation around `sparsify` promotes them",
    )
    dtypes = sorted({str(np.dtype(leaf.dtype)) for leaf in memory_leaves(state)})
    require(
        set(dtypes) <= {"float32"},
        "memories are float32 whatever the gradient's dtype",
        f"found {', '.join(dtypes)}",
        "`Memory.settle` or `Delivery.left` has the gradient's dtype",
    )
