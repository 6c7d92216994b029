"""Packed bits against numpy oracles."""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax import _xla
from sparsejax.vectors import _bits
from tests.harness import OPTIMIZED

P = jax.sharding.PartitionSpec
SIZES = (0, 1, 31, 32, 33, 128, 1000)
FEW = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module", autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def flags_of(m, share, seed):
    return np.random.default_rng(seed).random(m) < share


def pack_oracle(flags):
    padded = np.zeros(-(-flags.size // 32) * 32, np.uint8)
    padded[: flags.size] = flags
    return np.packbits(padded, bitorder="little").view("<u4")


shares = st.sampled_from([0.0, 0.01, 0.3, 0.97, 1.0])
seeds = st.integers(0, 2**32 - 1)
pack = jax.jit(_bits.pack)


@FEW
@given(st.sampled_from(SIZES), shares, seeds)
def test_pack_and_unpack(m, share, seed):
    flags = flags_of(m, share, seed)
    words = pack(flags)
    assert words.dtype == jnp.uint32
    np.testing.assert_array_equal(words, pack_oracle(flags))
    np.testing.assert_array_equal(_bits.unpack(words, m), flags)
    assert _bits.unpack(words, m).dtype == jnp.bool
    np.testing.assert_array_equal(jax.jit(_bits.pack_by_column)(flags), words)


def test_vectors_of_any_length_are_packed_as_fast():
    """Padding to whole blocks made them ten times slower on CPU."""
    runs, times = [], [[], []]
    for n in (1 << 20, (1 << 20) + 33):
        pack_positive = jax.jit(
            lambda x: _bits.pack_whole(x > 0), compiler_options=OPTIMIZED
        )
        values = np.random.default_rng(n).standard_normal(n, np.float32)
        runs.append(functools.partial(pack_positive, jnp.asarray(values)))
        jax.block_until_ready(runs[-1]())
    for _ in range(15):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            taken.append(time.perf_counter() - start)
    assert min(times[1]) < 3 * min(times[0])


@FEW
@given(st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))
def test_popcount_and_select_bit(words):
    counts = [word.bit_count() for word in words]
    found = _bits.popcount(jnp.array(words, jnp.uint32))
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, counts)
    ranks = np.tile(np.arange(32, dtype=np.int32), (4, 1))
    repeated = np.repeat(np.array(words, np.uint32)[:, None], 32, axis=1)
    where = jax.jit(_bits.select_bit)(repeated, ranks)
    assert where.dtype == jnp.int32
    for row, word, count in zip(np.asarray(where), words, counts, strict=True):
        bits = [j for j in range(32) if word >> j & 1]
        np.testing.assert_array_equal(row[:count], bits)


@functools.cache
def first_bits(k, known, platform="cpu"):
    ranks = jnp.arange(k, dtype=jnp.int32)
    first_slot = (lambda o: o) if known else None

    def find(words):
        with _xla.traced_for(platform):
            return _bits.positions(words, ranks, first_slot)

    return jax.jit(find)


def positions_oracle(flags, ranks):
    where = np.append(np.flatnonzero(flags), -(-flags.size // 32) * 32)
    return where[np.minimum(ranks, where.size - 1)]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("m", "k"), [(0, 3), (31, 0), (32, 1), (33, 40), (1000, 700)])
def test_positions_of_the_first_bits(m, k, known, platform):
    @settings(max_examples=12, deadline=None)
    @given(shares, seeds)
    def check(share, seed):
        flags = flags_of(m, share, seed)
        found = first_bits(k, known, platform)(pack_oracle(flags))
        assert found.dtype == jnp.int32
        np.testing.assert_array_equal(found, positions_oracle(flags, np.arange(k)))

    check()


any_positions = jax.jit(_bits.positions)


@jax.jit
def any_positions_known(words, ranks):
    def first_slot(offsets):
        return jnp.searchsorted(ranks, offsets).astype(jnp.int32)

    return _bits.positions(words, ranks, first_slot)


@FEW
@given(shares, seeds, st.sampled_from([1, 5, 1000, 1001, 5000]))
def test_positions_of_any_ascending_ranks(share, seed, limit):
    flags = flags_of(1000, share, seed)
    ranks = np.random.default_rng(seed + 1).integers(0, limit, 40, dtype=np.int32)
    ranks.sort()
    words, expected = pack_oracle(flags), positions_oracle(flags, ranks)
    np.testing.assert_array_equal(any_positions(words, ranks), expected)
    np.testing.assert_array_equal(any_positions_known(words, ranks), expected)


@pytest.mark.parametrize("start", [0, 32 * 5, 32 * 8, 968])
def test_positions_after_empty_blocks(start):
    # Several blocks begin at the same offset, and only the last has set bits.
    flags = np.zeros(1000, bool)
    flags[start : start + 32] = True
    expected = positions_oracle(flags, np.arange(700))
    np.testing.assert_array_equal(first_bits(700, True)(pack_oracle(flags)), expected)


def test_positions_of_the_longest_vector():
    words = jax.ShapeDtypeStruct((2**26,), jnp.uint32)
    ranks = jax.ShapeDtypeStruct((5,), jnp.int32)
    found = jax.eval_shape(_bits.positions, words, ranks)
    assert (found.shape, found.dtype) == ((5,), jnp.int32)


def test_under_vmap_and_shard_map():
    flags = np.stack([flags_of(1000, i / 8, i) for i in range(8)])
    expected = [positions_oracle(row, np.arange(64)) for row in flags]

    def local(flags):
        words = _bits.pack(flags)
        ranks = jnp.arange(64, dtype=jnp.int32)
        return _bits.positions(words, ranks, lambda o: o), _bits.unpack(words, 1000)

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    mapped = jax.shard_map(
        lambda flags: jax.tree.map(lambda x: x[None], local(flags[0])),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=True,
    )
    for function in (jax.vmap(local), mapped):
        found, unpacked = jax.jit(function)(flags)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(unpacked, flags)
