"""The exact sum of sparse vectors by recursive doubling: lists that grow and merge."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax._report import zero_report
from sparsejax._workers import vary_like
from sparsejax._xla import insert, late_zeros
from sparsejax.exchanges._dense import deliver_all
from sparsejax.exchanges.sums._sparse_sum import (
    Facts,
    check_sizes,
    deliver_sum,
    densified,
    ratio,
    units_of,
)
from sparsejax.parts import Exchange, no_state
from sparsejax.vectors import _codec

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

# Room for the size of a union to exceed its expectation, in standard deviations of a
# Poisson number, which is an upper bound for independent supports.
_SIGMAS = 4


class RecursiveDoublingDetails(NamedTuple):
    """What `Report.details` holds. Replicated.

    Attributes:
      density_before: Float[], mean density of the workers' gradients.
      density_after: Float[], density of the sum.
      densification: Float[], their ratio, up to w; 0 where nothing was sent, and below
        1 where sums cancel.
      overflow: Bool[], whether something did not fit, so that the step was dense.
    """

    density_before: Float[Array, ""]
    density_after: Float[Array, ""]
    densification: Float[Array, ""]
    overflow: Bool[Array, ""]


class _List(NamedTuple):
    """A sparse vector: ascending indices [m], empty slots `u`, at the end.

    Attributes:
      indices: Int32[m].
      values: Float[m, ...].
      many: Int32[m], how many workers contributed; () where nobody asks.
      lost: Bool[], whether entries were lost for want of slots.
    """

    indices: Int[Array, " m"]
    values: Float[Array, " m *D"]
    many: Int[Array, " m"] | tuple[()]
    lost: Bool[Array, ""]


def lengths(
    units: int,
    slots: int,
    worker_count: int,
    capacity: float | None,
    densification: float | None,
) -> tuple[int, ...]:
    """Static: slots of the sum of j workers' lists at position j, from 1 to w."""
    expected = slots
    if capacity is not None:
        expected = max(1, min(slots, math.ceil(capacity * units)))
    made = [0, expected]
    for j in range(2, worker_count + 1):
        growth = densified(expected / units, worker_count, densification, j)
        size = growth * expected
        made.append(
            min(units, j * expected, math.ceil(size + _SIGMAS * math.sqrt(size)))
        )
    return tuple(made)


def recursive_doubling(
    *, capacity: float | None = None, densification: float | None = None
) -> Exchange:
    """Pairs of workers swap lists and merge, then pairs of pairs, and so on.

    After round i each group of 2^i workers holds the sum of its lists. Workers beyond
    the largest power of two give their list to a partner before the first round. The
    last round is an all-gather, each worker sending a share of its group's list: so
    all workers, those beyond included, come to hold both halves, and add them up in
    the same order. The facts of the report ride along.

    Received per worker among `w = 2^p`, for d non-zeros per coordinate growing g_j
    times in the sum of j workers: `2 d (sum_{i < p-1} g_(2^i) + 2 (w-1)/w g_(w/2))` of
    4 n bytes with 32-bit indices. Messages have fixed sizes; if anything does not fit,
    all workers agree to average densely in this step, and the report says so.

    Args:
      capacity: the largest density of a worker's vector that has to fit, in (0, 1]; by
        default as many as the sparsifier sends.
      densification: how many times denser the sum is than one vector, from 1 to w, as
        which more counts; by default as for independent supports,
        `(1 - (1-d)^w) / d`. For j workers `j^(log g / log w)` is assumed.

    Returns:
      An exchange for overlapping and disjoint choices, of coordinates or rows.

    Raises:
      TypeError: if `capacity` or `densification` is not a number.
      ValueError: if `capacity` is outside (0, 1], or `densification` below 1 or not
        finite.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.topk(0.01),
      ...     exchange=exchanges.recursive_doubling(),
      ...     memory=memories.error_feedback(),
      ... )

    Departs from the paper: SparCML swaps whole lists in the last round too, which costs
    half as much, but leaves equal values that nothing proves to be equal.

    References:
      Renggli et al., "SparCML: High-Performance Sparse Communication for Machine
      Learning", SC 2019 (arXiv 1802.08021).
    """
    capacity, densification = check_sizes(capacity, densification)

    def apply(vector, payload, state, step, workers, layout):
        del step
        n, count = vector.shape[0], workers.count()
        if payload.indices is None or not payload.indices.size:
            one = jnp.ones((), jnp.float32)
            whole = RecursiveDoublingDetails(one, one, one, jnp.zeros((), jnp.bool_))
            return deliver_all(vector, payload.dropped, workers, layout, whole), state
        units, shape = units_of(n, payload.values)
        slots = payload.indices.size
        sizes = lengths(units, slots, count, capacity, densification)
        counted = payload.complete is True and not layout.exact

        partial, share = _half_sum(
            _cut(payload, units, sizes[1], counted), units, sizes, workers
        )
        failed = partial.lost | jnp.logical_not(payload.complete)
        facts = Facts(payload.demand, payload.threshold, payload.dropped, failed)
        message = (facts, _encode(share, units))
        gathered = workers.gather(_codec.pack(message))
        facts, parts = _codec.unpack(gathered, message)
        total = _whole_sum(_decode(parts, units), units, sizes, count)
        # The same on all workers: whether the sum of both halves fits.
        facts = facts._replace(failed=facts.failed | total.lost)
        after = jnp.sum(
            jnp.any(total.values.reshape(total.indices.size, -1) != 0, axis=1),
            dtype=jnp.int32,
        )

        def decode():
            means = late_zeros(n, after).reshape(units, *shape)
            means = insert(means, total.indices, total.values / count)
            if not counted:
                return means, None
            many = jnp.zeros((units,), jnp.int32)
            return means, many.at[total.indices].set(total.many, mode="drop")

        def details(before, after, overflow):
            growth = ratio(after, before)
            return RecursiveDoublingDetails(before, after, growth, overflow)

        delivery = deliver_sum(
            vector, payload, facts, decode, after, details, workers, layout
        )
        return delivery, state

    def report(layout, worker_count):
        zero = jnp.zeros((), jnp.float32)
        details = RecursiveDoublingDetails(zero, zero, zero, jnp.zeros((), jnp.bool_))
        return zero_report(worker_count, details)

    accepts = frozenset({"disjoint", "overlapping"})
    return Exchange(no_state, apply, report, accepts, "recursive_doubling")


def _cut(payload, units, slots, counted) -> _List:
    """The payload as a list of `slots`."""
    used = payload.indices < units
    many = used.astype(jnp.int32) if counted else ()
    lost = jnp.sum(used, dtype=jnp.int32) > slots
    whole = _List(payload.indices, payload.values, many, lost)
    return jax.tree.map(lambda x: x[:slots] if x.ndim else x, whole)


def _half_sum(mine: _List, units, sizes, workers) -> tuple[_List, _List]:
    """All rounds but the last: the sum of a half, and this worker's share of it."""
    count, index = workers.count(), workers.index()
    rounds = count.bit_length() - 1
    core, extra = 1 << rounds, count - (1 << rounds)

    def add(mine, pairs, listens, size):
        pairs = pairs + [(j, j) for j in range(count) if j not in dict(pairs)]
        sent = _encode(mine, units)
        words = workers.permute(_codec.pack(sent), pairs)
        got = _decode(_codec.unpack(words[None], sent), units)
        got = jax.tree.map(lambda x: x[0], got)
        got = got._replace(
            indices=jnp.where(listens, got.indices, units), lost=got.lost & listens
        )
        return _merge(mine, got, units, size)

    if extra:
        # Workers beyond the power of two give their lists to the first ones.
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
        _padded(mine, units, chunks * length),
    )
    unheard = jnp.where(index < core, share.indices, units)
    return mine, share._replace(indices=unheard)


def _whole_sum(parts: _List, units, sizes, count) -> _List:
    """The last round: the sum of both halves, from the shares [w, length] of all."""
    core = 1 << (count.bit_length() - 1)
    chunks = max(1, core // 2)

    def half(first):
        def joined(x):
            x = x[first : first + chunks]
            return x.reshape(-1, *x.shape[2:]) if x.ndim > 1 else jnp.any(x)

        return jax.tree.map(joined, parts)

    if count == 1:
        return half(0)
    return _merge(half(0), half(chunks), units, sizes[count])


def _padded(given: _List, units: int, slots: int) -> _List:
    def pad(x, fill):
        width = [(0, slots - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, width, constant_values=fill)

    many = pad(given.many, 0) if not isinstance(given.many, tuple) else ()
    return _List(pad(given.indices, units), pad(given.values, 0), many, given.lost)


def _encode(given: _List, units: int) -> _List:
    """A list as it travels."""
    many = given.many.astype(jnp.uint16) if not isinstance(given.many, tuple) else ()
    codes = _codec.plain(given.indices.size, units).encode(given.indices)
    return given._replace(indices=codes, many=many)


def _decode(given: _List, units: int) -> _List:
    many = given.many.astype(jnp.int32) if not isinstance(given.many, tuple) else ()
    return given._replace(indices=given.indices.astype(jnp.int32), many=many)


def _merge(a: _List, b: _List, units: int, slots: int) -> _List:
    """The sum of two lists in `slots` slots; `a + b` and `b + a` are equal bitwise."""

    def places(mine, other):
        below = jnp.searchsorted(other, mine, side="left").astype(jnp.int32)
        same = other.at[below].get(mode="fill", fill_value=-1) == mine
        same = (same & (mine < units)).astype(jnp.int32)
        order = jnp.arange(mine.size, dtype=jnp.int32)
        # Less one for each pair that has become one entry before.
        place = order + below - (jnp.cumsum(same, dtype=jnp.int32) - same)
        return jnp.where(mine < units, place, slots), jnp.sum(same, dtype=jnp.int32)

    (at_a, both), (at_b, _) = places(a.indices, b.indices), places(b.indices, a.indices)

    def joined(x, y, fill, add):
        out = vary_like(jnp.full((slots, *x.shape[1:]), fill, x.dtype), x)
        out = out.at[at_a].set(x, mode="drop").at[at_b]
        # Places are unique within each list, so that nothing depends on an order.
        return out.add(y, mode="drop") if add else out.set(y, mode="drop")

    used = jnp.sum(a.indices < units, dtype=jnp.int32)
    used = used + jnp.sum(b.indices < units, dtype=jnp.int32) - both
    return _List(
        joined(a.indices, b.indices, units, add=False),
        joined(a.values, b.values, 0, add=True),
        joined(a.many, b.many, 0, add=True) if not isinstance(a.many, tuple) else (),
        a.lost | b.lost | (used > slots),
    )
