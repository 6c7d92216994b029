"""`characteristics`: measures how sparse gradients are, and how much they overlap."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.planning._arguments import check_arrays
from sparsejax.vectors._ratio import ratio

if TYPE_CHECKING:
    from jaxtyping import Array, Float


class Characteristics(NamedTuple):
    """The sparsity of the workers' gradients, and the overlap of their non-zeros.

    Attributes:
      density: Float[w], fraction of non-zeros of each worker.
      overlap: Float[w, w], `|I_i & I_j| / min(|I_i|, |I_j|)` of the workers' non-zeros;
        0 where a worker has no non-zeros.
      densification: Float[], density of the sum of all workers over the mean density,
        from 1 (same support) to w (no overlap); 0 without non-zeros. The sum counts the
        union of the supports, including values that cancel.
      skewness: Float[w], largest over mean density of w equal contiguous parts of each
        gradient, from 1 (even) to w (all in one part); 0 without non-zeros. If w does
        not divide n, the last parts are shorter, and even gradients exceed 1 by up to
        w/n.
    """

    density: Float[Array, " w"]
    overlap: Float[Array, "w w"]
    densification: Float[Array, ""]
    skewness: Float[Array, " w"]


def characteristics(gradients: Any, *, rows: bool = False) -> Characteristics:
    """Measures density, overlap, densification and skewness of workers' gradients.

    Needs the gradients of all workers in one place. Use this function to choose a
    method before training, and not in every step.

    Args:
      gradients: pytree of arrays [w, ...], per worker along the first axis.
      rows: whether to count the V rows of leaves [w, V, ...] instead of elements. A row
        is non-zero if any of its elements is non-zero.

    Returns:
      The characteristics, in elements or in rows.

    Raises:
      TypeError: if a leaf is not an array.
      ValueError: if there are no leaves or no workers, or the leaves' numbers of
        workers differ.

    Example:
      >>> import jax.numpy as jnp, sparsejax
      >>> found = sparsejax.characteristics(jnp.array([[1.0, 2, 0, 0], [0, 3, 0, 4]]))
      >>> print(found.overlap[0, 1], found.densification, found.skewness)
      0.5 1.5 [2. 1.]

    References:
      Wang et al., "ZEN: Empowering Distributed Training with Sparsity-driven Data
      Synchronization", OSDI 2025.
    """
    check_arrays("gradients", gradients)
    leaves = jax.tree.leaves(gradients)
    counts = {jnp.shape(leaf)[:1] for leaf in leaves}
    if len(counts) != 1 or () in counts or (0,) in counts:
        raise ValueError(
            f"gradients: got leaves of shapes {[jnp.shape(leaf) for leaf in leaves]}, "
            f"expected one leaf or more, all with the number of workers, at least 1, "
            f"as first axis."
        )
    return _measured(leaves, rows)


# Compiled as a whole: one operation at a time takes seconds.
@functools.partial(jax.jit, static_argnames="rows")
def _measured(leaves: list[Any], rows: bool) -> Characteristics:
    """The characteristics of leaves [w, ...], of which there is at least one."""
    count = leaves[0].shape[0]

    def flags(leaf):
        nonzero = leaf != 0
        if rows and leaf.ndim > 2:
            nonzero = jnp.any(nonzero, axis=tuple(range(2, leaf.ndim)))
        return nonzero.reshape(count, -1)

    support = jnp.concatenate([flags(leaf) for leaf in leaves], axis=1)
    n = support.shape[1]
    # Counts are integers: float32 counts exactly only up to 2^24.
    common = jnp.matmul(
        support.astype(jnp.int8),
        support.T.astype(jnp.int8),
        preferred_element_type=jnp.int32,
    )
    sizes = jnp.diagonal(common)
    least = jnp.minimum(sizes[:, None], sizes[None])
    united = jnp.sum(jnp.any(support, axis=0), dtype=jnp.int32)
    total = jnp.sum(sizes.astype(jnp.float32)) / count
    part = max(1, math.ceil(n / count))
    padded = jnp.pad(support, ((0, 0), (0, part * count - n)))
    parts = jnp.sum(padded.reshape(count, count, part), axis=2, dtype=jnp.int32)
    return Characteristics(
        density=ratio(sizes, jnp.full_like(sizes, n)),
        overlap=ratio(common, least),
        densification=ratio(united, total),
        skewness=ratio(jnp.max(parts, axis=1) * count, sizes),
    )
