"""Codes for values in few bits."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsejax.vectors._leaf_scales import LEAVES
from sparsejax.vectors._narrow import value_code

LARGEST = float(np.finfo(np.float32).max)
WIDTHS = [32, 16, 8, 4, 2, 1]


def draw(kind, m):
    rng = np.random.default_rng(m)
    drawn = rng.laplace(size=m)
    drawn = {
        "laplace": drawn,
        "equal": np.full(m, -0.3),
        "zeros": np.zeros(m),
        "some zeros": np.where(rng.random(m) < 0.5, 0, drawn),
        "large": np.sign(drawn) * LARGEST / np.arange(1, m + 1),
        "subnormal": drawn * 1e-41,
        "wide": drawn * 10.0 ** rng.uniform(-37, 37, size=m),
        "two shapes": np.where(np.arange(m) < m // 2, drawn, rng.normal(size=m)),
        "large ones": drawn + 4 * np.sign(drawn),
        "two leaves": np.where(np.arange(m) < m // 2, drawn * 1e-9, drawn * 1e3),
    }[kind]
    return drawn.astype(np.float32)


KINDS = ["laplace", "equal", "zeros", "some zeros", "large", "subnormal", "wide"]


@functools.cache
def trip(bits, m, leaf_count=1):
    code = value_code(bits, m, leaf_count)

    @jax.jit
    def there_and_back(values, leaves=None):
        with jax.numpy_dtype_promotion("strict"):
            words = code.encode(values, leaves)
            return words, code.decode(words, leaves)

    return code, there_and_back


def check(values, bits):
    code, there_and_back = trip(bits, len(values))
    words, decoded = map(np.asarray, there_and_back(values))
    assert words.dtype == np.uint16
    assert words.shape == (code.size,)
    assert np.isfinite(decoded).all()
    assert (np.sign(decoded) * np.sign(values) >= 0).all()
    if bits >= 4 or not values.any():
        assert (decoded[values == 0] == 0).all()
    left, size = (
        np.linalg.norm(x.astype(np.float64)) for x in (decoded - values, values)
    )
    assert left <= 0.99 * size or np.abs(values).max() < np.finfo(np.float32).tiny
    # Both parts give the value back, to the last bit that float32 allows.
    together = decoded.astype(np.float64) + (values - decoded)
    larger = np.maximum(np.abs(decoded), np.abs(values)).astype(np.float64)
    assert (np.abs(together - values) <= 2.0**-23 * larger + 1e-45).all()


@pytest.mark.parametrize("bits", WIDTHS)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40)
)
@example([float(np.finfo(np.float32).tiny)])
@settings(max_examples=100, deadline=None)
def test_decoding_any_list(bits, drawn):
    """Lists of any length up to the capacity; empty slots hold zeros."""
    values = np.zeros(40, np.float32)
    values[: len(drawn)] = drawn
    check(values, bits)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("m", [1, 1500])
def test_decoding_is_finite_and_keeps_signs(bits, m):
    for kind in KINDS:
        check(draw(kind, m), bits)


def trip_in_blocks(kind, bits):
    """Values and decoded values in blocks of 512, each with its own scale."""
    values = draw(kind, 8 * 512)
    code, there_and_back = trip(bits, values.size)
    decoded = np.asarray(there_and_back(values)[1])
    return code, values.reshape(8, 512), decoded.reshape(8, 512)


def test_error_of_16_bits():
    _, values, decoded = trip_in_blocks("two leaves", 16)
    assert (np.abs(decoded - values) <= 2**-8 * np.abs(values)).all()


@pytest.mark.parametrize("kind", ["two leaves", "large ones"])
@pytest.mark.parametrize("bits", [8, 4])
def test_values_take_the_nearest_square(kind, bits):
    code, values, decoded = trip_in_blocks(kind, bits)
    assert code.size == 8 * (2 + 512 * bits // 16)
    top = 2 ** (bits - 1) - 1
    for block, found in zip(np.abs(values), np.abs(decoded), strict=True):
        lowest = max(1 / top, np.sqrt(block.min() / block.max()))
        levels = np.append(np.linspace(lowest, 1, top) ** 2 * block.max(), 0)
        left = np.abs(block[:, None] - levels).min(axis=1)
        # The largest magnitude is sent as bfloat16, and the lowest root in 16 bits.
        assert (np.abs(found - block) <= left + 2**-7 * found).all()


def test_sums_of_magnitudes_are_kept_with_2_bits():
    """By blocks: leaves of different scale do not share the means."""
    code, values, decoded = trip_in_blocks("two leaves", 2)
    assert code.size == 8 * (2 + 512 * 2 // 16)
    np.testing.assert_allclose(
        np.abs(decoded).sum(axis=1), np.abs(values).sum(axis=1), rtol=0.004
    )


def signs_of(block):
    return np.where(block < 0, -1, 1) * np.abs(block).mean()


def largest_of(block):
    """The two largest of each word's 16 (spread) slots, in steps of 2^-0.75."""
    out, top = np.zeros_like(block), np.abs(block).max()
    slots = np.arange(block.size).reshape(16, -1).T
    for word in slots:
        for slot in sorted(word, key=lambda i: -abs(block[i]))[:2]:
            step = np.round(np.log2(abs(block[slot]) / top) / -0.75)
            out[slot] = np.sign(block[slot]) * top * 2 ** (-0.75 * step) * (step < 7)
    return out


@pytest.mark.parametrize(
    ("kind", "few"), [("equal", 0), ("laplace", 8), ("two shapes", 4)]
)
def test_each_block_takes_the_code_of_one_bit_that_leaves_less(kind, few):
    code, values, decoded = trip_in_blocks(kind, 1)
    assert code.size == 8 * (1 + 512 // 16)
    chosen = 0
    for block, found in zip(values, decoded, strict=True):
        choices = signs_of(block), largest_of(block)
        left = [np.sum((block - choice) ** 2) for choice in choices]
        chosen += left[1] < left[0]
        np.testing.assert_allclose(found, choices[np.argmin(left)], rtol=0.004)
    assert chosen == few


@pytest.mark.parametrize("size", [60, 700], ids=["short", "long"])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_each_leaf_of_a_block_has_a_scale(bits, size):
    """Other leaves may be a hundred million times as large."""
    scales = np.array([1, 1e-5, 1e3, 0, 1e-4, 10, 1e3, 0])
    leaves = np.arange(8 * size) // size
    values = draw("laplace", leaves.size) * scales[leaves].astype(np.float32)
    code, there_and_back = trip(bits, values.size, leaf_count=8)
    turns = (leaves % LEAVES).astype(np.int8)
    decoded = np.asarray(there_and_back(values, turns)[1])
    for leaf in np.flatnonzero(scales):
        mine, found = values[leaves == leaf], decoded[leaves == leaf]
        bound = {8: 0.03, 4: 0.3, 2: 0.7, 1: 0.995}[bits]
        assert np.linalg.norm(found - mine) <= bound * np.linalg.norm(mine), leaf
    zeros = decoded[np.isin(leaves, np.flatnonzero(scales == 0))]
    assert np.abs(zeros).max() <= 1e-9 * np.abs(values).max()
    blocks = max(1, -(-values.size // 512))
    plain = value_code(bits, values.size).size
    assert code.size == plain + blocks * 2


@pytest.mark.parametrize("leaves", [1, 2, 40])
@pytest.mark.parametrize("bits", WIDTHS[1:])
def test_no_code_is_longer_than_a_wider_one(bits, leaves):
    for m in range(1, 3000):
        narrow, wide = (value_code(b, m, leaves).size for b in (bits, 2 * bits))
        assert narrow <= min(wide, m)
