"""`predict`: seconds from the bytes and messages of the traced step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import sparsejax

LINK = {"bandwidth": 1e9, "latency": 1e-3}
N = 100_000


@pytest.mark.parametrize("workers", [1, 2, 4, 64])
def test_dense_is_one_ring(workers):
    found = sparsejax.predict(sparsejax.dense(), N, 1.0, workers, **LINK)
    received = 2 * (workers - 1) / workers * 4 * (N + workers)
    assert found.bytes == pytest.approx(received)
    messages = 2 * (workers - 1)
    assert found.seconds == pytest.approx(8 * received / 1e9 + 1e-3 * messages)
    assert found.least == found.seconds


def test_exdyna_is_a_gather_and_a_ring():
    found = sparsejax.predict(sparsejax.exdyna, N, 0.01, 8, **LINK)
    gradient = jax.ShapeDtypeStruct((N,), jnp.float32)
    moved = sparsejax.wire_bytes(sparsejax.exdyna(0.01), gradient, workers=8)
    assert found.bytes == moved.total
    assert found.seconds == pytest.approx(8e-9 * moved.total + 1e-3 * (7 + 14))


def test_branches_apart():
    """Most steps of marsit send one bit per coordinate."""
    found = sparsejax.predict(sparsejax.marsit(100), N, 1.0, 8, **LINK)
    assert found.least_bytes < 0.1 * found.bytes
    assert found.least < found.seconds


def test_hops_of_a_ring_count_one_by_one():
    """2 (w - 1) messages of a segment each, and a few numbers."""
    slow, fast = (
        sparsejax.predict(sparsejax.marsit(None), N, 1.0, 8, 1e9, latency).least
        for latency in (1e-3, 0.0)
    )
    assert 14e-3 <= slow - fast <= 60e-3


def test_computing_is_added():
    alone = sparsejax.predict(sparsejax.exdyna, N, 0.01, 4, **LINK)
    both = sparsejax.predict(sparsejax.exdyna, N, 0.01, 4, **LINK, compute=0.5)
    assert both.seconds == pytest.approx(alone.seconds + 0.5)
    assert both.bytes == alone.bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, "n: got 0"),
        ({"workers": 0}, "workers: got 0"),
        ({"density": 2}, "density: got 2"),
        ({"bandwidth": 0}, "bandwidth: got 0"),
        ({"latency": -1}, "latency: got -1"),
        ({"compute": float("nan")}, "compute: got nan"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = {"n": 10, "density": 0.5, "workers": 2, **LINK, **change}
    with pytest.raises(ValueError, match=message):
        sparsejax.predict(sparsejax.exdyna, **arguments)
