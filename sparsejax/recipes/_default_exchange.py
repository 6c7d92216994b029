"""The exchange for choices that workers make independently of each other."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from sparsejax import exchanges
from sparsejax._checks import check_part, check_value_dtype
from sparsejax.parts import Exchange


def exchange_or_pairs(exchange: Exchange | None, value_dtype: Any) -> Exchange:
    """`exchange`, or by default `exchanges.pairs(value_dtype)`.

    Raises:
      TypeError: if `exchange` is not an `Exchange`, such as a name.
      ValueError: for a `value_dtype` beside an exchange, which has its own.
    """
    if exchange is None:
        return exchanges.pairs(value_dtype)
    check_part("exchange", exchange, Exchange, "exchanges.union()")
    if check_value_dtype(value_dtype) != jnp.float32:
        raise ValueError(
            f"value_dtype: got {value_dtype!r} beside exchange `{exchange.name}`, "
            f"which has a value_dtype of its own. Pass it there, such as "
            f"`exchange=sparsejax.exchanges.union(jnp.bfloat16)`."
        )
    return exchange
