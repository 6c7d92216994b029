"""Exact division of products of 32-bit integers, without 64-bit types."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Int32


def muldiv(
    a: Int[Array, " *shape"],
    b: Int[Array, " *shape"] | int,
    c: Int[Array, " *shape"] | int,
) -> Int32[Array, " *shape"]:
    """`floor(a * b / c)`, exact even if `a * b` does not fit into 32 bits.

    Args:
      a: Int32[...], at least 0.
      b: Int32[...], at least 0.
      c: Int32[...], at least 1.

    Returns:
      Int32[...]. A quotient that does not fit wraps around.
    """
    return divide_product(a, b, c)[0]


def divide_product(a, b, c) -> tuple[Int32[Array, " *shape"], Int32[Array, " *shape"]]:
    """Quotient and remainder of `a * b` by `c`.

    Long division of `a * b` by `c`, with `a` in two digits of 16 bits. Each digit of
    the quotient is below 2^17 and is estimated in float32, with an error below 1/8. The
    estimate less 1/8, rounded down, is the digit or one less. The remainder is below
    `2 c`, and exact in wrapping 32-bit arithmetic.
    """
    a, b, c = (jnp.asarray(x, jnp.int32).astype(jnp.uint32) for x in (a, b, c))
    whole = b // c
    b = b - whole * c
    divisor = c.astype(jnp.float32)
    quotient = a * whole
    remainder = jnp.zeros_like(a)
    for shift in (16, 0):
        digit = (a >> shift) & 0xFFFF
        product = remainder.astype(jnp.float32) * 65536.0 + (
            digit.astype(jnp.float32) * b.astype(jnp.float32)
        )
        estimate = jnp.maximum(product / divisor - 0.125, 0.0).astype(jnp.uint32)
        remainder = (remainder << 16) + digit * b - estimate * c
        short = remainder >= c
        remainder = jnp.where(short, remainder - c, remainder)
        quotient = quotient + ((estimate + short.astype(jnp.uint32)) << shift)
    return quotient.astype(jnp.int32), remainder.astype(jnp.int32)
