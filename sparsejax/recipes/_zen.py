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
    """The exact mean of all gradients; only non-zeros are sent.

    `update = (1/w) sum_r g_r`, as with `dense`, for embedding tables and other leaves
    whose gradients are mostly rows of zeros. A hash picks an owner for each row. Each
    worker sends its non-zero rows to their owners; the owners add them and send the
    non-zero sums to all workers.

    If the non-zeros of a worker exceed `max_density`, or more than expected meet at one
    owner, all workers average densely in that step, and `report.details.overflow` is
    True. `sparsejax.wire_bytes(tx, params, workers=w).least` is the size of a usual
    step.

    Apply `zen` to the sparse leaves only: the size of a row is the greatest common
    divisor over all leaves.

    Args:
      max_density: the fraction of all rows, or coordinates, that fit, in (0, 1].
      densification: see `sparsejax.exchanges.hashed_owners`.
      rows: whether leaves [V, D] are sent as V rows, or else by coordinates.
      owners: see `sparsejax.exchanges.hashed_owners`.
      axis_name: see `sparsejax.sparsify`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, without a residual.

    Departs from the paper: the map to owners is a keyed bijection instead of a hash
    table, and messages are padded to static sizes.

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
