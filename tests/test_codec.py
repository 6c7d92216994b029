"""Codes for ascending indices: round trips and sizes."""

from __future__ import annotations

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.vectors import _codec, _reach

# There are few shapes and many lists, since each shape is compiled once.
SHAPES = [(1, 1), (1, 7), (5, 3), (31, 1000), (32, 32), (33, 65_535), (70, 2**31 - 1)]


@functools.cache
def round_trip(make, *arguments):
    code = make(*arguments)

    def there_and_back(numbers):
        words = code.encode(numbers)
        assert words.nbytes == code.size
        return code.decode(words)

    return jax.jit(there_and_back)


@pytest.mark.newer_waits
@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(data=st.data())
def test_elias_fano_of_any_ascending_list(data):
    slots, span = data.draw(st.sampled_from(SHAPES))
    low_bits = data.draw(st.sampled_from([0, 3, 8, 17]))
    hypothesis.assume(span >> low_bits < 10_000)
    numbers = st.lists(st.integers(0, span), min_size=slots, max_size=slots)
    numbers = np.array(sorted(data.draw(numbers)), np.int32)
    back = round_trip(_codec.EliasFano, slots, span, low_bits)(numbers)
    np.testing.assert_array_equal(back, numbers)


@pytest.mark.newer_waits
@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(data=st.data())
def test_indices_of_any_choice(data):
    """Distinct indices inside a window, then empty slots, in the cheapest code."""
    slots, span = data.draw(st.sampled_from(SHAPES))
    start = data.draw(st.sampled_from([0, 5])) if span < 2**30 else 0
    n = start + span
    filled = data.draw(st.integers(0, min(slots, span)))
    chosen = st.sets(st.integers(0, span - 1), min_size=filled, max_size=filled)
    indices = np.full(slots, n, np.int32)
    indices[:filled] = sorted(data.draw(chosen))
    indices[:filled] += start

    back = choice_round_trip(slots, span, n)(indices, np.int32(start))
    np.testing.assert_array_equal(back, indices[None])


@functools.cache
def choice_round_trip(slots, span, n):
    def there_and_back(indices, start):
        code = _reach.encode_indices(indices, start, span, n)
        return _reach.decode_indices(code[None], start[None], span, n, slots)

    return jax.jit(there_and_back)


REACHES = [(50, 1500, 3300), (40, 4000, 30_000), (33, 400_000, 945_000)]


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(data=st.data())
def test_lists_that_reach_beyond_the_usual_span(data):
    """They have the bytes of usual lists, but hold fewer indices."""
    slots, usual, span = data.draw(st.sampled_from(REACHES))
    code, long = _reach.reach(slots, usual, span), data.draw(st.booleans())
    assert slots // 2 <= code.room < slots
    assert code.code.size < _codec.cheapest(slots, span).size
    most, end = (code.room, span) if long else (slots, usual)
    chosen = data.draw(st.sets(st.integers(0, end - 1), max_size=most))
    indices = np.full(slots, span + 7, np.int32)
    indices[: len(chosen)] = sorted(chosen)
    indices[: len(chosen)] += 5
    back = reach_round_trip(slots, usual, span)(indices, long)
    np.testing.assert_array_equal(back, indices[None])


@functools.cache
def reach_round_trip(slots, usual, span):
    def there_and_back(indices, long):
        start, n = jnp.int32(5), span + 7
        code = _reach.encode_indices(indices, start, span, n, usual=usual, long=long)
        return _reach.decode_indices(
            code[None], start[None], span, n, slots, usual=usual, long=long[None]
        )

    return jax.jit(there_and_back)


@pytest.mark.parametrize(
    ("slots", "usual", "span"), [(0, 10, 20), (9, 20, 20), (9, 30, 20), (3, 8, 2**31)]
)
def test_a_code_without_a_usual_span_keeps_all_slots(slots, usual, span):
    code = _reach.reach(slots, usual, span)
    assert (code.room, code.code.size) == (slots, _codec.cheapest(slots, span).size)


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["empty", "full", "sentinels", "tight"])
@pytest.mark.parametrize("slots", [1, 31, 32, 95])
def test_extremes(name, slots):
    span = 1000
    numbers = {
        "empty": np.zeros(0, np.int32),
        "full": np.arange(slots, dtype=np.int32),
        "sentinels": np.full(slots, span, np.int32),
        "tight": np.arange(span - slots, span, dtype=np.int32),
    }[name]
    for low_bits in (0, 2, 5):
        code = round_trip(_codec.EliasFano, len(numbers), span, low_bits)
        np.testing.assert_array_equal(code(numbers), numbers)
    code = round_trip(_codec.bitmap, len(numbers), span)
    np.testing.assert_array_equal(code(numbers), numbers)


def test_the_cheapest_code_is_close_to_the_bound():
    """It needs about log2(n / k) + 2 bits per slot; the bound is log2(n / k) + 1.44."""
    for n, k in [(10**6, 10**4), (10**7, 10**4), (10**6, 125), (2**31 - 1, 10**5)]:
        bits = 8 * _codec.cheapest(k, n).size / k
        bound = math.log2(math.e * n / k)
        assert bound < bits < bound + 1.2
    assert _codec.cheapest(500, 1000).size == 4 * math.ceil(1000 / 32)  # a bitmap
    assert _codec.cheapest(2, 60_000).size == 4  # plain
    assert _codec.cheapest(0, 1000).size == 0


def test_messages_keep_every_leaf():
    rng = np.random.default_rng(0)
    tree = {
        "a": jnp.asarray(rng.integers(0, 2**32, 5, dtype=np.uint32)),
        "b": jnp.asarray(True),
        "c": jnp.asarray(rng.normal(size=(2, 3)), jnp.bfloat16),
        "d": jnp.asarray(np.float32(np.nan)),
    }
    words = jnp.stack([_codec.pack(tree), _codec.pack(tree)])
    assert words.dtype == jnp.uint16
    assert words.shape == (2, 2 * 5 + 1 + 6 + 2)
    back = _codec.unpack(words, tree)
    for key, leaf in tree.items():
        assert back[key].dtype == leaf.dtype
        for row in back[key]:
            np.testing.assert_array_equal(row, leaf)
