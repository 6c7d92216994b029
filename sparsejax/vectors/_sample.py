"""A sample of a region, of a size that does not depend on the size of the region."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax import _xla
from sparsejax.vectors._mixing import mixed

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# The number of neighbours that a sample reads together: accelerators read memory in
# pieces of 32 bytes.
_TOGETHER = 8


def sample_in(
    vector: Float[Array, " n"],
    start: Int[Array, ""],
    size: Int[Array, ""],
    *,
    number: int,
) -> Float[Array, " m"]:
    """Values of a region: eight neighbours from each of `number / 8` equal strata.

    Their place in a stratum is random, so that the period of a matrix's rows does not
    distort the sample. A region with fewer coordinates gives some of them twice.

    Args:
      vector: Float[n].
      start: Int32[], the first coordinate of the region.
      size: Int32[], the number of coordinates of the region; `start + size <= n`.
      number: static, at least 1.

    Returns:
      Float[m]: `number`, rounded up to a multiple of 8. Per worker if an argument is.

    Example:
      >>> x = jnp.arange(100.0)
      >>> found = sample_in(x, jnp.int32(40), jnp.int32(20), number=16)
      >>> print(found.size, found.min() >= 40, found.max() < 60)
      16 True True
    """
    strata = -(-number // _TOGETHER)
    order = jnp.arange(strata, dtype=jnp.int32)
    # Barrier: XLA would compute all indices of a constant region while it compiles.
    start, size = _xla.computed_once((start, size))
    # All strata have `width` coordinates, and the first `rest` of them one more.
    width = jax.lax.div(size, jnp.int32(strata))
    rest = size - width * strata
    room = jnp.maximum(width - (_TOGETHER - 1), 1).astype(jnp.uint32)
    place = mixed(order.astype(jnp.uint32), jnp.uint32(0)) % room
    first = order * width + jnp.minimum(order, rest) + place.astype(jnp.int32)
    inside = first[:, None] + np.arange(_TOGETHER, dtype=np.int32)[None]
    # In a small region, neighbours may be beyond the end; in an empty one all are.
    index = start + jax.lax.rem(inside, jnp.maximum(size, 1))
    index = jnp.minimum(index, vector.size - 1).reshape(-1)
    found = vector.at[index].get(mode="promise_in_bounds")
    # Barrier against fusion: each pass over the sample would gather again.
    return _xla.computed_once(found)
