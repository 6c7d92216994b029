"""Collectives that deliver payloads and say what was delivered."""

from sparsejax.exchanges._dense import dense
from sparsejax.exchanges._leader import leader
from sparsejax.exchanges._pairs import pairs
from sparsejax.exchanges._union import union

__all__ = ["dense", "leader", "pairs", "union"]
