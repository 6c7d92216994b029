"""The exchange for choices that workers make independently of each other."""

from __future__ import annotations

from typing import Any

from sparsejax import exchanges
from sparsejax._checks import check_part
from sparsejax.parts import Exchange


def exchange_or_pairs(exchange: Exchange | None, value_bits: Any) -> Exchange:
    """Returns `exchange`, or `exchanges.pairs(value_bits)` for None.

    Raises:
      TypeError: if `exchange` is not an `Exchange`, but for example a name.
      ValueError: for a `value_bits` together with an exchange, which has its own.
    """
    if exchange is None:
        return exchanges.pairs(value_bits)
    check_part("exchange", exchange, Exchange, "exchanges.union()")
    if value_bits is not None:
        raise ValueError(
            f"value_bits: got {value_bits!r} together with exchange "
            f"`{exchange.name}`, which has its own value_bits. Pass it there, such as "
            f"`exchange=sparsejax.exchanges.union(16)`."
        )
    return exchange
