"""One worker's vector: selection, packed bits, codes. Knows no method and no mesh."""

from sparsejax.vectors._selection import compact, count_in, select_in

__all__ = ["compact", "count_in", "select_in"]
