"""The unbiased merge of two signs into one, on packed words.

Nothing here communicates. Bit 1 stands for +1, bit 0 for -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, UInt32

# Probabilities are rounded to multiples of 2**-PLANES, an error below 8e-6.
PLANES = 16


def merge(
    received: UInt32[Array, " words"],
    local: UInt32[Array, " words"],
    received_weight: Int[Array, ""] | int,
    local_weight: Int[Array, ""] | int,
    key: UInt32[Array, " 2"],
) -> UInt32[Array, " words"]:
    """Replaces two bits by one of them, drawn by weight: the result is unbiased.

    With weights A and B,

        keep ~ Bernoulli(B / (A + B))
        result = (keep AND local) OR (NOT keep AND received)

    so that `E[result] = (A received + B local) / (A + B)`. If both bits agree, the
    result is that bit.

    Args:
      received: UInt32[words], per worker: bits that stand for A workers.
      local: UInt32[words], per worker: bits that stand for B workers.
      received_weight: A.
      local_weight: B, at most A.
      key: UInt32[2], fresh for every merge.

    Returns:
      UInt32[words], bits that stand for A + B workers.
    """
    total = jnp.asarray(received_weight + local_weight, jnp.float32)
    keep = bernoulli(key, jnp.asarray(local_weight, jnp.float32) / total, local.size)
    return (keep & local) | (~keep & received)


def bernoulli(
    key: UInt32[Array, " 2"], probability: Float[Array, ""], words: int
) -> UInt32[Array, " words"]:
    """UInt32[words], independent bits, each set with `probability`.

    Each bit compares a uniform random number with the probability, one binary digit at
    a time, for 32 bits at once. So each word of the result needs 16 random words.

    Args:
      key: UInt32[2], per worker.
      probability: Float[] in [0, 1), rounded to a multiple of 2^-16.
      words: static, the number of words.
    """
    # This calls the generator directly: each evaluation gives two words, and
    # `jax.random.bits` discards one of them.
    counts = jnp.arange(PLANES * words, dtype=jnp.uint32)
    planes = threefry_2x32((key[0], key[1]), counts).reshape(PLANES, words)
    return below(planes, jnp.round(probability * 2**PLANES).astype(jnp.uint32))


def below(
    planes: UInt32[Array, "planes words"], bound: UInt32[Array, ""]
) -> UInt32[Array, " words"]:
    """Sets each bit whose number in `planes` is less than `bound`.

    Args:
      planes: UInt32[planes, words]: the inverted binary digits of a number for each
        bit, the least significant digit first.
      bound: UInt32[], from 0 to 2^planes - 1.

    Returns:
      UInt32[words]; exactly `bound` of the 2^planes different numbers give a set bit.
    """
    result = jnp.zeros_like(planes[0])
    for i, plane in enumerate(planes):
        digit = -((bound >> i) & 1)  # all ones or all zeros
        # The majority of `plane`, `digit` and `result`. `plane` is inverted: if the two
        # digits differ, they decide; if they are equal, the result of the less
        # significant digits stays.
        result = (plane & (result | digit)) | (result & digit)
    return result


def fold_in(
    key: UInt32[Array, " 2"], number: Int[Array, ""] | int
) -> UInt32[Array, " 2"]:
    """UInt32[2], a key for each number."""
    folded = jax.random.fold_in(_wrap(key), number)
    return jax.random.key_data(folded)


def new_key(seed: int) -> UInt32[Array, " 2"]:
    """UInt32[2], a key as plain words, which checkpoints can store."""
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def _wrap(key: UInt32[Array, " 2"]) -> Array:
    # Ignores `jax_default_prng_impl`: the generator "rbg" gives other numbers under
    # `vmap`.
    return jax.random.wrap_key_data(key, impl="threefry2x32")
