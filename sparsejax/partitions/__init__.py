"""Partitions: the contiguous parts of the vector, one per worker and step.

A partition is a `Partition`, a record of pure functions; pass one as `partition=` to
`sparsifiers.exclusive`. This module has three; to write another, fill in the record.
The other functions say who owns a part (`parts_of`, `by_part`), how much it should
send (`quotas`), and in which blocks the exchange `union` counts delivered coordinates
(`blocks`).

Everything here is replicated and deterministic: each worker computes all bounds by
itself, from facts that all of them have. Sizes are static; the work of a program grows
with the number of workers, its length does not.

Shapes: `n` coordinates, `w` workers and parts, `B` blocks, `target` coordinates to
deliver per step (K* in the papers); sizes follow from the largest target, which is
static, and only `quotas` take the one of this step, which may be traced.
"""

from sparsejax.partitions._balanced import balanced
from sparsejax.partitions._even import even
from sparsejax.partitions._grid import blocks
from sparsejax.partitions._published import published
from sparsejax.partitions._turns import by_part, parts_of, quotas
from sparsejax.parts import Partition

__all__ = [
    "Partition",
    "balanced",
    "blocks",
    "by_part",
    "even",
    "parts_of",
    "published",
    "quotas",
]
