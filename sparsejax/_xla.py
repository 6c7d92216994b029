"""Compiler facts that the code depends on: barriers, backends and versions.

The accumulated vector should overwrite the donated residual, and the next residual
should overwrite the vector. XLA copies the old value instead if a later operation may
still read it, and fusion recomputes a value in each kernel that reads the value. The
barriers against both have names here that say the intent.

Once jax 0.10 is no longer supported, delete `barriers_are_dropped`,
`barriers_merge_types` and `explicit_shards_are_gathered` with the branches that call
them. Once 0.11.0 is no longer supported, delete the version in `top_k_may_be_unstable`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


_PLATFORM: contextvars.ContextVar[str | None] = contextvars.ContextVar(
    "platform", default=None
)


def on_cpu() -> bool:
    """Whether programs are traced for the CPU. Chooses between the forms of a program.

    A loop whose trip count is known at run time only is cheap on a CPU. An accelerator
    waits for the host in every turn of such a loop, so its forms have none.
    """
    return (_PLATFORM.get() or jax.default_backend()) == "cpu"


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Traces the forms of another platform, such as "gpu", in this context.

    For compilation without the device, and for tests of all forms on a CPU. A function
    that `jax.jit` has traced before keeps the form of that trace.
    """
    token = _PLATFORM.set(platform)
    try:
        yield
    finally:
        _PLATFORM.reset(token)


def barriers_are_dropped() -> bool:
    """Whether XLA removes barriers before fusion: on CPU before jax 0.11."""
    return jax.__version_info__ < (0, 11) and on_cpu()


def barriers_merge_types() -> bool:
    """Whether a barrier gives all its values the same varying axes: before jax 0.11."""
    return jax.__version_info__ < (0, 11)


def explicit_shards_are_gathered() -> bool:
    """Whether a `shard_map` over some axes gathers operands whole: before jax 0.11.

    It concerns operands that are sharded over another, explicit axis of the mesh.
    """
    return jax.__version_info__ < (0, 11)


def top_k_may_be_unstable() -> bool:
    """Whether to pass `is_stable=False` to `jax.lax.top_k`: on accelerators.

    With it a GPU needs one radix selection; for the stable form it sorts everything.
    The argument exists from jax 0.11.1 on.
    """
    return jax.__version_info__ >= (0, 11, 1) and not on_cpu()


def computed_once(x: Any) -> Any:
    """`x` with a barrier: fusion would recompute it in each kernel that reads it."""
    return jax.lax.optimization_barrier(x)


def read_before(read: Any, written: Any) -> tuple[Any, Any]:
    """Returns both unchanged; `written` is overwritten only after `read` is computed.

    The barrier stops copy insertion: in that order `written` can be overwritten in
    place; without an order XLA copies `written` first.
    """
    return jax.lax.optimization_barrier((read, written))


def computed_together(parts: Any) -> Any:
    """`parts` of a message; on accelerators all are computed before any part is used.

    Otherwise the scheduler puts off small parts, and the message stays in memory.
    """
    return parts if on_cpu() else jax.lax.optimization_barrier(parts)


def after(x: Any, until: Any) -> Any:
    """`x`, unchanged, for operations that must not start before `until` is computed."""
    if barriers_merge_types():
        return x
    return jax.lax.optimization_barrier((x, until))[0]


def late_zeros(n: int, until: Int[Array, ""]) -> Float[Array, " n"]:
    """Zeros [n], written only after the non-negative number `until` is computed.

    XLA writes constants at the start of a program, while the gradients are alive, so
    the constants need memory of their own. Late zeros reuse the gradients' memory.
    """
    return jnp.full((n,), jnp.minimum(until, 0).astype(jnp.float32))


def values_at(
    vector: Float[Array, " n *D"], indices: Int[Array, " k"]
) -> Float[Array, " k *D"]:
    """The values of `vector` at `indices`; 0 for indices out of range.

    A CPU keeps several loads under way only in a short loop. With the computation of
    the indices fused in, the loop takes four times as long; XLA fuses them in anyway
    where `barriers_are_dropped`.
    """
    if on_cpu():
        indices = computed_once(indices)
    return vector.at[indices].get(mode="fill", fill_value=0)


def insert(
    zeros: Float[Array, " n *D"],
    indices: Int[Array, " k"],
    values: Float[Array, " k *D"],
) -> Float[Array, " n *D"]:
    """Writes `values` into `zeros` at distinct `indices`; drops indices out of range.

    On CPU a scatter-add is faster than a scatter: its loads overlap, and stores to cold
    lines do not.
    """
    if on_cpu():
        return zeros.at[indices].add(values, mode="drop")
    return zeros.at[indices].set(values, mode="drop")


def always_compiled(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, compiled even under `jax.disable_jit`.

    That mode is for looking at a loss step by step. The hundreds of small operations of
    an exchange, each on every device, would take a minute.
    """

    def compiled(*args):
        if not jax.config.jax_disable_jit:
            return fun(*args)
        with jax.disable_jit(False):
            return jax.jit(fun)(*args)

    return compiled
