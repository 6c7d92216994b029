"""Threshold selection and counts against numpy oracles."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax import _xla
from sparsejax.vectors import _regions
from sparsejax.vectors._counting import count_in
from sparsejax.vectors._division import muldiv
from sparsejax.vectors._selection import compact, select_in

P = jax.sharding.PartitionSpec
INT_MAX = 2**31 - 1


@pytest.fixture(scope="module", autouse=True)
def _strict_and_small_tiles():
    # Tiles of 128, so regions of more than 512 use the loop.
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        patch.setattr(_regions, "_TILE", 128)
        yield


# -- muldiv ---------------------------------------------------------------------------

scaled = jax.jit(muldiv)
naturals = st.one_of(
    st.integers(0, INT_MAX),
    st.integers(0, 100),
    st.builds(
        lambda e, d: min(max(2**e + d, 0), INT_MAX),
        st.integers(0, 31),
        st.integers(-2, 2),
    ),
)


@settings(max_examples=300, deadline=None)
@given(naturals, naturals, naturals)
def test_muldiv_is_exact(a, b, c):
    c = max(c, 1)
    # Limits `a` so that the quotient fits.
    a = min(a, (INT_MAX * c + c - 1) // max(b, 1))
    found = scaled(jnp.int32(a), jnp.int32(b), jnp.int32(c))
    assert found.dtype == jnp.int32
    assert int(found) == a * b // c


def test_muldiv_is_exact_in_bulk():
    rng = np.random.default_rng(0)
    a, b, c = np.exp(rng.uniform(0, np.log(2.0**31), (3, 100_000))).astype(np.int64)
    # Products just below, at and just above a multiple of the divisor.
    near = rng.integers(0, 2**15, 100_000) * c // np.maximum(b, 1)
    a = np.where(rng.random(100_000) < 0.5, a, np.clip(near, 0, INT_MAX))
    exact = a * b // c
    fits = exact <= INT_MAX
    assert fits.sum() > 50_000
    args = [x[fits].astype(np.int32) for x in (a, b, c)]
    np.testing.assert_array_equal(scaled(*args), exact[fits])


# -- count_in and select_in -----------------------------------------------------------

# n, span, capacity: empty, below one word, below one run, one tile, and loops whose
# last tile fits and does not fit.
SHAPES = [
    (0, 0, 3),
    (1, 1, 1),
    (31, 20, 64),
    (129, 129, 0),
    (500, 500, 40),
    (513, 513, 600),
    (1024, 640, 1),
    (2000, 1999, 300),
]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
THRESHOLDS = np.array([0.0, 0.25, 0.5, 0.75, 2.0, 3.0, np.inf, np.nan], np.float32)


@functools.cache
def selector(span, capacity, platform="cpu"):
    """Both functions, jitted; traced for a platform, and run here."""

    def both(vector, start, size, threshold, quota):
        return (
            select_in(
                vector, start, size, threshold, quota, span=span, capacity=capacity
            ),
            count_in(vector, start, size, jnp.asarray(THRESHOLDS), span=span),
        )

    jitted = jax.jit(both)

    def traced(*args):
        with _xla.traced_for(platform):
            return jitted(*args)

    return traced


def qualifying(vector, start, size, threshold):
    region = np.abs(vector[start : start + size].astype(np.float32))
    return start + np.flatnonzero(region >= threshold)


def select_oracle(vector, start, size, threshold, quota, capacity):
    where = qualifying(vector, start, size, threshold)
    kept = min(len(where), quota)
    indices = np.full(capacity, len(vector))
    indices[:kept] = [where[i * len(where) // kept] for i in range(kept)]
    return indices, len(where)


@st.composite
def vectors(draw, n, dtype):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "ties", "special", "equal", "zeros"]))
    return {
        "normal": lambda: rng.normal(size=n),
        "ties": lambda: rng.choice([-2.0, -0.5, 0.0, 0.5, 2.0], n),
        "special": lambda: rng.choice([np.nan, np.inf, -np.inf, -0.0, 1.0], n),
        "equal": lambda: np.full(n, -0.75),
        "zeros": lambda: np.zeros(n),
    }[kind]().astype(dtype)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("n", "span", "capacity", "dtype", "platform"),
    [(*shape, "float32", "cpu") for shape in SHAPES]
    + [(*shape, "bfloat16", "cpu") for shape in SHAPES[-2:]]
    + [(*shape, "float32", "gpu") for shape in SHAPES],
)
def test_select_in_and_count_in(n, span, capacity, dtype, platform):
    @settings(max_examples=20, deadline=None)
    @given(st.data())
    def check(data):
        vector = data.draw(vectors(n, DTYPES[dtype]))
        size = data.draw(st.integers(0, span))
        start = data.draw(st.integers(0, n - size))
        threshold = data.draw(st.sampled_from(THRESHOLDS))
        quota = data.draw(st.integers(0, capacity))
        (indices, demand), counts = selector(span, capacity, platform)(
            vector, jnp.int32(start), jnp.int32(size), threshold, jnp.int32(quota)
        )
        assert indices.dtype == demand.dtype == counts.dtype == jnp.int32
        expected = select_oracle(vector, start, size, threshold, quota, capacity)
        np.testing.assert_array_equal(indices, expected[0])
        assert demand == expected[1]
        np.testing.assert_array_equal(
            counts, [len(qualifying(vector, start, size, t)) for t in THRESHOLDS]
        )

    check()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_nan_does_not_reach_a_constant_zero(platform):
    """XLA replaces `|x| >= 0` by true where it sees the zero."""
    vector = jnp.tile(jnp.array([3.0, np.nan, 0.0, -2.0]), 300)
    whole = jax.jit(lambda x: compact(x, 0.0, capacity=1200)[1])
    part = jax.jit(lambda x: count_in(x, 0, 1000, jnp.zeros(1), span=1000)[0])
    with _xla.traced_for(platform):
        assert (whole(vector), part(vector)) == (900, 750)


@pytest.mark.parametrize("count", [0, 1, 4, 5, 16])
def test_count_in_takes_any_number_of_thresholds(count):
    vector = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    thresholds = np.linspace(0, 3, count, dtype=np.float32)
    found = jax.jit(lambda v, t: count_in(v, 100, 800, t, span=900))(vector, thresholds)
    expected = [len(qualifying(vector, 100, 800, t)) for t in thresholds]
    np.testing.assert_array_equal(found, np.array(expected, int))


@pytest.mark.parametrize(("n", "capacity"), [(0, 2), (1, 1), (33, 50), (1000, 70)])
def test_compact_is_the_whole_vector(n, capacity):
    vector = np.random.default_rng(n).normal(size=n).astype(np.float32)
    whole = jax.jit(functools.partial(compact, capacity=capacity))
    indices, demand = whole(vector, jnp.float32(0.5))
    expected = select_oracle(vector, 0, n, 0.5, capacity, capacity)
    np.testing.assert_array_equal(indices, expected[0])
    assert demand == expected[1]


def test_a_cut_is_evenly_strided():
    # Coordinate 2 i has rank i, so the kept coordinates show the ranks.
    vector = jnp.tile(jnp.array([1.0, 0.0]), 1000)
    cut = jax.jit(
        lambda quota: select_in(vector, 0, 2000, 0.5, quota, span=2000, capacity=300)
    )
    for quota in (1, 3, 299, 300):
        indices, demand = cut(jnp.int32(quota))
        assert demand == 1000
        ranks = [i * 1000 // quota for i in range(quota)]
        np.testing.assert_array_equal(indices[:quota], 2 * np.array(ranks))
        np.testing.assert_array_equal(indices[quota:], 2000)


@pytest.mark.parametrize("most", [2, 64])
def test_work_follows_the_size_and_not_the_span(monkeypatch, most):
    visits = []
    magnitudes = _regions.magnitudes_of

    def observed(x):
        jax.debug.callback(lambda: visits.append(x.size))
        return magnitudes(x)

    monkeypatch.setattr(_regions, "magnitudes_of", observed)
    monkeypatch.setattr(_regions, "_MOST_TILES", most)
    tile = {2: 1024, 64: 128}[most]
    vector = np.ones(2000, np.float32)
    functions = (
        jax.jit(lambda size: count_in(vector, 0, size, jnp.ones(2), span=2000)[0]),
        jax.jit(
            lambda size: select_in(vector, 0, size, 1.0, 5, span=2000, capacity=5)[1]
        ),
    )
    for size in (0, 1, 128, 129, 2000):
        for function in functions:
            visits.clear()
            assert function(jnp.int32(size)) == size
            jax.effects_barrier()
            assert visits == [tile] * -(-size // tile)


def test_nothing_is_sorted():
    def run(vector, start, size):
        return (
            select_in(vector, start, size, 0.5, 20, span=900, capacity=20),
            count_in(vector, start, size, jnp.ones(3), span=900),
            compact(vector, 0.5, capacity=20),
        )

    args = jnp.ones(1000), jnp.int32(0), jnp.int32(900)
    called = set(re.findall(r"\b(\w+)\[", str(jax.make_jaxpr(run)(*args))))
    assert "while" in called
    slow = {"sort", "top_k", "approx_top_k", "cond", "cumsum", "cummax"}
    assert not called & slow
    text = jax.jit(run).lower(*args).compile().as_text().lower()
    assert " while(" in text
    assert " sort(" not in text
    assert "topk" not in text


# -- the ways it is mapped ------------------------------------------------------------


def worker_case():
    vectors = np.random.default_rng(1).normal(size=(8, 1000)).astype(np.float32)
    starts = np.array([0, 1, 100, 200, 300, 999, 1000, 50], np.int32)
    sizes = np.array([700, 699, 0, 128, 700, 1, 0, 513], np.int32)
    return vectors, starts, sizes


def local_step(vector, start, size):
    indices, demand = select_in(vector, start, size, 0.8, 30, span=700, capacity=40)
    return (
        indices,
        demand,
        count_in(vector, start, size, jnp.array([0.8, 2.0]), span=700),
        *compact(vector, 0.8, capacity=30),
    )


def check_step(found, vectors, starts, sizes):
    for i in range(8):
        vector, start, size = vectors[i], starts[i], sizes[i]
        threshold = np.float32(0.8)
        cut = select_oracle(vector, start, size, threshold, 30, 40)
        whole = select_oracle(vector, 0, 1000, threshold, 30, 30)
        counts = cut[1], len(qualifying(vector, start, size, 2.0))
        for got, expected in zip(found, (*cut, counts, *whole), strict=True):
            np.testing.assert_array_equal(got[i], expected)


@pytest.mark.sampled
@pytest.mark.parametrize("common", ["nothing", "region", "vector"])
def test_under_vmap_and_shard_map(common):
    vectors, starts, sizes = worker_case()
    if common == "region":
        starts, sizes = starts[[4] * 8], sizes[[4] * 8]
    if common == "vector":
        vectors = vectors[[0] * 8]
    replicated = {
        "nothing": [False] * 3,
        "region": [False, True, True],
        "vector": [True, False, False],
    }[common]
    args = [
        x[0] if same else x
        for x, same in zip((vectors, starts, sizes), replicated, strict=True)
    ]

    def local(*args):
        own = [a if same else a[0] for a, same in zip(args, replicated, strict=True)]
        return jax.tree.map(lambda x: x[None], local_step(*own))

    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
    specs = tuple(P() if same else P("data") for same in replicated)
    out_specs = (P("data"),) * 5
    if common == "vector":
        # The whole vector is replicated, so its selection is replicated too.
        out_specs = (P("data"),) * 3 + (P(),) * 2
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=True
    )
    found = list(jax.jit(mapped)(*args))
    if common == "vector":
        found[3:] = [np.repeat(x, 8, axis=0) for x in found[3:]]
    check_step(found, vectors, starts, sizes)

    axes = [None if same else 0 for same in replicated]
    check_step(jax.jit(jax.vmap(local_step, axes))(*args), vectors, starts, sizes)
