"""Parts of equal length: MiCRO."""

from __future__ import annotations

from sparsejax.partitions._grid import even_split
from sparsejax.parts import Partition


def even() -> Partition:
    """Equal parts that never move; the first `n mod w` parts are one longer.

    Example:
      >>> partition = even()
      >>> print(partition.bounds(partition.init(10, 4), 10, 4, 1))
      [ 0  3  6  8 10]

    References:
      Yoon and Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and
      Accelerating Distributed DNN Training", HiPC 2023.
    """
    return Partition(
        init=lambda n, worker_count: (),
        bounds=lambda state, n, worker_count, target: even_split(n, worker_count),
        span=lambda n, worker_count, target: -(-n // worker_count),
        adapt=lambda state, n, target, demand, threshold, histogram: state,
    )
