"""The exact sum of sparse vectors: hashed owners add all values of their units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._checks import check_choice
from sparsejax._workers import vary_like
from sparsejax.exchanges._dense import EVERY_SUPPORT, or_whole
from sparsejax.exchanges._units import Units
from sparsejax.exchanges.sums import _owners
from sparsejax.exchanges.sums._sizes import Sizes, check_sizes, sizes_of
from sparsejax.exchanges.sums._sparse_sum import (
    Facts,
    counts_contributors,
    deliver_sum,
)
from sparsejax.parts import Exchange, Step
from sparsejax.vectors import _bits, _codec
from sparsejax.vectors._ratio import ratio

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


class HashedOwnersDetails(NamedTuple):
    """`Report.details` of `hashed_owners`. Replicated.

    Attributes:
      density_before: Float[], mean density of the workers' gradients.
      density_after: Float[], density of the sum.
      densification: Float[], their ratio, up to w; 0 if nothing was sent, and below 1
        if sums cancel.
      push_imbalance: Float[], the longest list of a worker over the mean of its lists,
        for the worst worker; at least 1.
      pull_imbalance: Float[], the largest number of non-zero sums of an owner over the
        mean number.
      overflow: Bool[], whether something did not fit, so the step was dense. The
        imbalances then describe the attempt.
    """

    density_before: Float[Array, ""]
    density_after: Float[Array, ""]
    densification: Float[Array, ""]
    push_imbalance: Float[Array, ""]
    pull_imbalance: Float[Array, ""]
    overflow: Bool[Array, ""]


class _Plan(NamedTuple):
    """The owners of the units in one step, and the sizes of the messages.

    Attributes:
      owners: the map from units to owners.
      units: static, the units.
      sizes: static, the sizes of the messages.
      worker_count: static, w.
      key: Int32[], replicated: the step, so a support that overflows in one step does
        not overflow in all steps.
    """

    owners: _owners.OwnerMap
    units: Units
    sizes: Sizes
    worker_count: int
    key: Int[Array, ""]


def hashed_owners(
    *,
    max_density: float | None = None,
    densification: float | None = None,
    owners: str = "permutation",
) -> Exchange:
    """Every coordinate has an owner, a worker who sums all workers' values there.

    1. Push: each worker sorts its non-zeros by owner and sends each owner a list
       (all-to-all).
    2. Each owner adds the lists, one worker at a time.
    3. Pull: each owner sends its non-zero sums to all workers (all-gather), in the
       shortest of three forms: with a list of places, with a bitmap over its places, or
       all its sums. The same message carries the facts of the report.

    A hash picks the owners, so they share the work evenly wherever the non-zeros lie.
    The step is the key of the hash, so a support that overflows in one step does not
    overflow in all steps. Messages have fixed sizes. If anything does not fit, all
    workers average densely in this step, and the report shows an overflow; the update
    is the same in both cases.

    With d non-zeros per coordinate, and g times as many in the sum, a worker receives
    `(w-1)/w (2 d + g d + 1/32)` of 4 n bytes with 32-bit indices and a bitmap. Indices
    need 16 bits if an owner has less than 65536 places, and an index may stand for a
    row: both reduce the bytes in proportion.

    Args:
      max_density: the largest density of a worker's vector that has to fit, in (0, 1];
        by default the sparsifier's slots.
      densification: the density of the sum over the density of one vector, in [1, w];
        larger values are taken as w. The default assumes independent supports:
        `(1 - (1-d)^w) / d`.
      owners: "permutation", which sorts slots by owner, or "hierarchical_hash", which
        fills tables as in the paper and needs a whole vector at each owner.

    Returns:
      An exchange for all choices, of coordinates or rows.

    Raises:
      TypeError: if `max_density` or `densification` is not a number.
      ValueError: if `max_density` is outside (0, 1], `densification` below 1 or not
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
    max_density, densification = check_sizes(max_density, densification)
    check_choice("owners", owners, tuple(sorted(_owners.MAPS)))
    owner_map = _owners.MAPS[owners]()

    def apply(vector, choice, state, step):
        units = Units.of(choice, step.n)
        sizes = sizes_of(
            owner_map,
            units.number,
            choice.indices.size,
            units.size,
            step.w,
            max_density,
            densification,
        )
        plan = _Plan(owner_map, units, sizes, step.w, step.index)
        values = units.values(vector, choice.indices)

        lists = owner_map.split(
            choice.indices, units.number, plan.worker_count, sizes.push, plan.key
        )
        places, received = _push(choice.indices, values, lists, plan, step)
        sums, contributors = _add_up(
            places, received, sizes.area, counts_contributors(step)
        )

        flags = jnp.any(sums.reshape(sizes.area, -1) != 0, axis=1)
        owned = jnp.sum(flags, dtype=jnp.int32)
        body = _encode(sums / plan.worker_count, contributors, flags, sizes)
        longest = jnp.max(lists.counts)
        pushed = jnp.sum(lists.counts, dtype=jnp.int32)
        failed = lists.failed | (longest > sizes.push) | (owned > sizes.pull)
        facts = Facts.of(choice, failed, step)
        message = (facts, (longest, pushed, owned), body)
        gathered = step.workers.gather(_codec.pack(message))
        *facts, body = _codec.unpack(gathered, message)
        facts, (longest, pushed, owned) = _xla.computed_together(facts)
        tried = jnp.sum(owned, dtype=jnp.int32)

        def report(before, after, overflow):
            return HashedOwnersDetails(
                before,
                after,
                ratio(after, before),
                jnp.max(ratio(longest, pushed)) * plan.worker_count,
                ratio(jnp.max(owned), tried) * plan.worker_count,
                overflow,
            )

        delivery = deliver_sum(
            vector,
            choice,
            values,
            facts,
            lambda: _decode(body, plan, tried),
            tried,
            report,
            step,
        )
        return delivery, state

    return Exchange(
        or_whole(apply, lambda layout, worker_count: _details(1)),
        EVERY_SUPPORT,
        "hashed_owners",
        details=lambda layout, worker_count: _details(0),
    )


def _details(value: float) -> HashedOwnersDetails:
    """Details in which every number is `value`, without an overflow."""
    number = jnp.asarray(value, jnp.float32)
    return HashedOwnersDetails(
        number, number, number, number, number, jnp.zeros((), jnp.bool_)
    )


def _push(
    indices: Int[Array, " k"],
    values: Float[Array, "k *D"],
    lists: _owners.Lists,
    plan: _Plan,
    step: Step,
) -> tuple[Int[Array, "w c"], Float[Array, "w c *D"]]:
    """Sends lists to the owners; returns the received places and values. Per worker."""
    units, area = plan.units.number, plan.sizes.area
    indices = indices.at[lists.slots].get(mode="fill", fill_value=units)
    values = values.at[lists.slots].get(mode="fill", fill_value=0)
    places = jnp.where(
        indices < units, plan.owners.place(indices, plan.worker_count), area
    )
    message = (_codec.plain(places.size, area).encode(places), values)
    received = step.workers.all_to_all(jax.vmap(_codec.pack)(message))
    codes, values = _codec.unpack(received, jax.tree.map(lambda x: x[0], message))
    return codes.astype(jnp.int32), values


def _add_up(
    places: Int[Array, "w c"], values: Float[Array, "w c *D"], area: int, counted: bool
) -> tuple[Float[Array, "area *D"], Int[Array, " area"] | None]:
    """The sums of the lists, and the contributors to each sum if `counted`."""

    # The places of one worker's list are unique, and lists are added one by one, so the
    # order of the additions is the same on every device.
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


def _encode(
    means: Float[Array, "area *D"],
    contributors: Int[Array, " area"] | None,
    flags: Bool[Array, " area"],
    sizes: Sizes,
) -> tuple[Array, ...]:
    """An owner's message: non-zero means, their places and their contributors."""
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


def _counts(contributors: Int[Array, " m"] | None) -> tuple[Any, ...]:
    return () if contributors is None else (contributors.astype(jnp.uint16),)


def _decode(
    body: tuple[Array, ...], plan: _Plan, after: Int[Array, ""]
) -> tuple[Float[Array, "u *D"], Int[Array, " u"] | None]:
    """The means in all owners' messages, and the number of contributors to each."""
    units, sizes = plan.units, plan.sizes
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
    owner = jnp.arange(plan.worker_count, dtype=jnp.int32)[:, None]
    index = plan.owners.unit(owner, places, plan.worker_count, plan.key)
    index = jnp.where(places < sizes.area, index, units.number).reshape(-1)
    means = units.split(_xla.late_zeros(units.n, after))
    # Each unit has one owner, so indices are unique.
    means = _xla.insert(means, index, values.reshape(-1, *units.shape))
    if not contributors:
        return means, None
    many = contributors[0].astype(jnp.int32).reshape(-1)
    counts = jnp.zeros((units.number,), jnp.int32)
    return means, counts.at[index].set(many, mode="drop")
