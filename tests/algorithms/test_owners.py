"""Maps to owners: all workers agree, owners get equal shares, and all units arrive."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.exchanges.sums import _owners
from tests.harness import WORKERS

N = 1003  # not divisible by the number of workers


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("units", [1, 5, 1000, 1003])
def test_permutation_is_a_bijection(workers, units):
    owners = _owners.permutation()
    size = owners.size(units, workers)
    owner, place = np.divmod(np.arange(workers * size, dtype=np.int32), size)

    @jax.jit
    def there_and_back(owner, place):
        index = owners.unit(owner, place, workers, 5)
        return index, owners.place(index, workers)

    index, again = there_and_back(owner, place)
    assert sorted(np.asarray(index)) == list(range(workers * size))
    np.testing.assert_array_equal(again, place)


@pytest.mark.parametrize("name", sorted(_owners.MAPS))
def test_workers_meet_at_one_owner(name):
    """All workers send a unit to the same owner, and all units arrive."""
    owners = _owners.MAPS[name]()
    rng = np.random.default_rng(4)
    split = jax.jit(lambda indices: owners.split(indices, N, WORKERS, 400, 9))
    home = {}
    for _ in range(4):
        chosen = np.sort(rng.choice(N, 300, replace=False)).astype(np.int32)
        padded = jnp.asarray(np.append(chosen, np.full(100, N, np.int32)))
        lists = split(padded)
        arrived = []
        for owner, slots in enumerate(np.asarray(lists.slots)):
            for index in np.asarray(padded)[slots[slots < 400]]:
                assert home.setdefault(index, owner) == owner
                arrived.append(index)
        assert sorted(arrived) == list(chosen)
        assert not lists.failed
        assert lists.counts.sum() == 300


@functools.cache
def splitter(name, n, m):
    """`(indices [m], key) -> lists`, compiled once for all supports."""
    owners = _owners.MAPS[name]()
    return jax.jit(lambda indices, key: owners.split(indices, n, WORKERS, m, key))


@pytest.mark.parametrize("name", sorted(_owners.MAPS))
@pytest.mark.parametrize("kind", ["contiguous", "strided", "random"])
def test_balance_is_within_the_bound(name, kind):
    """Wang et al.: with probability 1 - 1/w the bounds hold; here for 20 keys of 20."""
    n, m = 40_000, 2000
    rng = np.random.default_rng(5)
    chosen = {
        "contiguous": np.arange(m) + 1234,
        "strided": np.arange(m) * 16,
        "random": np.sort(rng.choice(n, m, replace=False)),
    }[kind].astype(np.int32)
    split = splitter(name, n, m)
    largest = [int(split(chosen, key).counts.max()) for key in range(20)]
    bound = m / WORKERS * (1 + math.sqrt(6 * WORKERS * math.log(WORKERS) / m))
    assert max(largest) <= bound
    contiguous = np.bincount(chosen * WORKERS // n, minlength=WORKERS)
    if kind == "contiguous":
        assert contiguous.max() / contiguous.mean() == pytest.approx(WORKERS, rel=0.3)


def test_table_places_read_back():
    """At half load, few units go from the tables to the serial area; none is lost."""
    owners = _owners.hierarchical_hash()
    k = 4000
    chosen = jnp.arange(k, dtype=jnp.int32) * 3
    lists = jax.jit(lambda c: owners.split(c, 3 * k, WORKERS, k, 0))(chosen)
    slots = np.asarray(lists.slots)
    assert sorted(slots[slots < k]) == list(range(k))
    assert not lists.failed


@pytest.mark.parametrize(("k", "workers"), [(3, 8), (30, 4), (30, 8), (300, 8)])
def test_short_tables_have_room_for_chance(k, workers):
    """Loads of short tables vary most: without extra room, 82 % of the steps failed."""
    owners = _owners.hierarchical_hash()
    rng = np.random.default_rng(7)
    chosen = [np.sort(rng.choice(20 * k, k, replace=False)) for _ in range(400)]
    split = jax.vmap(lambda i, key: owners.split(i, 20 * k, workers, k, key).failed)
    failed = jax.jit(split)(np.stack(chosen).astype(np.int32), np.arange(400))
    assert not failed.any()
