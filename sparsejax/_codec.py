"""What goes on the wire: index encodings, and packing many small arrays in one message.

A collective costs milliseconds whatever its size on the networks this library is for,
so everything that a worker has to say about a step travels in one message.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Array, Int, UInt

# The unit of a message. 16 bits, so that indices relative to a part need no padding.
WORD = jnp.uint16


def index_dtype(span: int) -> np.dtype:
    """The narrowest dtype for relative indices below `span` and an empty mark."""
    return np.dtype(np.uint16 if span < 2**16 else np.int32)


def encode_indices(
    indices: Int[Array, " k"], start: Int[Array, ""], span: int, n: int
) -> Int[Array, " k"]:
    """Indices [k] relative to `start`; empty slots (`n`) become `span`."""
    relative = jnp.where(indices < n, indices - start, span)
    return relative.astype(index_dtype(span))


def decode_indices(
    codes: Int[Array, "w k"], start: Int[Array, " w"], span: int, n: int
) -> Int[Array, "w k"]:
    """The indices [w, k] that every worker encoded; empty slots hold `n`."""
    relative = codes.astype(jnp.int32)
    return jnp.where(relative < span, relative + start[:, None], n)


def pack(tree: Any) -> UInt[Array, " words"]:
    """All leaves of `tree` (1, 2 or 4 bytes an element) as one vector of words."""
    parts = []
    for leaf in map(jnp.asarray, jax.tree.leaves(tree)):
        if leaf.dtype == jnp.bool_:
            leaf = leaf.astype(WORD)
        parts.append(jax.lax.bitcast_convert_type(leaf, WORD).reshape(-1))
    return jnp.concatenate(parts)


def unpack(words: UInt[Array, "w words"], like: Any) -> Any:
    """The trees that every worker packed: leaves of `like` with a leading axis [w]."""
    leaves, treedef = jax.tree.flatten(like)
    parts, position = [], 0
    for leaf in map(jnp.asarray, leaves):
        flag = leaf.dtype == jnp.bool_
        dtype = np.dtype(WORD) if flag else leaf.dtype
        width = dtype.itemsize // np.dtype(WORD).itemsize
        size = math.prod(leaf.shape) * width
        part = jax.lax.slice_in_dim(words, position, position + size, axis=1)
        # bitcast_convert_type widens by consuming a last axis of the ratio of widths.
        tail = (width,) if width > 1 else ()
        part = part.reshape(words.shape[0], *leaf.shape, *tail)
        part = jax.lax.bitcast_convert_type(part, dtype)
        parts.append(part.astype(jnp.bool_) if flag else part)
        position += size
    return jax.tree.unflatten(treedef, parts)
