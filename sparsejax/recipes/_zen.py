"""Zen: the exact mean of gradients that are sparse by nature."""

from __future__ import annotations

import optax

from sparsejax import exchanges, memories, sparsifiers
from sparsejax._transform import sparsify
from sparsejax._workers import AxisName


def zen(
    max_density: float = 0.05,
    *,
    densification: float | None = None,
    rows: bool = True,
    owners: str = "permutation",
    axis_name: AxisName = "data",
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """The mean of all gradients, without sending a zero: lossless.

    `update = (1/w) sum_r g_r`, as `dense`, for embedding tables and other leaves whose
    gradients are mostly rows of zeros. Each worker sends its non-zero rows to their
    owners, picked by a hash; owners add up and send the non-zero sums to everybody.

    If a worker has more non-zeros than `max_density`, or more than expected meet at one
    owner, all workers average that step densely; `report.details.overflow` says so.
    `sparsejax.wire_bytes(tx, params, workers=w).least` is the size of a usual step.

    Give it the sparse leaves only: rows have the greatest common size over all leaves.

    Args:
      max_density: the fraction of all rows, or coordinates, that fits, in (0, 1].
      densification: see `sparsejax.exchanges.hashed_owners`.
      rows: whether leaves [V, D] are taken as V rows; otherwise one by one.
      owners: see `sparsejax.exchanges.hashed_owners`.
      axis_name: see `sparsejax.sparsify`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, without a residual.

    Departs from the paper: the map to owners is a keyed bijection and not a hash table;
    messages are padded to static sizes.

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
    return sparsify(
        sparsifiers.nonzero(max_density, rows=rows),
        exchange=exchanges.hashed_owners(densification=densification, owners=owners),
        memory=memories.none(),
        axis_name=axis_name,
        nonfinite=nonfinite,
    )
