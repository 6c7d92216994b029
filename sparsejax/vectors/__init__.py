"""Selection, packed bits and codes for one worker's vector, for any method or mesh."""

from sparsejax.vectors._selection import compact, count_in, select_in

__all__ = ["compact", "count_in", "select_in"]
