"""Partitions: the contiguous parts of the vector, one per worker and step.

A partition is a `Partition`, a record of pure functions; pass one as `partition=` to
`sparsifiers.exclusive`. This module has three partitions. To write another, fill in the
record. The other functions give each worker's part (`parts_of`, `by_part`), the number
of coordinates that a part should send (`quotas`), and the blocks in which the exchange
`union` counts delivered coordinates (`blocks`).

Everything here is replicated and deterministic: each worker computes all bounds from
facts that all workers have. Sizes are static. The work of a program grows with the
number of workers, but the length of its code does not.

Shapes: `n` coordinates, `w` workers and parts, `B` blocks, `target` coordinates to
deliver per step (K* in the papers). Sizes follow from the largest target, which is
static. Only `quotas` takes the target of one step, which may be traced.
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
