"""Chunked top-k against a numpy oracle."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import _xla
from sparsejax.sparsifiers._chunked_topk import largest_of_chunks


def oracle(vector, chunk, k):
    """Ascending coordinates; the first of equal magnitudes wins, as in `top_k`."""
    chosen = []
    for start in range(0, vector.size, chunk):
        sizes = np.nan_to_num(np.abs(vector[start : start + chunk]), posinf=np.inf)
        share = max(1, k * sizes.size // chunk)
        first = np.argsort(-sizes, kind="stable")[:share]
        chosen.extend(start + np.sort(first[sizes[first] > 0]))
    return np.array(chosen, np.int32)


@pytest.mark.parametrize(
    ("n", "chunk", "k", "slots"),
    [
        (1, 64, 3, 1),
        (5, 4096, 40, 1),
        (4096, 4096, 40, 40),
        (4097, 4096, 40, 41),
        (10_000, 64, 5, 781),  # 156 chunks of 5, and 1 for the last 16
        (100, 10**12, 10**11, 10),  # allocates nothing of the chunk's size
    ],
)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_selects_the_largest_of_each_chunk(n, chunk, k, slots, platform):
    rng = np.random.default_rng(n)
    drawn = rng.laplace(size=n).astype(np.float32)
    drawn[::7] = 0.0
    drawn[1::7] = np.nan
    drawn[2::97] = -np.inf
    drawn[3::8] = drawn[3::8].round(1)  # ties
    drawn[64:256] = 0.0  # chunks that fill no slots
    with _xla.traced_for(platform):
        found = np.asarray(
            jax.jit(largest_of_chunks, static_argnums=(1, 2))(drawn, chunk, k)
        )
    expected = oracle(drawn, chunk, k)
    assert found.shape == (slots,)
    np.testing.assert_array_equal(found[: expected.size], expected)
    assert (found[expected.size :] == n).all()


def test_one_call_selects_everything_on_accelerators():
    with _xla.traced_for("gpu"):
        text = str(jax.make_jaxpr(lambda x: largest_of_chunks(x, 64, 2))(jnp.ones(999)))
    (options,) = re.findall(r"top_k\[(.*?)\]", text, re.DOTALL)
    assert "while" not in text
    # The stable form would be a sort of all coordinates.
    assert ("is_stable=False" in options) == (jax.__version_info__ >= (0, 11, 1))


def test_density_is_rounded_down_in_each_chunk():
    """And the demand counts the selected coordinates."""
    tx = sparsejax.simulate(sparsejax.chunked_topk(0.05, chunk=50), workers=2)
    drawn = np.random.default_rng(0).laplace(size=(2, 130)).astype(np.float32)
    drawn[1, :50] = 0.0
    mean, state = jax.jit(tx.update)(drawn, tx.init(jnp.zeros(130)))
    expected = np.zeros((2, 130), np.float32)
    for row, vector in zip(expected, drawn, strict=True):
        chosen = oracle(vector, 50, 2)
        row[chosen] = vector[chosen]
    np.testing.assert_allclose(mean, expected.mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(state.report.demand, [5, 3])
    np.testing.assert_array_equal(state.report.details.chosen, [5, 3])
