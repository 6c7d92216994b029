"""Selection and messages of one worker's vector, for any method and any mesh."""

from sparsejax.vectors._codec import pack, unpack
from sparsejax.vectors._counting import count_in
from sparsejax.vectors._reach import decode_indices, encode_indices, room
from sparsejax.vectors._regions import fold
from sparsejax.vectors._rounding import round_to
from sparsejax.vectors._selection import compact, select_in

__all__ = [
    "compact",
    "count_in",
    "decode_indices",
    "encode_indices",
    "fold",
    "pack",
    "room",
    "round_to",
    "select_in",
    "unpack",
]
