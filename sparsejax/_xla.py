"""Compiler facts that the code depends on: barriers, backends and versions.

A donated residual should be overwritten by the accumulated vector, and the vector by
the next residual. XLA copies instead wherever it believes that an old value is still
needed, and computes a value again in each kernel that uses it. Every barrier against
that has a name here, which says the intent.

Once jax 0.10 is no longer supported, delete `barriers_are_dropped` and
`barriers_merge_types` with the branches that ask them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def on_cpu() -> bool:
    """Whether programs are made for a CPU."""
    return jax.default_backend() == "cpu"


def barriers_are_dropped() -> bool:
    """Whether barriers are gone before the compiler fuses: on CPU before jax 0.11."""
    return jax.__version_info__ < (0, 11) and on_cpu()


def barriers_merge_types() -> bool:
    """Whether a barrier types all that passes it alike: before jax 0.11."""
    return jax.__version_info__ < (0, 11)


def computed_once(x: Any) -> Any:
    """`x`, which XLA must not compute again in each kernel that uses it."""
    return jax.lax.optimization_barrier(x)


def read_before(read: Any, written: Any) -> tuple[Any, Any]:
    """Both as they are; no write over `written` starts before `read` is known.

    Then `written` is overwritten in place, where XLA would otherwise copy it.
    """
    return jax.lax.optimization_barrier((read, written))


def after(x: Any, until: Any) -> Any:
    """`x`, but not before `until` is known; of the same types."""
    if barriers_merge_types():
        return x
    return jax.lax.optimization_barrier((x, until))[0]


def late_zeros(n: int, until: Int[Array, ""]) -> Float[Array, " n"]:
    """Zeros [n] that are not written before the non-negative number `until` is known.

    XLA writes constants at the start of a program. There they need memory of their own
    while the gradients are alive; late zeros take over the gradients' memory.
    """
    return jnp.full((n,), jnp.minimum(until, 0).astype(jnp.float32))


def insert(
    zeros: Float[Array, " n *D"],
    indices: Int[Array, " k"],
    values: Float[Array, " k *D"],
) -> Float[Array, " n *D"]:
    """`values` at distinct `indices` of zeros; indices out of range are left out.

    On CPU a scatter-add is faster than a scatter: its loads overlap, and stores to cold
    lines do not.
    """
    if on_cpu():
        return zeros.at[indices].add(values, mode="drop")
    return zeros.at[indices].set(values, mode="drop")
