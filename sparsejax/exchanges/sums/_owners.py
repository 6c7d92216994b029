"""Maps from units (coordinates, or rows) to owners: the workers that sum them.

Every worker computes the whole map. A map has to spread any set of units evenly, since
messages have a fixed size. Nothing here communicates.

Shapes: `u` units, `w` workers, `k` slots of a choice, `c` slots of a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.vectors import _bits
from sparsejax.vectors._mixing import mixed

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int, UInt32

# Constants of `hierarchical_hash`: the number of hash functions to try; the size of the
# main area, relative to the non-zeros of an owner; and the size of the serial area,
# relative to the main area.
_ROUNDS = 3
_LOAD = 2
_SERIAL = 10
# Extra slots of the serial area, in square roots of the main area. Tables are not sent,
# so extra slots cost no bytes. Without them, 82 % of the steps overflowed with 30 of
# 600 coordinates on 8 workers, and 3 % with 300 of 6000.
_SPREAD = 4


class Lists(NamedTuple):
    """The slots of this worker's choice, listed by owner. Per worker.

    Attributes:
      slots: Int32[w, c], numbers of slots; empty places hold `k`.
      counts: Int32[w], the number of slots of each owner, including those that do not
        fit.
      failed: Bool[], whether slots were lost before they were listed.
    """

    slots: Int[Array, "w c"]
    counts: Int[Array, " w"]
    failed: Bool[Array, ""]


class OwnerMap(NamedTuple):
    """A map from units to owners, and to places at the owner.

    Attributes:
      split: `(indices [k], units, worker_count, length, key []) -> Lists` with
        `c = length`. Empty slots of `indices` hold `units`.
      size: `(units, worker_count) -> int`, static: the number of places of an owner.
      place: `(indices, worker_count) -> Int32`, the place of each unit at its owner.
      unit: `(owner, place, worker_count, key []) -> Int32`, the unit at that place.
      dense: whether all places of an owner belong to its own units. An owner can then
        send a bitmap of its places, or the values of all places.
    """

    split: Callable[..., Lists]
    size: Callable[[int, int], int]
    place: Callable[..., Int[Array, " *shape"]]
    unit: Callable[..., Int[Array, " *shape"]]
    dense: bool


def mix(
    x: Int[Array, " *shape"], key: Int[Array, ""] | int
) -> UInt32[Array, " *shape"]:
    """UInt32[...]: a well-mixed hash of `x` under `key`."""
    key = jnp.asarray(key).astype(jnp.uint32) * jnp.uint32(0x9E3779B9)
    x = x.astype(jnp.uint32)
    # Hashed twice: one hash only combines the key with `x` by XOR, so another key would
    # only reorder the sequence.
    return mixed(mixed(x, key), key)


def _below(hashed: UInt32[Array, " *shape"], bound: int) -> Int[Array, " *shape"]:
    return (hashed % jnp.uint32(bound)).astype(jnp.int32)


def permutation() -> OwnerMap:
    """A keyed bijection from `[0, w L)` to (owner, place), `L = ceil(u / w)`.

    Group `s` consists of the units `s w, ..., s w + w - 1`. Every owner has one unit of
    each group, at place `s`. A hash of `s` picks the owner of the group's first unit:

        owner(x) = (x mod w + hash(x // w)) mod w,    place(x) = x // w.

    The inverse is as simple. An owner has exactly L places and needs no list of them.
    Units of one group have different owners, and units of different groups independent
    owners, so loads are at least as even as with an ideal hash function. Ascending
    units have ascending places.
    """

    def split(indices, units, worker_count, length, key):
        owner = indices + _below(mix(indices // worker_count, key), worker_count)
        owner = jnp.where(indices < units, owner % worker_count, worker_count)
        return _lists(owner, worker_count, length)

    def size(units, worker_count):
        return -(-units // worker_count)

    def place(indices, worker_count):
        return indices // worker_count

    def unit(owner, place, worker_count, key):
        turn = _below(mix(place, key), worker_count)
        return place * worker_count + (owner - turn) % worker_count

    return OwnerMap(split, size, place, unit, dense=True)


def hierarchical_hash() -> OwnerMap:
    """Makes the lists by hashing into tables, as published, instead of by sorting.

    A hash function `h0` picks the owner of a unit. Each worker has a table for each
    owner, with about twice as many places as the owner has non-zeros. Each of three
    hash functions in turn picks a place for every unit without one; the unit writes
    itself there and reads back whether the place is its own. Units that are left over
    are ranked into a serial area. The occupied places of the tables are sent. If the
    serial area is too small, the step is dense.

    Owners add into a whole vector, since they have no list of their own units.

    References:
      Wang et al., "ZEN: Empowering Distributed Training with Sparsity-driven Data
      Synchronization", OSDI 2025.
    """

    def split(indices, units, worker_count, length, key):
        k = indices.size
        main = max(1, -(-_LOAD * k // worker_count))
        serial = min(length, main // _SERIAL + math.ceil(_SPREAD * math.sqrt(main)))
        width = main + serial
        valid = indices < units
        owner = jnp.where(valid, _below(mix(indices, key), worker_count), worker_count)
        ids = jnp.arange(k, dtype=jnp.int32)
        table = jnp.full((worker_count * width,), k, jnp.int32)
        nowhere = table.size
        waiting = valid
        for i in range(_ROUNDS):
            place = owner * width + _below(mix(indices, key + 7919 * (i + 1)), main)
            free = table.at[place].get(mode="fill", fill_value=-1) == k
            aim = jnp.where(waiting & free, place, nowhere)
            # The writer with the smallest number wins, so the outcome is defined.
            table = table.at[aim].min(ids, mode="drop")
            waiting = waiting & (table.at[aim].get(mode="fill", fill_value=-1) != ids)
        late = _lists(jnp.where(waiting, owner, worker_count), worker_count, serial)
        tables = table.reshape(worker_count, width).at[:, main:].set(late.slots)
        places, counts = _compact(tables < k, length)
        slots = jnp.take_along_axis(tables, jnp.minimum(places, width - 1), axis=1)
        return Lists(
            jnp.where(places < width, slots, k), counts, jnp.any(late.counts > serial)
        )

    return OwnerMap(
        split,
        size=lambda units, worker_count: units,
        place=lambda indices, worker_count: indices,
        unit=lambda owner, place, worker_count, key: place,
        dense=False,
    )


def _lists(owner: Int[Array, " k"], worker_count: int, length: int) -> Lists:
    """Lists the slots of each owner in ascending order; `owner` [k] is per slot."""
    ranks = jnp.arange(worker_count, dtype=jnp.int32)
    slots, counts = _compact(owner[None] == ranks[:, None], length)
    return Lists(slots, counts, jnp.zeros((), jnp.bool_))


def _compact(
    flags: Bool[Array, "w k"], length: int
) -> tuple[Int[Array, "w c"], Int[Array, " w"]]:
    """The set positions in each row of `flags`, empty slots `k`, and their number."""
    k = flags.shape[1]
    words = jax.vmap(_bits.pack)(flags)
    counts = jnp.sum(_bits.popcount(words), axis=1, dtype=jnp.int32)
    if not k:
        return jnp.full((flags.shape[0], length), k, jnp.int32), counts
    ranks = jnp.arange(length, dtype=jnp.int32)
    found = jax.vmap(lambda row: _bits.positions(row, ranks, lambda rank: rank))(words)
    return jnp.minimum(found, k), counts


MAPS = {"permutation": permutation, "hierarchical_hash": hierarchical_hash}
