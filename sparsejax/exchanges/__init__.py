"""Exchanges deliver choices, and report to each worker which coordinates went out."""

from sparsejax.exchanges._dense import dense
from sparsejax.exchanges._leader import leader
from sparsejax.exchanges._pairs import pairs
from sparsejax.exchanges._union import union
from sparsejax.exchanges.signs._one_bit_ring import one_bit_ring
from sparsejax.exchanges.signs._packed_signs import packed_signs
from sparsejax.exchanges.sums._hashed_owners import hashed_owners
from sparsejax.exchanges.sums._recursive_doubling import recursive_doubling

__all__ = [
    "dense",
    "hashed_owners",
    "leader",
    "one_bit_ring",
    "packed_signs",
    "pairs",
    "recursive_doubling",
    "union",
]
