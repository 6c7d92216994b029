"""Selection and messages of one worker's vector, for any method and any mesh."""

from sparsejax.vectors._codec import decode_indices, encode_indices, pack, unpack
from sparsejax.vectors._rounding import round_to
from sparsejax.vectors._selection import compact, count_in, fold, select_in

__all__ = [
    "compact",
    "count_in",
    "decode_indices",
    "encode_indices",
    "fold",
    "pack",
    "round_to",
    "select_in",
    "unpack",
]
