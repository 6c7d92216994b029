"""Methods of local steps: equal to their rules in numpy, and few bytes."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax.exchanges._pairs import value_code

W, H, B = 4, 3, 2


class _Quadratic:
    """`mean((x . p - 1)^2)` of a batch, with its gradient in numpy."""

    n = 40

    @staticmethod
    def loss(params, batch):
        return jnp.mean((batch @ params - 1.0) ** 2)

    @classmethod
    def rows(cls, t, steps):
        return np.random.default_rng(t).normal(size=(W, steps, B, cls.n)) / 6

    @classmethod
    def delta(cls, params, rows, rate):
        """The descent of one worker that makes plain SGD steps."""
        mine = params.copy()
        for batch in rows:
            mine -= rate * 2 / B * batch.T @ (batch @ mine - 1.0)
        return params - mine


def test_averaged_parameters_as_by_hand():
    outer = optax.chain(sparsejax.dense(), optax.sgd(1.0))
    training = sparsejax.rounds(_Quadratic.loss, optax.sgd(0.1), outer, steps=H)
    training = sparsejax.simulate(training, workers=W)
    params, by_hand = jnp.zeros(_Quadratic.n), np.zeros(_Quadratic.n)
    state = training.init(params)
    for t in range(5):
        rows = _Quadratic.rows(t, H)
        params, state, losses = training.step(params, state, rows.astype(np.float32))
        deltas = [_Quadratic.delta(by_hand, r, 0.1) for r in rows]
        by_hand -= np.mean(deltas, axis=0)
        np.testing.assert_allclose(params, by_hand, rtol=1e-5, atol=1e-6)
    assert losses.shape == (H,)


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [32, 2])
def test_sparseloco_follows_its_rule_for_fifty_rounds(bits):
    """Codes of values are the library's own: `test_narrow.py` has their oracle."""
    beta, chunk, k, n = 0.9, 16, 4, _Quadratic.n
    slots = 2 * k + k // 2  # two chunks, and half of one
    recipe = sparsejax.sparseloco(k / chunk, chunk=chunk, beta=beta, value_bits=bits)
    outer = optax.chain(recipe, optax.sgd(0.7))
    training = sparsejax.rounds(_Quadratic.loss, optax.sgd(0.1), outer, steps=H)
    training = sparsejax.simulate(training, workers=W)
    code = value_code(bits, slots)
    params, by_hand = jnp.zeros(n), np.zeros(n)
    waiting, state = np.zeros((W, n)), training.init(params)
    for t in range(50):
        rows = _Quadratic.rows(t, H)
        sent = np.zeros((W, n))
        for r in range(W):
            waiting[r] = beta * waiting[r] + _Quadratic.delta(by_hand, rows[r], 0.1)
            for start in range(0, n, chunk):
                part = np.abs(waiting[r, start : start + chunk])
                most = start + np.argsort(part)[::-1][: k * len(part) // chunk]
                sent[r, most] = waiting[r, most]
            where = np.flatnonzero(sent[r])
            values = jnp.asarray(sent[r, where], jnp.float32)
            sent[r, where] = code.decode(code.encode(values, None), None)
            waiting[r] -= sent[r]
        by_hand -= 0.7 * sent.mean(axis=0)
        params, state, _ = training.step(params, state, rows.astype(np.float32))
        np.testing.assert_allclose(params, by_hand, rtol=1e-3, atol=1e-5)
        memory = state.outer[0].memory.per_worker
        np.testing.assert_allclose(memory, waiting, rtol=1e-3, atol=1e-5)
    assert np.abs(waiting).max() > 1e-3


@pytest.mark.parametrize(
    "recipe",
    [
        sparsejax.sparseloco(0.0034, beta=0.8),
        sparsejax.exdyna(0.01, beta=0.8, value_bits=2),
    ],
)
def test_rounds_of_few_bits_take_a_five_thousandth_of_the_bytes(recipe):
    """Compared with dense in every step: the perceptron of the guide, eight workers."""
    sizes = (64, 128, 64, 10)
    shapes = list(itertools.pairwise(sizes)) + [(m,) for m in sizes[1:]]
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    outer = optax.chain(recipe, optax.sgd(2.0))
    training = sparsejax.rounds(_Quadratic.loss, optax.adamw(0.02), outer, steps=30)
    dense, sent = (
        sparsejax.wire_bytes(tx, params, workers=8).total
        for tx in (sparsejax.dense(), training)
    )
    assert 5000 < dense / sent < 7000
