"""The exchange for choices that workers make independently of each other."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from sparsejax import exchanges
from sparsejax._checks import check_part, check_value_dtype
from sparsejax.parts import Exchange


def exchange_or_pairs(exchange: Exchange | None, value_dtype: Any) -> Exchange:
    """Returns `exchange`, or `exchanges.pairs(value_dtype)` for None.

    Raises:
      TypeError: if `exchange` is not an `Exchange`, but for example a name.
      ValueError: for a `value_dtype` together with an exchange, which has its own.
    """
    if exchange is None:
        return exchanges.pairs(value_dtype)
    check_part("exchange", exchange, Exchange, "exchanges.union()")
    if check_value_dtype(value_dtype) != jnp.float32:
        raise ValueError(
            f"value_dtype: got {value_dtype!r} together with exchange "
            f"`{exchange.name}`, which has its own value_dtype. Pass it there, such as "
            f"`exchange=sparsejax.exchanges.union(jnp.bfloat16)`."
        )
    return exchange
