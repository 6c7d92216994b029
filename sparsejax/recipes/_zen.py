"""Zen: the exact mean of gradients that are sparse by nature."""

from __future__ import annotations

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._checks import check_density
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def zen(
    capacity: float = 0.05,
    *,
    densification: float | None = None,
    rows: bool = True,
    owners: str = "permutation",
    axis_name: AxisName = "data",
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """The mean of all gradients, sending only what is not zero: lossless.

    `update = (1/w) sum_r g_r`, as `dense`, for embedding tables and other leaves of
    whose gradient most rows are zero, different ones on every worker. Each worker
    sends its non-zero rows to the workers that own them, picked by a hash; owners add
    up and send the non-zero sums to everybody.

    Messages have a fixed size. If a worker has more non-zeros than `capacity`, or more
    than expected meet at one owner, all workers agree to average that step densely;
    `report.details.overflow` says so. Nothing is ever left out.

    Give it the sparse leaves only: rows have the greatest common size over all leaves.
    `sparsejax.wire_bytes(tx, params, workers=w).least` is what a usual step moves;
    `total` adds the dense mean of a step that overflows.

    Args:
      capacity: the largest density of one worker's gradient that has to fit, in rows
        where leaves have them, in (0, 1].
      densification: how many times denser the sum is than one gradient, from 1 to w,
        as which more counts; by default as for independent supports,
        `(1 - (1-d)^w) / d`.
      rows: whether leaves [V, D] are taken as V rows; otherwise one by one.
      owners: how owners are found, see `exchanges.hashed_owners`.
      axis_name: the mesh axis of the workers, or a tuple of axes.
      nonfinite: what to do about NaN and inf, see `sparsejax.sparsify`.

    Returns:
      An optax transformation from local gradients (per worker) to averaged updates
      (replicated). Its state has no residual. `report.details` has the density before
      and after, the densification, push and pull imbalance, and the overflow.

    Raises:
      TypeError: if `capacity` or `densification` is not a number, or is traced.
      ValueError: if `capacity` is outside (0, 1], `densification` below 1 or not
        finite, or `owners` or `nonfinite` unknown.

    Departs from the paper: the map to owners is a keyed bijection and not a hash table,
    as nothing here needs atomics; messages are padded to static sizes.

    Example:
      >>> import optax, sparsejax
      >>> exchange = optax.partition(
      ...     {"sparse": sparsejax.zen(), "rest": sparsejax.exdyna(0.01)},
      ...     {"embedding": "sparse", "dense": "rest"},
      ... )
      >>> tx = optax.chain(exchange, optax.sgd(0.1))

    References:
      Wang et al., "ZEN: Empowering Distributed Training with Sparsity-driven Data
      Synchronization", OSDI 2025 (arXiv 2309.13254).
    """
    capacity = check_density(capacity, "capacity")
    return sparsify(
        sparsifiers.nonzero(capacity, rows=rows),
        exchange=exchanges.hashed_owners(densification=densification, owners=owners),
        memory=memories.none(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
