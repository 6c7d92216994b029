"""Majority votes and scaled signs: one bit per coordinate and worker."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import exchanges, memories, sparsifiers
from sparsejax._workers import Workers
from sparsejax.exchanges.signs import _ballots
from sparsejax.vectors import _bits
from tests.harness import (
    PARAMS,
    WORKERS,
    compiled_text,
    flat,
    gradients,
    residuals,
    run,
    run_simulated,
)

N = flat(PARAMS).size


def majority(route):
    return sparsejax.sparsify(
        sparsifiers.everything(),
        exchange=exchanges.packed_signs("majority", route=route),
        memory=memories.none(),
    )


# -- counting --------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [1, 2, 3, 7, 8, 15, 16, 31, 255])
@pytest.mark.parametrize("n", [1, 67])
def test_sums_of_fields_are_exact(workers, n):
    """Counts from 0 to all votes, in every field of a word."""
    flags = np.random.default_rng(0).random((workers, n)) < np.linspace(0, 1.01, n)
    flags[:, -1] = True
    packed = jax.vmap(lambda row: _ballots.pack_fields(row, workers))(flags)
    total = jnp.sum(packed, axis=0, dtype=jnp.uint32)
    assert total.size == -(-n // (32 // int(np.ceil(np.log2(workers + 1)))))
    counts = _ballots.unpack_fields(total, n, workers)
    np.testing.assert_array_equal(counts, flags.sum(axis=0))


def test_both_routes_count_the_same():
    n, w = 333, 5
    flags = np.random.default_rng(1).random((w, n)) < 0.5

    def local(flags, fact):
        facts = jnp.stack([fact, fact + 1])
        return [
            _ballots.count(flags, facts, Workers("data"), route)
            for route in ("gather", "sum")
        ]

    facts = jnp.arange(w, dtype=jnp.uint32) - 9  # any bits at all
    mapped = jax.vmap(local, axis_name="data", out_axes=None)
    for counts, rows in jax.jit(mapped)(flags, facts):
        np.testing.assert_array_equal(counts, flags.sum(axis=0))
        np.testing.assert_array_equal(rows, np.stack([facts, facts + 1], axis=1))


@pytest.mark.parametrize("workers", [2, 4, 7, 8, 9, 15, 16, 64])
def test_the_route_is_chosen_by_bytes(workers):
    params = jnp.zeros(480_480)
    total = {
        route: sparsejax.wire_bytes(majority(route), params, workers=workers).total
        for route in ("gather", "sum", None)
    }
    facts = 8 * (workers - 1)
    width = int(np.ceil(np.log2(workers + 1)))
    words = 480_480 // (32 // width)
    assert total["gather"] == pytest.approx(4 * (workers - 1) * 15015 + facts)
    assert total["sum"] == pytest.approx(
        2 * (workers - 1) / workers * 4 * words + 2 * facts
    )
    # The comparison ignores the facts of the report.
    assert total[None] <= min(total["gather"], total["sum"]) + facts


@pytest.mark.parametrize("route", ["gather", "sum"])
def test_no_float_message(route):
    text = compiled_text(majority(route))
    moved = sparsejax.compiled_wire_bytes(text)
    words = {"gather": 7 * -(-N // 32), "sum": 2 * 7 / 8 * -(-N // 8)}[route]
    facts = {"gather": 7 * 2, "sum": 2 * 7 / 8 * 8 * 2}[route]
    assert moved.total == pytest.approx(4 * (words + facts))
    kinds = {"gather": "all-gather", "sum": "all-reduce"}
    assert list(moved.by_kind) == [kinds[route]]


# -- majority vote ---------------------------------------------------------------------


@pytest.mark.parametrize("route", ["gather", "sum"])
@pytest.mark.parametrize("runner", [run, run_simulated])
def test_majority(route, runner):
    for drawn, updates, state in runner(majority(route), 3):
        votes = np.sign(flat(drawn, (WORKERS,))).sum(axis=0)
        np.testing.assert_array_equal(flat(updates), np.sign(votes))
        assert (votes == 0).any()
        assert not jax.tree.leaves(state.memory)


@pytest.mark.parametrize("workers", [4, 5])
def test_zeros_do_not_vote(workers):
    """Votes cancel in each step if the number of workers is even, else on average."""
    tx = sparsejax.simulate(sparsejax.sign_majority(), workers=workers)
    state = tx.init(jnp.zeros(40))
    g = np.zeros((workers, 40), np.float32)
    g[:, 20:] = -0.0
    g[:, :10] = -1
    total = np.zeros(40)
    for _ in range(6):
        updates, state = tx.update(jnp.asarray(g), state)
        total += np.asarray(updates)
        if workers % 2 == 0:
            assert not updates[10:].any()
    np.testing.assert_array_equal(total, np.where(np.arange(40) < 10, -6, 0))


def test_majority_that_follows_the_gradients():
    square = weight = 0.0
    for drawn, updates, state in run(sparsejax.sign_majority(None), 4):
        mine = flat(drawn, (WORKERS,))
        square = 0.9 * square + 0.1 * np.mean(mine**2)
        weight = 0.9 * weight + 0.1
        size = sparsejax.report(state).details.scale
        assert size == pytest.approx(np.sqrt(square / weight), rel=2**-8)
        votes = np.sign(np.sign(mine).sum(axis=0))
        np.testing.assert_array_equal(flat(updates), size * votes)


# -- scaled signs ----------------------------------------------------------------------


def test_ef_sign_oracle():
    residual = np.zeros((WORKERS, N))
    for drawn, updates, state in run(sparsejax.ef_sign(), 6):
        vector = flat(drawn, (WORKERS,)) + residual
        factor = np.abs(vector).mean(axis=1, keepdims=True)
        # Rounded to eight significant bits.
        exponent = 2.0 ** np.floor(np.log2(factor) - 7)
        factor = np.round(factor / exponent) * exponent
        sent = np.where(vector >= 0, factor, -factor)
        np.testing.assert_allclose(flat(updates), sent.mean(axis=0), atol=1e-6)
        residual = vector - sent
        np.testing.assert_allclose(residuals(state), residual, atol=1e-5)


def test_sign_of_zero_is_positive():
    tx = sparsejax.simulate(sparsejax.ef_sign(), workers=2)
    g = jnp.array([[0.0, -0.0, 2.0, -2.0], [0.0, -0.0, -4.0, 4.0]])
    updates, state = tx.update(g, tx.init(jnp.zeros(4)))
    np.testing.assert_array_equal(updates, [1.5, 1.5, -0.5, 0.5])
    np.testing.assert_array_equal(
        state.memory.per_worker, [[-1, -1, 1, -1], [-2, -2, -2, 2]]
    )


def test_replicas_agree_on_a_torus_of_names():
    """A tuple of axes is one axis of all workers."""
    mesh = jax.make_mesh(
        (2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    tx = sparsejax.sign_majority(axis_name=("a", "b"))
    state = sparsejax.init(tx, PARAMS, mesh)
    specs = sparsejax.state_specs(state, ("a", "b"))
    spec = jax.P(("a", "b"))

    def local(g, state):
        return tx.update(jax.tree.map(lambda leaf: leaf[0], g), state)

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, specs), out_specs=(jax.P(), specs)
    )
    updates, _ = jax.jit(step)(gradients(0), state)
    votes = np.sign(flat(gradients(0), (WORKERS,))).sum(axis=0)
    np.testing.assert_array_equal(flat(updates), np.sign(votes))


# -- errors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "vote"}, "rule: got 'vote'"),
        ({"route": "ring"}, "route: got 'ring'"),
        ({"scale": -1.0}, "scale: got -1.0"),
        ({"rule": "mean", "route": "sum"}, "route: with the rule 'mean'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        exchanges.packed_signs(**arguments)


@pytest.mark.parametrize("voters", [1, 3, 8, 64])
def test_ballots_are_weighed_row_by_row(voters):
    """The result is right for any number of rows, without an array of w n numbers."""
    n = 1 << 16
    rng = np.random.default_rng(voters)
    words = jnp.asarray(rng.integers(2**32, size=(voters, n // 32), dtype=np.uint32))
    factors = jnp.asarray(rng.integers(1, 9, size=voters), jnp.float32)
    weigh = jax.jit(lambda words, factors: _ballots.weigh(words, factors, n))
    flags = np.stack([_bits.unpack(row, n) for row in words])
    np.testing.assert_array_equal(weigh(words, factors), np.asarray(factors) @ flags)
    temporary = weigh.lower(words, factors).compile().memory_analysis()
    assert temporary.temp_size_in_bytes <= 1.5 * 4 * n + words.nbytes
