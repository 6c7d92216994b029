"""A 32-bit hash of indices, for draws and maps that every worker computes alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, UInt32


def mixed(
    x: UInt32[Array, " *shape"], key: UInt32[Array, ""]
) -> UInt32[Array, " *shape"]:
    """UInt32[...]: a hash of `x` and `key`, different for different `x`.

    Example:
      >>> print(mixed(jnp.arange(2, dtype=jnp.uint32), jnp.uint32(0)))
      [         0 1364076727]

    References:
      Appleby, MurmurHash3: the finaliser of the 32-bit variant, public domain.
    """
    x = x ^ key
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
