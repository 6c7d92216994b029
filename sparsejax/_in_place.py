"""Keeping n-sized buffers in place: what XLA needs to be told.

A residual that is donated should be overwritten by the accumulated vector, and that by
the next residual. XLA copies instead wherever it believes that an old value is still
needed. All that is said about it stands here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

    from sparsejax._base import Memory


def _barriers_are_dropped() -> bool:
    """Whether barriers are gone before the compiler fuses: on CPU before jax 0.11."""
    return jax.__version_info__ < (0, 11) and jax.default_backend() == "cpu"


def accumulate(
    memory: Memory,
    gradient: Float[Array, "1 n"],
    kept: Any,
    step: Int[Array, ""],
    bound: float,
) -> tuple[Float[Array, "1 n"], Any]:
    """`memory.accumulate` cut at +-`bound`, in the place of the first leaf of `kept`.

    Without a barrier the sum is computed again inside each kernel that uses it, so
    that `kept` outlives it and is copied. The arrays keep the leading axis with which
    they are stored: a reshape inside the kernel of the sum forbids XLA to overwrite its
    operand.
    """

    def bounded(kept):
        both = memory.accumulate(gradient, kept)
        return jax.tree.map(lambda x: jnp.clip(x, -bound, bound), both)

    vector, residual = bounded(kept)
    leaves, treedef = jax.tree.flatten(kept)
    if not leaves or not _barriers_are_dropped():
        return jax.lax.optimization_barrier(vector), residual

    def body(_, vector):
        return bounded(treedef.unflatten([vector, *leaves[1:]]))[0]

    # A loop whose trip count, 1, is only known at run time is a barrier that stays.
    once = jnp.minimum(step, 0) + 1
    return jax.lax.fori_loop(0, once, body, leaves[0]), residual


def late_zeros(n: int, after: Int[Array, ""]) -> Float[Array, " n"]:
    """Zeros [n] that are not written before the non-negative number `after` is known.

    Constants are written first thing otherwise, and need memory of their own while the
    gradients are alive; late ones take over the gradients' memory.
    """
    return jnp.full((n,), jnp.minimum(after, 0).astype(jnp.float32))
