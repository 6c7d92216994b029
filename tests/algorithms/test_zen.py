"""Zen and its exchanges: the exact sum of sparse gradients."""

from __future__ import annotations

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import sparsejax
from sparsejax import exchanges, memories, sparsifiers
from sparsejax._layout import Layout
from sparsejax.exchanges.sums import _owners
from sparsejax.exchanges.sums._sizes import sizes_of
from sparsejax.parts import Choice, Sparsifier, Step
from tests.harness import WORKERS, mesh_of, run, trainer

pytestmark = pytest.mark.newer_waits
# Sizes that the number of workers does not divide, with more bits than a few words.
N, V, D = 1003, 205, 6
COORDINATES = jnp.zeros((N,))
TABLE = {"table": jnp.zeros((V, D))}


def lossless(exchange, max_density=1.0, rows=True):
    return sparsejax.sparsify(
        sparsifiers.nonzero(max_density, rows=rows),
        exchange=exchange,
        memory=memories.none(),
    )


METHODS = {
    "permutation": lambda **sizes: lossless(exchanges.hashed_owners(**sizes)),
    "hierarchical_hash": lambda **sizes: lossless(
        exchanges.hashed_owners(owners="hierarchical_hash", **sizes)
    ),
    "recursive_doubling": lambda **sizes: lossless(
        exchanges.recursive_doubling(**sizes)
    ),
}
every_method = pytest.mark.parametrize("method", METHODS)


@functools.cache
def compiled(method, shape, workers=WORKERS):
    """`gradients [w, *shape] -> (updates, report)`, compiled once for all supports."""
    tx = sparsejax.dense() if method == "dense" else METHODS[method]()
    params = jnp.zeros(shape)
    made = trainer(tx, params, mesh=mesh_of(workers))

    def mean(gradients):
        _, state, updates = made.advance(*made.start(), gradients)
        shards = [np.asarray(s.data) for s in updates.addressable_shards]
        assert len(shards) == workers
        for other in shards[1:]:
            assert shards[0].tobytes() == other.tobytes()
        return shards[0], jax.device_get(sparsejax.report(state))

    return mean


def supports(units, workers, rng):
    """Named supports, Bool[w, units]: True where a worker's gradient is not zero."""
    ids = np.arange(units)
    ranks = np.arange(workers)[:, None]
    ends = (ids == 0) | (ids == units - 1)
    return {
        "contiguous": ids * workers // units == ranks,
        "strided": ids % workers == ranks,
        "one block": np.broadcast_to(ids < units // 4, (workers, units)),
        "random": rng.random((workers, units)) < 0.07,
        "skewed": rng.random((workers, units)) < 0.3 * (ids < units // 8),
        "empty": np.zeros((workers, units), bool),
        "full": np.ones((workers, units), bool),
        "ends": np.broadcast_to(ends, (workers, units)),
        "one worker": np.broadcast_to(ranks == workers - 1, (workers, units)),
    }


def integers(support, rng, shape):
    """Integer-valued gradients [w, *shape] with zero rows outside the support."""
    values = rng.integers(-50, 50, size=(len(support), *shape)).astype(np.float32)
    mask = support.reshape(support.shape + (1,) * (len(shape) - 1))
    return jnp.asarray(np.where(mask, values, 0))


@pytest.mark.sampled
@every_method
@pytest.mark.parametrize(
    "shape",
    [  # Other tests run the compiled exchange of coordinates.
        pytest.param((N,), id="coordinates"),
        pytest.param((V, D), id="rows", marks=pytest.mark.second_tier),
    ],
)
def test_equals_dense_bit_for_bit(method, shape):
    rng = np.random.default_rng(0)
    for name, support in supports(shape[0], WORKERS, rng).items():
        drawn = integers(support, rng, shape)
        mine, report = compiled(method, shape)(drawn)
        theirs, _ = compiled("dense", shape)(drawn)
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
        # Only a full support may exceed the planned sizes.
        if name != "full":
            assert not report.details.overflow, name
            rows = (np.asarray(theirs).reshape(shape[0], -1) != 0).any(axis=1).sum()
            assert report.sent == rows * math.prod(shape[1:])
            units = (drawn.reshape(WORKERS, shape[0], -1) != 0).any(axis=2).sum(axis=1)
            np.testing.assert_array_equal(report.demand, units * math.prod(shape[1:]))


@pytest.mark.sampled
@every_method
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_number_of_workers(method, workers):
    rng = np.random.default_rng(1)
    for name, support in supports(N, workers, rng).items():
        drawn = integers(support, rng, (N,))
        mine, _ = compiled(method, (N,), workers)(drawn)
        theirs, _ = compiled("dense", (N,), workers)(drawn)
        np.testing.assert_array_equal(mine, theirs, err_msg=name)


@every_method
def test_floats_to_rounding(method):
    rng = np.random.default_rng(2)
    drawn = rng.normal(size=(WORKERS, N)) * (rng.random((WORKERS, N)) < 0.1)
    drawn = drawn.astype(np.float32)
    mine, report = compiled(method, (N,))(jnp.asarray(drawn))
    mean = drawn.astype(np.float64).mean(axis=0)
    scale = np.abs(drawn).mean(axis=0)
    assert (np.abs(mine - mean) <= 4e-7 * scale).all()
    assert not report.details.overflow


@every_method
def test_sums_that_cancel_are_not_sent(method):
    rng = np.random.default_rng(3)
    support = np.broadcast_to(rng.random(N) < 0.1, (WORKERS, N))
    drawn = np.array(integers(support, rng, (N,)))
    drawn[1::2] = -drawn[::2]
    drawn[:, 0] = [3.0, *[0] * (WORKERS - 1)]
    mine, report = compiled(method, (N,))(jnp.asarray(drawn))
    assert report.sent == 1
    assert mine[0] == 3 / WORKERS
    assert not mine[1:].any()


@pytest.mark.sampled
@every_method
def test_nan_is_not_zero(method):
    """Tests the exchange alone: `sparsify` handles such gradients earlier."""
    exchange = {
        "permutation": exchanges.hashed_owners(),
        "hierarchical_hash": exchanges.hashed_owners(owners="hierarchical_hash"),
        "recursive_doubling": exchanges.recursive_doubling(),
    }[method]
    layout = Layout.of(COORDINATES)
    workers = sparsejax._workers.Workers("data")
    chooser = sparsifiers.nonzero(0.5)

    def mean(vector):
        step = Step(
            jnp.zeros((), jnp.int32),
            workers,
            layout,
            support=chooser.support,
            lossless=chooser.lossless,
        )
        choice, _ = chooser.select(vector, (), step)
        return exchange.apply(vector, choice, (), step)[0].mean

    drawn = np.zeros((4, N), np.float32)
    drawn[2, [0, 17, N - 1]] = [np.nan, 5, np.inf]
    drawn[3, N - 1] = -np.inf
    found = jax.jit(jax.vmap(mean, axis_name="data", out_axes=None))(drawn)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(found)), [0, N - 1])
    assert found[17] == 5 / 4
    assert np.count_nonzero(found) == 3


@pytest.mark.sampled
@every_method
def test_overflow_gives_the_dense_mean(method):
    tx = METHODS[method](max_density=0.02)
    made = trainer(tx, COORDINATES)
    rng = np.random.default_rng(6)
    params, state = made.start()
    for density, overflows in [(0.005, False), (0.2, True), (0.01, False)]:
        drawn = integers(rng.random((WORKERS, N)) < density, rng, (N,))
        params, state, updates = made.advance(params, state, drawn)
        theirs, _ = compiled("dense", (N,))(drawn)
        np.testing.assert_array_equal(updates, theirs)
        report = sparsejax.report(state)
        assert report.details.overflow == overflows
        assert report.details.density_after == pytest.approx(
            np.mean(theirs != 0), rel=1e-6
        )
        assert (report.sent == N) == overflows


def test_one_worker_beyond_its_slots_makes_the_step_dense():
    tx = sparsejax.simulate(sparsejax.zen(0.05), workers=4)
    drawn = np.zeros((4, N), np.float32)
    drawn[3, : N // 2] = 1
    updates, state = tx.update(jnp.asarray(drawn), tx.init(COORDINATES))
    np.testing.assert_array_equal(updates, drawn.sum(axis=0) / 4)
    assert sparsejax.report(state).details.overflow
    assert sparsejax.report(state).demand[3] == N // 2


def top_k(k):
    """A small overlapping sparsifier: the k largest magnitudes of each worker."""

    def select(vector, state, step):
        _, found = jax.lax.top_k(jnp.abs(vector), k)
        return Choice(jnp.sort(found), jnp.asarray(k), jnp.zeros(())), state

    return Sparsifier(select, "overlapping")


def _topk_stream(dtype):
    def stream(t):
        rng = np.random.default_rng([7, t])
        return jnp.asarray(rng.laplace(size=(WORKERS, N)), dtype)

    return stream


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("exchange", "k", "overflows"),
    [
        (exchanges.hashed_owners(), 30, False),
        (exchanges.hashed_owners(), 700, False),
        (exchanges.hashed_owners(densification=1.0), 30, True),
        (exchanges.recursive_doubling(), 30, False),
        (exchanges.recursive_doubling(max_density=0.01), 30, True),
    ],
    ids=["hashed", "hashed dense", "hashed overflow", "doubling", "doubling overflow"],
)
def test_error_feedback_conserves_mass(exchange, k, overflows, dtype):
    """An overflow only costs bytes: the same coordinates are delivered."""
    tx = sparsejax.sparsify(
        top_k(k), exchange=exchange, memory=memories.error_feedback()
    )
    given = received = scale = np.zeros(N)
    kept = np.zeros((WORKERS, N), np.float32)
    params = jnp.zeros((N,), dtype)
    for drawn, updates, state in run(tx, 30, params=params, stream=_topk_stream(dtype)):
        drawn = np.asarray(drawn, np.float64)
        given = given + drawn.mean(axis=0)
        scale = scale + np.abs(drawn).mean(axis=0)
        received = received + np.asarray(updates, np.float64)
        report = sparsejax.report(state)
        assert report.details.overflow == overflows
        union = np.argsort(-np.abs(kept + drawn.astype(np.float32)))[:, :k]
        assert report.sent == len(np.unique(union))
        kept = np.asarray(state.memory.per_worker)
    error = np.abs(received + kept.mean(axis=0) - given) / scale
    assert error.max() < 1e-6


FORMS = {
    # First a few units that all workers share, then denser and denser random supports.
    "indices": ((N,), 0.005, 1.0, 4 / N),
    "bitmap": ((N,), 0.1, None, 0.05),
    "bitmap of rows": ((V, D), 0.05, None, 0.02),
    "dense": ((N,), 1.0, None, 0.5),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_the_pull_is_exact(name):
    shape, max_density, densification, density = FORMS[name]
    units = shape[0]
    sizes = sizes_of(
        _owners.permutation(),
        units,
        math.ceil(max_density * units),
        math.prod(shape[1:]),
        WORKERS,
        None,
        densification,
    )
    assert sizes.form == name.split()[0]
    tx = sparsejax.zen(max_density, densification=densification)
    tx = sparsejax.simulate(tx, workers=WORKERS)
    state = tx.init(jnp.zeros(shape))
    rng = np.random.default_rng(8)
    for _ in range(5):
        support = rng.random((WORKERS, units)) < density
        if densification == 1.0:
            support[:] = False
            support[:, [0, 17, 500, units - 1]] = True
        drawn = integers(support, rng, shape)
        updates, state = tx.update(drawn, state)
        theirs = _simulated("dense", shape, WORKERS)(drawn)
        np.testing.assert_array_equal(updates, theirs)
        assert not sparsejax.report(state).details.overflow


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.data())
def test_any_support(data):
    """Under `simulate`, compiled once: random supports, values, and cancellations."""
    shape = (67,)
    masks = data.draw(
        st.lists(
            st.lists(st.integers(-2, 2), min_size=67, max_size=67),
            min_size=5,
            max_size=5,
        )
    )
    drawn = jnp.asarray(masks, jnp.float32)
    for method in METHODS:
        mine = _simulated(method, shape, 5)(drawn)
        np.testing.assert_array_equal(mine, _simulated("dense", shape, 5)(drawn))


@functools.cache
def _simulated(method, shape, workers):
    tx = sparsejax.dense() if method == "dense" else METHODS[method]()
    tx = sparsejax.simulate(tx, workers=workers)
    state = tx.init(jnp.zeros(shape))
    return jax.jit(lambda gradients: tx.update(gradients, state)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_density": 0.0}, "max_density: got 0.0"),
        ({"max_density": 1.5}, "max_density: got 1.5"),
        ({"densification": 0.5}, "densification: got 0.5"),
        ({"owners": "contiguous"}, "owners: got 'contiguous'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        sparsejax.zen(**arguments)
    with pytest.raises(ValueError, match=message):
        exchanges.hashed_owners(**arguments)
