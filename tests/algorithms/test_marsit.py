"""Marsit: single bits around a ring or a torus are unbiased, and cheap."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import exchanges, sparsifiers
from sparsejax._layout import Layout
from sparsejax._workers import Workers
from sparsejax.parts import Step
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


# -- the exchange ----------------------------------------------------------------------


def simulated(tx, grads, workers):
    """Updates and states of a sequence of gradients [w, n]."""
    made = sparsejax.simulate(tx, workers=workers)
    update = jax.jit(made.update)
    state = made.init(jnp.zeros(grads[0].shape[1]))
    for g in grads:
        updates, state = update(jnp.asarray(g, jnp.float32), state)
        yield np.asarray(updates), jax.device_get(state)


@pytest.mark.sampled
@pytest.mark.parametrize("n", [1, 2, 31, 32, 95, 96, 97, 1000])
def test_any_size(n):
    """Sizes below, at and above multiples of 32 w; unanimous signs, zeros are +1."""
    signs = np.where(np.arange(n) % 3 == 1, -1.0, 1.0)
    g = np.abs(np.random.default_rng(n).normal(size=(3, n))) * signs
    g[:, ::3] = 0.0
    g[1, ::3] = -0.0
    (update, state), *_ = simulated(sparsejax.marsit(None, scale=0.5), [g], 3)
    np.testing.assert_array_equal(update, 0.5 * signs)
    expected = (g.astype(np.float32) - 0.5 * signs).astype(np.float32)
    np.testing.assert_array_equal(state.memory.per_worker, expected)


def test_one_worker_sends_its_sign():
    g = np.random.default_rng(0).normal(size=(1, 70)).astype(np.float32)
    residual = np.zeros_like(g)
    for update, state in simulated(sparsejax.marsit(None, scale=0.3), [g] * 5, 1):
        expected = np.float32(0.3) * np.where(g + residual >= 0, 1, -1)
        np.testing.assert_array_equal(update, expected[0].astype(np.float32))
        residual = state.memory.per_worker


def test_seeds_and_steps():
    g = [np.random.default_rng(0).normal(size=(8, 500))] * 4
    tx = functools.partial(sparsejax.marsit, None, scale=1e-6)
    first, again, other = (
        np.stack([update for update, _ in simulated(tx(seed=seed), g, 8)])
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    # The compensation is near g t, so the signs of two steps never agree.
    for a, b in [(first[0], other[0]), (first[1], first[2]), (first[2], first[3])]:
        assert 0.2 < np.mean(a != b) < 0.6


def test_compensation_is_zero_after_a_full_step():
    steps = run(sparsejax.marsit(period=3), 7)
    for t, (_, updates, state) in enumerate(steps):
        details = sparsejax.report(state).details
        assert details.full == (t % 3 == 0)
        if details.full:
            assert not residuals(state).any()
        else:
            magnitudes = np.abs(flat(updates))
            np.testing.assert_array_equal(magnitudes, details.scale)
            assert residuals(state).all()


def test_period_one_is_uncompressed():
    mine, dense = run(sparsejax.marsit(1), 5), run(sparsejax.dense(), 5)
    for (_, a, state), (_, b, _) in zip(mine, dense, strict=True):
        np.testing.assert_array_equal(flat(a), flat(b))
        assert not residuals(state).any()


def test_scale_follows_the_gradient_and_not_the_compensation():
    def stream(t):
        return jax.tree.map(lambda g: g * (1 + t), gradients(t))

    square = weight = compensation = 0.0
    for drawn, _, state in run_simulated(sparsejax.marsit(6), 12, stream=stream):
        square = 0.9 * square + 0.1 * np.mean(flat(drawn, (WORKERS,)) ** 2)
        weight = 0.9 * weight + 0.1
        details = sparsejax.report(state).details
        assert details.scale == pytest.approx(np.sqrt(square / weight), rel=2**-8)
        assert details.compensation == pytest.approx(compensation, rel=1e-5)
        compensation = np.sqrt(np.mean(residuals(state) ** 2))


@pytest.mark.parametrize(
    "exchange",
    [
        exchanges.one_bit_ring(scale=0.5),
        exchanges.packed_signs(scale=0.5),
        exchanges.packed_signs("mean"),
    ],
    ids=["ring", "majority", "mean"],
)
def test_only_a_scale_that_follows_costs_a_pass(exchange):
    """`Step.mean_square` reads the whole gradient."""

    def never():
        raise AssertionError("measured for nothing")

    layout = Layout.of(jnp.zeros(70))

    def mean(vector):
        step = Step(jnp.int32(1), Workers("data"), layout, mean_square=never)
        choice, _ = sparsifiers.everything().select(vector, (), step)
        state = exchange.init(layout, step.w)
        return exchange.apply(vector, choice, state, step)[0].mean

    drawn = jnp.ones((3, 70))
    found = jax.vmap(mean, axis_name="data", out_axes=None)(drawn)
    assert np.all(found > 0)


def test_an_overflowing_mean_square_keeps_the_scale():
    huge = np.full((2, 40), 3e30)
    steps = list(simulated(sparsejax.marsit(None), [huge / 3e30, huge, huge / 3e30], 2))
    for update, _ in steps:
        np.testing.assert_array_equal(np.abs(update), 1)


def test_the_invariant_holds_over_500_steps():
    """`x + mean(c)` moves by exactly the mean of the inputs, also with a schedule."""
    n, w, steps = 333, 8, 500
    schedule = optax.cosine_decay_schedule(0.1, steps)
    tx = optax.chain(optax.scale_by_learning_rate(schedule), sparsejax.marsit(70))
    made = sparsejax.simulate(tx, workers=w)
    # Workers pull in different directions, which is the hard case.
    pull = jax.random.normal(jax.random.key(0), (w, n))

    def step(carry, t):
        x, state = carry
        g = pull + jax.random.normal(jax.random.fold_in(jax.random.key(1), t), (w, n))
        updates, state = made.update(g, state, x)
        x = x + updates
        kept = jnp.mean(state[1].memory.per_worker, axis=0)
        return (x, state), (g, x, kept)

    x = jnp.zeros(n)
    _, (g, x, kept) = jax.jit(
        lambda: jax.lax.scan(step, (x, made.init(x)), jnp.arange(steps))
    )()
    g, x, kept = (np.asarray(a, np.float64) for a in (g, x, kept))
    rates = np.array([schedule(t) for t in range(steps)])[:, None]
    expected = -np.cumsum(rates * g.mean(axis=1), axis=0)
    error = np.abs(x + kept - expected).max(axis=1)
    assert (error <= 1e-5 * np.abs(expected).max(axis=1)).all()
    assert np.abs(kept).max() > 0.01


@pytest.mark.parametrize(
    "local", [optax.trace(decay=0.9), optax.scale_by_adam()], ids=["momentum", "adam"]
)
def test_local_momentum_and_adam(local):
    """The invariant holds for each worker's own input."""
    chain = (sparsejax.per_worker(local), optax.scale_by_learning_rate(0.1))
    tx = optax.chain(*chain, sparsejax.marsit(period=4))
    plain = run_simulated(optax.chain(*chain, sparsejax.dense()), 7)
    total = np.zeros(N)
    for (_, updates, state), (_, means, _) in zip(run(tx, 7), plain, strict=True):
        total += flat(means) - flat(updates)
        np.testing.assert_allclose(residuals(state).mean(axis=0), total, atol=2e-6)


# -- on the wire -----------------------------------------------------------------------


def one_bit_bytes(n, workers):
    words = 2 * (workers - 1) * -(-n // (32 * workers))
    facts = 3 * (workers - 1)
    return 4 * (words + facts)


def test_one_bit_per_coordinate_on_the_wire():
    moved = sparsejax.compiled_wire_bytes(compiled_text(sparsejax.marsit(4)))
    (one_bit,), (full,) = (
        [size for branch, size in moved.by_branch.items() if branch.endswith(end)]
        for end in ("[0]", "[1]")
    )
    assert one_bit == one_bit_bytes(N, WORKERS)
    assert full == pytest.approx(2 * 7 / 8 * 4 * (N + 3 * WORKERS))
    assert moved.by_branch[""] == 0
    assert (moved.least, moved.total) == (one_bit, full)
    poisoned = sparsejax.marsit(None, nonfinite="propagate")
    moved = sparsejax.wire_bytes(poisoned, PARAMS, workers=WORKERS)
    assert moved.least == moved.by_branch[""]  # a branch without messages


def test_no_float_message():
    text = compiled_text(sparsejax.marsit(None))
    messages = re.findall(
        r"= (.*) (?:all-reduce|all-gather|collective-permute)(?:-start)?\(", text
    )
    assert len(messages) == 2  # the hops are a loop
    assert all("u32[" in shape and "f32[" not in shape for shape in messages)
    assert sparsejax.compiled_wire_bytes(text).total == one_bit_bytes(N, WORKERS)


@pytest.mark.parametrize("workers", [2, 3, 64])
def test_bytes_for_any_number_of_workers(workers):
    params = jnp.zeros(12345)
    tx = sparsejax.marsit(None)
    moved = sparsejax.wire_bytes(tx, params, workers=workers)
    assert moved.total == pytest.approx(one_bit_bytes(12345, workers))


# -- a torus of devices ----------------------------------------------------------------


def test_torus_on_devices():
    axes = ("rows", "columns")
    mesh = jax.make_mesh((2, 4), axes, axis_types=(AxisType.Auto,) * 2)
    tx = sparsejax.marsit(period=3, axis_name=axes)
    x = jnp.zeros(777)
    state = sparsejax.init(tx, x, mesh)
    specs = sparsejax.state_specs(state, axes)

    def local(g, state):
        return tx.update(g[0], state)

    step = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(P(axes), specs), out_specs=(P(), specs)
        )
    )
    given, received = np.zeros(777), np.zeros(777)
    for t in range(8):
        g = np.random.default_rng(t).normal(size=(8, 777)).astype(np.float32)
        updates, state = step(g, state)
        given, received = given + g.mean(axis=0), received + np.asarray(updates)
        first, *others = (np.asarray(s.data) for s in updates.addressable_shards)
        assert all(first.tobytes() == other.tobytes() for other in others)
        kept = np.asarray(state.memory.per_worker).mean(axis=0)
        np.testing.assert_allclose(received + kept, given, atol=1e-5)
        if t % 3:
            np.testing.assert_array_equal(
                np.abs(updates), sparsejax.report(state).details.scale
            )

    moved = sparsejax.wire_bytes(
        sparsejax.marsit(None, axis_name=axes), x, workers=(2, 4), axis_name=axes
    )
    assert moved.total == pytest.approx(one_bit_bytes(777, 8))
    hops = sum(c.bytes for c in moved.collectives if c.kind == "permute")
    length = -(-777 // (32 * 8))
    assert hops == 4 * length * (3 * 2 + 1)


# -- errors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"period": 0}, ValueError, "period: got 0"),
        ({"period": 2.5}, TypeError, "period: got 2.5"),
        ({"period": True}, TypeError, "period"),
        ({"scale": 0}, ValueError, "scale: got 0"),
        ({"scale": float("inf")}, ValueError, "scale"),
        ({"scale": "big"}, TypeError, "scale: got 'big'"),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        sparsejax.marsit(**arguments)


def test_scale_can_be_injected():
    tx = optax.inject_hyperparams(
        sparsejax.marsit, static_args=("period", "seed", "axis_name", "nonfinite")
    )(period=None, scale=optax.linear_schedule(1.0, 0.5, 5))
    sizes = [np.unique(np.abs(flat(u))) for _, u, _ in run(tx, 3)]
    np.testing.assert_allclose(np.concatenate(sizes), [1.0, 0.9, 0.8], rtol=1e-6)
