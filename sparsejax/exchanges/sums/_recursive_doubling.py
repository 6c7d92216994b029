"""The exact sum of sparse vectors by recursive doubling: lists that grow and merge."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._workers import Workers
from sparsejax.exchanges._dense import EVERY_SUPPORT, or_whole
from sparsejax.exchanges._units import Units
from sparsejax.exchanges.sums._sizes import check_sizes, lengths
from sparsejax.exchanges.sums._sparse_list import SparseList, merge
from sparsejax.exchanges.sums._sparse_sum import (
    Facts,
    counts_contributors,
    deliver_sum,
)
from sparsejax.parts import Exchange
from sparsejax.vectors import _codec
from sparsejax.vectors._ratio import ratio

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


class RecursiveDoublingDetails(NamedTuple):
    """`Report.details` of `recursive_doubling`. Replicated.

    Attributes:
      density_before: Float[], mean density of the workers' gradients.
      density_after: Float[], density of the sum.
      densification: Float[], their ratio, up to w; 0 if nothing was sent, and below 1
        if sums cancel.
      overflow: Bool[], whether something did not fit, so the step was dense.
    """

    density_before: Float[Array, ""]
    density_after: Float[Array, ""]
    densification: Float[Array, ""]
    overflow: Bool[Array, ""]


def recursive_doubling(
    *, max_density: float | None = None, densification: float | None = None
) -> Exchange:
    """Pairs of workers swap lists and merge, then pairs of pairs, and so on.

    After round i each group of 2^i workers holds the sum of its lists. Workers beyond
    the largest power of two give their list to a partner before the first round. The
    last round is an all-gather in which each worker sends a share of its group's list.
    So all workers, even those beyond the power of two, receive both halves and add them
    in the same order. The same message carries the facts of the report.

    With `w = 2^p` workers, d non-zeros per coordinate, and g_j times as many in the sum
    of j workers, a worker receives
    `2 d (sum_{i < p-1} g_(2^i) + 2 (w-1)/w g_(w/2))` of 4 n bytes with 32-bit indices.
    Messages have fixed sizes. If anything does not fit, all workers average densely in
    this step, and the report shows an overflow.

    Args:
      max_density: the largest density of a worker's vector that has to fit, in (0, 1];
        by default the sparsifier's slots.
      densification: g, the density of the sum over the density of one vector, in
        [1, w]; larger values are taken as w. The default assumes independent
        supports: `(1 - (1-d)^w) / d`. For j workers `j^(log g / log w)` is assumed.

    Returns:
      An exchange for all choices, of coordinates or rows.

    Raises:
      TypeError: if `max_density` or `densification` is not a number.
      ValueError: if `max_density` is outside (0, 1], or `densification` below 1 or not
        finite.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.topk(0.01),
      ...     exchange=exchanges.recursive_doubling(),
      ...     memory=memories.error_feedback(),
      ... )

    Departs from the paper: SparCML also swaps whole lists in the last round. That costs
    half as much, but jax cannot check that the resulting values are equal.

    References:
      Renggli et al., "SparCML: High-Performance Sparse Communication for Machine
      Learning", SC 2019 (arXiv 1802.08021).
    """
    max_density, densification = check_sizes(max_density, densification)

    def apply(vector, choice, state, step):
        units, workers, count = Units.of(choice, step.n), step.workers, step.w
        slots = choice.indices.size
        sizes = lengths(units.number, slots, count, max_density, densification)
        counted = counts_contributors(step)
        values = units.values(vector, choice.indices)

        mine = SparseList.of(choice.indices, values, units.number, sizes[1], counted)
        partial, share = _half_sum(mine, units.number, sizes, workers)
        facts = Facts.of(choice, partial.lost, step)
        message = (facts, share.encode(units.number))
        gathered = workers.gather(_codec.pack(message))
        facts, parts = _codec.unpack(gathered, message)
        total = _whole_sum(parts.decode(), units.number, sizes, count)
        # All workers know whether the sum of both halves fits.
        facts = facts._replace(failed=facts.failed | total.lost)
        after = jnp.sum(
            jnp.any(total.values.reshape(total.indices.size, -1) != 0, axis=1),
            dtype=jnp.int32,
        )

        def decode():
            means = units.split(_xla.late_zeros(units.n, after))
            means = _xla.insert(means, total.indices, total.values / count)
            if not counted:
                return means, None
            many = jnp.zeros((units.number,), jnp.int32)
            return means, many.at[total.indices].set(total.many, mode="drop")

        def report(before, after, overflow):
            growth = ratio(after, before)
            return RecursiveDoublingDetails(before, after, growth, overflow)

        delivery = deliver_sum(
            vector, choice, values, facts, decode, after, report, step
        )
        return delivery, state

    return Exchange(
        or_whole(apply, lambda layout, worker_count: _details(1)),
        EVERY_SUPPORT,
        "recursive_doubling",
        details=lambda layout, worker_count: _details(0),
    )


def _details(value: float) -> RecursiveDoublingDetails:
    """Details in which every number is `value`, without an overflow."""
    number = jnp.asarray(value, jnp.float32)
    return RecursiveDoublingDetails(number, number, number, jnp.zeros((), jnp.bool_))


def _half_sum(
    mine: SparseList, units: int, sizes: tuple[int, ...], workers: Workers
) -> tuple[SparseList, SparseList]:
    """Runs all rounds but the last; returns this worker's share of its half's sum."""
    count, index = workers.count(), workers.index()
    rounds = count.bit_length() - 1
    core, extra = 1 << rounds, count - (1 << rounds)

    def add(mine, pairs, listens, size):
        pairs = pairs + [(j, j) for j in range(count) if j not in dict(pairs)]
        sent = mine.encode(units)
        words = workers.permute(_codec.pack(sent), pairs)
        got = _codec.unpack(words[None], sent).decode()
        got = jax.tree.map(lambda x: x[0], got)
        got = got._replace(
            indices=jnp.where(listens, got.indices, units), lost=got.lost & listens
        )
        return merge(mine, got, units, size)

    if extra:
        # Workers beyond the power of two give their lists to the first workers.
        pairs = [(core + i, i) for i in range(extra)]
        pairs += [(i, core + i) for i in range(extra)]
        mine = add(mine, pairs, index < extra, sizes[2])
    for i in range(rounds - 1):
        held = (2 << i) + min(2 << i, extra)
        pairs = [(j, j ^ (1 << i)) for j in range(core)]
        mine = add(mine, pairs, index < core, sizes[held])
    chunks = max(1, core // 2)
    length = -(-mine.indices.size // chunks)
    part = index % chunks
    share = jax.tree.map(
        lambda x: x.reshape(chunks, length, *x.shape[1:])[part] if x.ndim else x,
        mine.padded(units, chunks * length),
    )
    unheard = jnp.where(index < core, share.indices, units)
    return mine, share._replace(indices=unheard)


def _whole_sum(
    parts: SparseList, units: int, sizes: tuple[int, ...], count: int
) -> SparseList:
    """Runs the last round: the sum of both halves, from all shares [w, length]."""
    core = 1 << (count.bit_length() - 1)
    chunks = max(1, core // 2)

    def half(first):
        def joined(x):
            x = x[first : first + chunks]
            return x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else jnp.any(x)

        return jax.tree.map(joined, parts)

    if count == 1:
        return half(0)
    return merge(half(0), half(chunks), units, sizes[count])
