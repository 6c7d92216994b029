"""The part of each worker in a step, and the number of coordinates to send from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped


def parts_of(step: Int[Array, ""], worker_count: int) -> Int[Array, " w"]:
    """Int32[w], replicated: the part of each worker, `(step + worker) mod w`.

    Args:
      step: Int32[], replicated.
      worker_count: static, w.

    Example:
      >>> print(parts_of(jnp.int32(1), 4))
      [1 2 3 0]
    """
    ranks = jnp.arange(worker_count, dtype=jnp.int32)
    return (step % worker_count + ranks) % worker_count


def by_part(
    values: Shaped[Array, " w ..."], step: Int[Array, ""], worker_count: int
) -> Shaped[Array, " w ..."]:
    """Reorders `values` from the order of the workers to the order of their parts.

    Args:
      values: [w, ...], replicated: one entry per worker.
      step: Int32[], replicated.
      worker_count: static, w.

    Example:
      >>> print(by_part(parts_of(jnp.int32(1), 4), jnp.int32(1), 4))
      [0 1 2 3]
    """
    parts = jnp.arange(worker_count, dtype=jnp.int32)
    return values[(parts - step % worker_count) % worker_count]


def quotas(
    step: Int[Array, ""], n: int, target: int | Int[Array, ""], worker_count: int
) -> Int[Array, " w"]:
    """The number of coordinates that each part should send in this step.

    Each part gets `floor(target / w)`. The remainder goes one by one to parts that
    change every `w` steps: if the same parts always got the remainder and
    `target < w`, some parts would never be sent.

    Args:
      step: Int32[], replicated.
      n: static, the number of coordinates.
      target: int or Int32[], replicated: coordinates to deliver in this step.
      worker_count: static, w.

    Returns:
      Int32[w], replicated, by part; sums to `target` exactly.

    Example:
      >>> print(quotas(jnp.int32(0), 100, 10, 4))
      [3 3 2 2]
    """
    share, rest = target // worker_count, target % worker_count
    # Near density 1, only the longer parts of `even` have room for one more coordinate.
    few = max(1, n % worker_count)
    if isinstance(target, int):
        holders = few if share == n // worker_count else worker_count
    else:
        holders = jnp.where(share == n // worker_count, few, worker_count)
    parts = jnp.arange(worker_count, dtype=jnp.int32)
    turn = (parts + step // worker_count % holders) % holders
    extra = (parts < holders) & (turn < rest)
    return share + extra.astype(jnp.int32)
