"""The unbiased merge of two signs into one, on packed words.

Local arithmetic only. Bit 1 stands for +1, bit 0 for -1.
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
    """One bit for two, right on average: each bit is one of the two, drawn by weight.

    With weights A and B,

        keep ~ Bernoulli(B / (A + B))
        result = (keep AND local) OR (NOT keep AND received)

    so that `E[result] = (A received + B local) / (A + B)`. Bits on which both agree
    never change.

    Args:
      received: UInt32[words], per worker: its bits stand for `received_weight` workers.
      local: UInt32[words], per worker: its bits stand for `local_weight` workers.
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
    """UInt32[words] whose bits are set with `probability`, independently.

    A uniform number per bit is compared with the probability, one binary digit at a
    time and 32 numbers at once: 16 random words for each word of the result.

    Args:
      key: UInt32[2], per worker.
      probability: Float[] in [0, 1), rounded to a multiple of 2^-16.
      words: how many; static.
    """
    # Straight from the generator: `jax.random.bits` discards one of the two words
    # that each of its evaluations gives.
    counts = jnp.arange(PLANES * words, dtype=jnp.uint32)
    planes = threefry_2x32((key[0], key[1]), counts).reshape(PLANES, words)
    return below(planes, jnp.round(probability * 2**PLANES).astype(jnp.uint32))


def below(
    planes: UInt32[Array, "planes words"], bound: UInt32[Array, ""]
) -> UInt32[Array, " words"]:
    """Whether each bit's number lies below `bound`, from 0 to 2^planes - 1.

    Args:
      planes: UInt32[planes, words]. The number of a bit has its binary digits inverted
        in the planes, the least significant one first.
      bound: UInt32[].

    Returns:
      UInt32[words]; exactly `bound` of the 2^planes different numbers give a set bit.
    """
    result = jnp.zeros_like(planes[0])
    for i, plane in enumerate(planes):
        digit = -((bound >> i) & 1)  # all ones or all zeros
        # The majority of the three: the digits decide where they differ, and where they
        # are equal (`plane` being inverted) the less significant ones have decided.
        result = (plane & (result | digit)) | (result & digit)
    return result


def fold_in(
    key: UInt32[Array, " 2"], number: Int[Array, ""] | int
) -> UInt32[Array, " 2"]:
    """UInt32[2], a key for each number."""
    folded = jax.random.fold_in(_wrap(key), number)
    return jax.random.key_data(folded)


def new_key(seed: int) -> UInt32[Array, " 2"]:
    """UInt32[2]. Plain words and not a typed key, so that checkpoints can hold it."""
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def _wrap(key: UInt32[Array, " 2"]) -> Array:
    # The same generator whatever `jax_default_prng_impl` says: "rbg" gives other
    # numbers under `vmap`.
    return jax.random.wrap_key_data(key, impl="threefry2x32")
