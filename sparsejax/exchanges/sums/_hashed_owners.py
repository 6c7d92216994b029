"""The exact sum of sparse vectors: pushed to hashed owners, added there, pulled."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax._report import zero_report
from sparsejax._workers import vary_like
from sparsejax._xla import insert, late_zeros
from sparsejax.exchanges._dense import deliver_all
from sparsejax.exchanges.sums import _owners
from sparsejax.exchanges.sums._sparse_sum import (
    Facts,
    check_sizes,
    deliver_sum,
    densified,
    ratio,
    units_of,
)
from sparsejax.parts import Exchange, no_state
from sparsejax.vectors import _bits, _codec

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

# With a well-mixed map, the longest of w lists exceeds its mean m / w by a factor of
# more than 1 + sqrt(c w ln(w) / m) with probability below 1 / w: among all workers'
# lists for c = 9, among the owners for c = 6 (Wang et al.).
_PUSH_SLACK, _PULL_SLACK = 9, 6


class HashedOwnersDetails(NamedTuple):
    """What `Report.details` holds. Replicated.

    Attributes:
      density_before: Float[], mean density of the workers' gradients.
      density_after: Float[], density of the sum.
      densification: Float[], their ratio, up to w; 0 where nothing was sent, and below
        1 where sums cancel.
      push_imbalance: Float[], the longest list that a worker sent over the mean of its
        lists, at worst; at least 1.
      pull_imbalance: Float[], the most non-zero sums of an owner over the mean.
      overflow: Bool[], whether something did not fit, so that the step was dense.
        Imbalances are then those of what was tried.
    """

    density_before: Float[Array, ""]
    density_after: Float[Array, ""]
    densification: Float[Array, ""]
    push_imbalance: Float[Array, ""]
    pull_imbalance: Float[Array, ""]
    overflow: Bool[Array, ""]


class Sizes(NamedTuple):
    """Static sizes of the messages of a step.

    Attributes:
      area: places of an owner.
      push: slots of a list.
      pull: slots for the non-zero sums of an owner.
      form: how those are sent: "indices", "bitmap" or "dense".
    """

    area: int
    push: int
    pull: int
    form: str


def sizes_of(
    owners: _owners.OwnerMap,
    units: int,
    slots: int,
    width: int,
    worker_count: int,
    capacity: float | None,
    densification: float | None,
) -> Sizes:
    """The sizes for `slots` payload slots among `units` units of `width` values."""
    expected = slots
    if capacity is not None:
        expected = max(1, min(slots, math.ceil(capacity * units)))
    area = owners.size(units, worker_count)
    push = min(expected, _even(expected, worker_count, _PUSH_SLACK))
    growth = densified(expected / units, worker_count, densification, worker_count)
    total = min(units, worker_count * expected, math.ceil(growth * expected))
    pull = min(area, worker_count * push, _even(total, worker_count, _PULL_SLACK))
    return Sizes(area, push, pull, _form(owners, area, pull, width))


def _even(total: int, worker_count: int, slack: int) -> int:
    """Slots that hold the largest of `worker_count` shares of `total`, very likely."""
    spread = math.sqrt(slack * worker_count * math.log(worker_count) / total)
    return math.ceil((1 + spread) * total / worker_count)


def _form(owners: _owners.OwnerMap, area: int, pull: int, width: int) -> str:
    """The form of the owners' messages with the fewest bytes."""
    value = 4 * width
    bytes_of = {"indices": _codec.plain(pull, area).size + pull * value}
    if owners.dense:
        bytes_of["bitmap"] = 4 * -(-area // _bits.WORD) + pull * value
        bytes_of["dense"] = area * value
    return min(bytes_of, key=lambda form: bytes_of[form])


def hashed_owners(
    *,
    capacity: float | None = None,
    densification: float | None = None,
    owners: str = "permutation",
) -> Exchange:
    """Every coordinate has an owner, who sums what all workers have there.

    1. Push: each worker sorts its non-zeros by owner and sends each owner its list
       (all-to-all).
    2. Each owner adds the lists up, one worker at a time.
    3. Pull: each owner sends its non-zero sums to everybody (all-gather), with their
       places as a list or as a bitmap over the places that it owns, or all its sums,
       whichever has the fewest bytes. The facts of the report ride along.

    A hash picks owners, so that they share the work evenly wherever the non-zeros lie;
    it is keyed by the step, so that a support that overflows once does not do so for
    ever. Messages have fixed sizes: if anything does not fit anywhere, all workers
    agree to average densely in this step, and the report says so. The update is the
    same in either case.

    Received per worker, for d non-zeros per coordinate, growing g times in the sum:
    `(w-1)/w (2 d + g d + 1/32)` of 4 n bytes with 32-bit indices and a bitmap, and in
    proportion where indices take 16 bits (an owner has less than 65536 places) or an
    index stands for a row.

    Args:
      capacity: the largest density of a worker's vector that has to fit, in (0, 1]; by
        default as many as the sparsifier sends.
      densification: how many times denser the sum is than one vector, from 1 to w, as
        which more counts; by default as for independent supports, `(1 - (1-d)^w) / d`.
      owners: "permutation", which ranks by owner, or "hierarchical_hash", which fills
        tables as in the paper and needs a whole vector at each owner.

    Returns:
      An exchange for overlapping and disjoint choices, of coordinates or rows.

    Raises:
      TypeError: if `capacity` or `densification` is not a number.
      ValueError: if `capacity` is outside (0, 1], `densification` below 1 or not
        finite, or `owners` unknown.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.topk(0.01),
      ...     exchange=exchanges.hashed_owners(),
      ...     memory=memories.error_feedback(),
      ... )

    References:
      Wang et al., "ZEN: Empowering Distributed Training with Sparsity-driven Data
      Synchronization", OSDI 2025 (arXiv 2309.13254).
    """
    capacity, densification = check_sizes(capacity, densification)
    if owners not in _owners.MAPS:
        raise ValueError(
            f"owners: got {owners!r}, expected one of {sorted(_owners.MAPS)}."
        )
    mapping = _owners.MAPS[owners]()

    def apply(vector, payload, state, step, workers, layout):
        n, count = vector.shape[0], workers.count()
        if payload.indices is None or not payload.indices.size:
            whole = _whole_details()
            return deliver_all(vector, payload.dropped, workers, layout, whole), state
        units, shape = units_of(n, payload.values)
        sizes = sizes_of(
            mapping,
            units,
            payload.indices.size,
            math.prod(shape),
            count,
            capacity,
            densification,
        )
        counted = payload.complete is True and not layout.exact

        lists = mapping.split(payload.indices, units, count, sizes.push, step)
        received = _push(payload, lists, mapping, units, sizes, workers)
        sums, contributors = _add_up(*received, sizes.area, counted)

        flags = jnp.any(sums.reshape(sizes.area, -1) != 0, axis=1)
        owned = jnp.sum(flags, dtype=jnp.int32)
        body = _encode(sums / count, contributors, flags, sizes)
        longest = jnp.max(lists.counts)
        pushed = jnp.sum(lists.counts, dtype=jnp.int32)
        failed = (
            lists.failed
            | (longest > sizes.push)
            | (owned > sizes.pull)
            | jnp.logical_not(payload.complete)
        )
        facts = Facts(payload.demand, payload.threshold, payload.dropped, failed)
        message = (facts, (longest, pushed, owned), body)
        gathered = workers.gather(_codec.pack(message))
        facts, (longest, pushed, owned), body = _codec.unpack(gathered, message)
        after = jnp.sum(owned, dtype=jnp.int32)

        def decode():
            return _decode(body, mapping, units, shape, count, step, sizes, after)

        tried = after

        def details(before, after, overflow):
            return HashedOwnersDetails(
                before,
                after,
                ratio(after, before),
                jnp.max(ratio(longest, pushed)) * count,
                ratio(jnp.max(owned), tried) * count,
                overflow,
            )

        delivery = deliver_sum(
            vector, payload, facts, decode, after, details, workers, layout
        )
        return delivery, state

    def report(layout, worker_count):
        zero = jnp.zeros((), jnp.float32)
        details = HashedOwnersDetails(*[zero] * 5, jnp.zeros((), jnp.bool_))
        return zero_report(worker_count, details)

    accepts = frozenset({"disjoint", "overlapping"})
    return Exchange(no_state, apply, report, accepts, "hashed_owners")


def _whole_details():
    one = jnp.ones((), jnp.float32)
    return HashedOwnersDetails(*[one] * 5, jnp.zeros((), jnp.bool_))


def _push(payload, lists, mapping, units, sizes, workers):
    """All workers' lists for this one: places [w, c], values [w, c, ...]."""
    count = workers.count()
    indices = payload.indices.at[lists.slots].get(mode="fill", fill_value=units)
    values = payload.values.at[lists.slots].get(mode="fill", fill_value=0)
    area = sizes.area
    places = jnp.where(indices < units, mapping.place(indices, count), area)
    message = (_codec.plain(places.size, area).encode(places), values)
    received = workers.all_to_all(jax.vmap(_codec.pack)(message))
    codes, values = _codec.unpack(received, jax.tree.map(lambda x: x[0], message))
    return codes.astype(jnp.int32), values


def _add_up(places, values, area, counted):
    """Sums [area, ...] of the lists, and how many contributed, Int32[area] or None."""

    # One worker's list at a time: its places are unique, so that the order of
    # additions is the workers' and the same wherever the program runs.
    def add(j, carry):
        sums, contributors = carry
        sums = sums.at[places[j]].add(values[j], mode="drop")
        if counted:
            contributors = contributors.at[places[j]].add(1, mode="drop")
        return sums, contributors

    start = (
        jnp.zeros((area, *values.shape[2:]), jnp.float32),
        jnp.zeros((area,), jnp.int32) if counted else None,
    )
    return jax.lax.fori_loop(0, len(places), add, vary_like(start, values))


def _encode(means, contributors, flags, sizes):
    """An owner's message: non-zero means, their places, and who contributed."""
    if sizes.form == "dense":
        return (means, *_counts(contributors))
    words = _bits.pack(flags)
    ranks = jnp.arange(sizes.pull, dtype=jnp.int32)
    places = jnp.minimum(_bits.positions(words, ranks, lambda r: r), sizes.area)
    values = means.at[places].get(mode="fill", fill_value=0)
    if sizes.form == "indices":
        words = _codec.plain(places.size, sizes.area).encode(places)
    if contributors is not None:
        contributors = contributors.at[places].get(mode="fill", fill_value=0)
    return (words, values, *_counts(contributors))


def _counts(contributors):
    return () if contributors is None else (contributors.astype(jnp.uint16),)


def _decode(body, mapping, units, shape, count, step, sizes, after):
    """The means [units, ...] of all owners' messages, and who contributed."""
    ranks = jnp.arange(sizes.pull, dtype=jnp.int32)
    if sizes.form == "dense":
        values, *contributors = body
        places = jnp.arange(sizes.area, dtype=jnp.int32)
        places = jnp.broadcast_to(places[None], values.shape[:2])
    elif sizes.form == "bitmap":
        words, values, *contributors = body
        places = jax.vmap(lambda row: _bits.positions(row, ranks, lambda r: r))(words)
    else:
        codes, values, *contributors = body
        places = codes.astype(jnp.int32)
    owner = jnp.arange(count, dtype=jnp.int32)[:, None]
    index = mapping.unit(owner, places, count, step)
    index = jnp.where(places < sizes.area, index, units).reshape(-1)
    size = units * math.prod(shape)
    means = late_zeros(size, after).reshape(units, *shape)
    # Each unit has one owner: indices are unique.
    means = insert(means, index, values.reshape(-1, *shape))
    if not contributors:
        return means, None
    many = contributors[0].astype(jnp.int32).reshape(-1)
    return means, jnp.zeros((units,), jnp.int32).at[index].set(many, mode="drop")
