"""Every pair of sparsifier and exchange is refused when built, or it runs."""

from __future__ import annotations

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import exchanges, memories, partitions, sparsifiers, thresholds
from sparsejax.parts import Delivery
from tests.harness import flat, gradients, residuals, run_simulated

WORKERS = 2
# Rows of 4 coordinates; the cast of some of them rounds.
PARAMS = {
    "narrow": jnp.zeros((4, 4), jnp.bfloat16),
    "wide": jnp.zeros((4, 12)),
}
N = flat(PARAMS).size
SPARSIFIERS = {
    "even": lambda: sparsifiers.exclusive(
        0.1, partition=partitions.even(), threshold=thresholds.quota()
    ),
    "balanced": lambda: sparsifiers.exclusive(
        0.1, partition=partitions.balanced(), threshold=thresholds.quota()
    ),
    "layerwise": lambda: sparsifiers.layerwise(0.1),
    "topk": lambda: sparsifiers.topk(0.1),
    "chunked_topk": lambda: sparsifiers.chunked_topk(chunk=20, k=2),
    "fitted": lambda: sparsifiers.fitted(0.1),
    "sampled": lambda: sparsifiers.sampled(0.1),
    "hard_threshold": lambda: sparsifiers.hard_threshold(1.0, max_density=0.2),
    "rows": lambda: sparsifiers.nonzero(0.5),
    "random_k": lambda: sparsifiers.random_k(0.1),
    "everything": sparsifiers.everything,
}
EXCHANGES = {
    "dense": exchanges.dense,
    "pairs": exchanges.pairs,
    "union": exchanges.union,
    "leader": exchanges.leader,
    "hashed_owners": exchanges.hashed_owners,
    "recursive_doubling": exchanges.recursive_doubling,
    "one_bit_ring": exchanges.one_bit_ring,
    "packed_signs": lambda: exchanges.packed_signs("mean"),
}
MEMORIES = {
    "decayed": lambda: memories.decayed(0.5),
    "error_feedback": memories.error_feedback,
    "none": memories.none,
    "momentum_correction": lambda: memories.momentum_correction(0.9),
}
REFUSED = {
    # Some coordinates would never be in the leader's part.
    *itertools.product(["leader"], ["even", "layerwise"]),
    *itertools.product(
        ["one_bit_ring", "packed_signs"], SPARSIFIERS.keys() - {"everything"}
    ),
    # `balanced` reads the histogram of the deliveries, which only `union` provides.
    *itertools.product(EXCHANGES.keys() - {"union"}, ["balanced"]),
}
ACCEPTED = [
    pair for pair in itertools.product(EXCHANGES, SPARSIFIERS) if pair not in REFUSED
]


def test_every_part_has_a_row():
    assert set(exchanges.__all__) == set(EXCHANGES)
    assert set(memories.__all__) == set(MEMORIES)
    named = {"exclusive": "even", "nonzero": "rows"}
    assert {named.get(name, name) for name in sparsifiers.__all__} <= set(SPARSIFIERS)


def compose(exchange, sparsifier, memory="error_feedback"):
    return sparsejax.sparsify(
        SPARSIFIERS[sparsifier](),
        exchange=EXCHANGES[exchange](),
        memory=MEMORIES[memory](),
    )


def half_of_the_rows(step):
    """Gradients whose zero rows differ between workers and steps."""
    drawn = gradients(step, WORKERS, params=PARAMS)
    rng = np.random.default_rng([1, step])
    return {
        name: leaf * jnp.asarray(rng.random((WORKERS, leaf.shape[1], 1)) < 0.5)
        for name, leaf in drawn.items()
    }


@pytest.mark.sampled
@pytest.mark.parametrize(("exchange", "sparsifier"), ACCEPTED)
def test_accepted_pairs_keep_their_types(exchange, sparsifier):
    """Uses the memory with the most arrays; a later test runs every memory."""
    compose(exchange, sparsifier, "none")
    tx = compose(exchange, sparsifier, "momentum_correction")
    tx = sparsejax.simulate(tx, workers=WORKERS)
    state = jax.eval_shape(tx.init, PARAMS)
    updates, after = jax.eval_shape(tx.update, half_of_the_rows(0), state)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, PARAMS)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


@pytest.mark.sampled
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    ("exchange", "sparsifier"),
    [("union", "even"), ("pairs", "topk"), ("dense", "random_k")],
)
def test_each_memory_runs(exchange, sparsifier, memory):
    """Each memory keeps its own number of arrays, all finite."""
    tx = compose(exchange, sparsifier, memory)
    stream = functools.partial(gradients, workers=WORKERS, params=PARAMS)
    for _, updates, state in run_simulated(
        tx, 3, params=PARAMS, workers=WORKERS, stream=stream
    ):
        assert flat(updates).any()
        kept = jax.tree.leaves(state.memory)
        assert len(kept) == {"none": 0, "momentum_correction": 2}.get(memory, 1)
        assert all(np.isfinite(leaf).all() for leaf in kept)


@pytest.mark.parametrize(("beta", "weights"), [(0.5, [0.25, 0.5, 1]), (1, [1, 1, 1])])
def test_decayed_weighs_gradients_by_their_age(beta, weights):
    """Coordinate 1 waits; coordinate 0 is delivered in each step and leaves a half."""
    memory = memories.decayed(beta)
    drawn = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
    delivery = Delivery(jnp.zeros(2), jnp.array([0]), jnp.array([0.5]), None)
    residual = memory.init(2)
    for gradient in drawn:
        vector, residual = memory.accumulate(jnp.asarray(gradient), residual)
        residual = memory.settle(vector, delivery, residual)
    expected = [0.5, np.dot(weights, drawn[:, 1])]
    np.testing.assert_allclose(residual, expected, rtol=1e-6)
    np.testing.assert_allclose(vector[0], drawn[2, 0] + beta * 0.5, rtol=1e-6)


def test_decayed_by_nothing_is_error_feedback():
    drawn = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)
    ours, _ = memories.decayed(1).accumulate(*jnp.asarray(drawn))
    theirs, _ = memories.error_feedback().accumulate(*jnp.asarray(drawn))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.sampled
@pytest.mark.parametrize(("exchange", "sparsifier"), ACCEPTED)
def test_accepted_pairs_conserve_mass(exchange, sparsifier):
    tx = compose(exchange, sparsifier)
    given = received = scale = np.zeros(N)
    for drawn, updates, state in run_simulated(
        tx, 3, params=PARAMS, workers=WORKERS, stream=half_of_the_rows
    ):
        mine = flat(drawn, (WORKERS,))
        given, received = given + mine.mean(axis=0), received + flat(updates)
        scale = scale + np.abs(mine).mean(axis=0)
        report = sparsejax.report(state)
        assert report.sent >= np.count_nonzero(flat(updates))
        np.testing.assert_allclose(report.density, report.sent / N, rtol=1e-6)
    kept = residuals(state).mean(axis=0)
    error = np.abs(received + kept - given)
    assert (error <= 2e-6 * (scale + np.abs(residuals(state)).mean(axis=0))).all()


@pytest.mark.parametrize(("exchange", "sparsifier"), sorted(REFUSED))
def test_refused_pairs_are_named(exchange, sparsifier):
    with pytest.raises(ValueError, match=f"`{EXCHANGES[exchange]().name}`"):
        compose(exchange, sparsifier)


@pytest.mark.parametrize("exchange", ["pairs", "union", "leader"])
def test_rows_are_delivered_whole(exchange):
    """Delivers all coordinates of the chosen rows, and no other ones."""
    tx = sparsejax.sparsify(
        sparsifiers.nonzero(0.2), exchange=EXCHANGES[exchange](), memory=memories.none()
    )
    tx = sparsejax.simulate(tx, workers=3)
    drawn = np.zeros((3, 10, 4), np.float32)
    drawn[0, 7] = [3, 0, -3, 6]
    drawn[1, [2, 7], 1] = 9
    drawn[2, 2] = 12
    updates, state = tx.update(jnp.asarray(drawn), tx.init(jnp.zeros((10, 4))))
    expected = drawn.sum(axis=0) / 3
    if exchange == "leader":
        expected[2] = 0  # worker 0 did not choose it
    np.testing.assert_array_equal(updates, expected)
    report = sparsejax.report(state)
    np.testing.assert_array_equal(report.demand, [4, 8, 4])
    assert report.sent == (4 if exchange == "leader" else 8)
    if exchange == "pairs":
        np.testing.assert_array_equal(report.details.chosen, [4, 8, 4])


@pytest.mark.parametrize("exchange", ["pairs", "union", "leader"])
def test_an_index_is_sent_for_a_row(exchange):
    """A row needs one index, not one for each coordinate."""
    shape = (1 << 14, 16)
    params = jnp.zeros(shape)
    made = functools.partial(
        sparsejax.sparsify, exchange=EXCHANGES[exchange](), memory=memories.none()
    )
    rows, single = (
        sparsejax.wire_bytes(made(chooser), params, workers=4).total
        for chooser in (
            sparsifiers.nonzero(0.01),
            sparsifiers.nonzero(0.01, rows=False),
        )
    )
    k = 0.01 * params.size
    assert rows < 1.03 * {"pairs": 3, "union": 6, "leader": 1.5}[exchange] * 4 * k
    assert single > rows + {"pairs": 3, "union": 3, "leader": 1.5}[exchange] * k * 0.9


def _simulated(sparsifier, exchange, memory):
    tx = sparsejax.sparsify(sparsifier, exchange=exchange, memory=memory)
    return sparsejax.simulate(tx, workers=WORKERS)


def _traced(tx):
    state = jax.eval_shape(tx.init, PARAMS)
    jax.eval_shape(tx.update, gradients(0, WORKERS, params=PARAMS), state)


def test_adapt_sees_the_details_that_it_declares_alone():
    """Another exchange might not report them."""
    chosen = sparsifiers.topk(0.1)

    def adapt(state, report, step):
        assert report.details.histogram.dtype == jnp.int32
        return chosen.adapt(state, report, step)

    reader = chosen._replace(adapt=adapt)
    tx = _simulated(reader, exchanges.union(), memories.error_feedback())
    with pytest.raises(AttributeError, match=r"reads.*Add it: `reads=frozenset\({'his"):
        _traced(tx)
    declares = reader._replace(reads=frozenset({"histogram"}))
    _traced(_simulated(declares, exchanges.union(), memories.error_feedback()))
    claims = exchanges.pairs()._replace(tells=frozenset({"histogram"}))
    with pytest.raises(
        ValueError, match=r"`tells` of `pairs` contains 'histogram', but"
    ):
        _traced(_simulated(declares, claims, memories.error_feedback()))


def test_the_vector_is_the_first_leaf_that_settle_gets():
    """One of `accumulate` would be lost, so that it may not change the first leaf."""
    keep = memories.momentum_correction(0.9)

    def settle(vector, delivery, residual):
        assert residual.unsent is vector
        return keep.settle(vector, delivery, residual)

    tx = _simulated(
        sparsifiers.topk(0.1), exchanges.pairs(), keep._replace(settle=settle)
    )
    _traced(tx)

    def swapped(gradient, residual):
        vector, (unsent, velocity) = keep.accumulate(
            gradient, type(residual)(*residual[::-1])
        )
        return vector, type(residual)(velocity, unsent)

    tx = _simulated(
        sparsifiers.topk(0.1), exchanges.pairs(), keep._replace(accumulate=swapped)
    )
    with pytest.raises(TypeError, match=r"changed the first leaf.*come after it"):
        _traced(tx)

    alone = keep._replace(accumulate=lambda gradient, residual: gradient)
    tx = _simulated(sparsifiers.topk(0.1), exchanges.pairs(), alone)
    with pytest.raises(TypeError, match=r"returned .*expected `\(vector, residual\)`"):
        _traced(tx)
