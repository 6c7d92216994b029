"""`report.details.rounding`: the rounding errors of the values that are sent."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax

N, WORKERS = 600, 3
DRAWN = jax.random.laplace(jax.random.key(0), (WORKERS, N))


@functools.cache
def _two_steps(name, density, bits, late=False):
    """The states after a step, and after another one without gradients."""
    tx = getattr(sparsejax, name)(density, value_bits=bits)
    tx = sparsejax.delayed(tx) if late else tx
    made = sparsejax.simulate(tx, workers=WORKERS)
    update = jax.jit(made.update)
    _, first = update(DRAWN, jax.jit(made.init)(jnp.zeros(N)))
    return first, update(jnp.zeros_like(DRAWN), first)[1]


def test_pairs_tell_the_errors_that_stay_behind():
    first, _ = _two_steps("topk", 0.5, 4)
    shares = []
    for drawn, left in zip(DRAWN, first.memory.per_worker, strict=True):
        sent = np.argsort(-np.abs(drawn))[: N // 2]
        shares.append(np.abs(left[sent]).sum() / np.abs(drawn[sent]).sum())
    assert first.report.details.rounding == pytest.approx(np.mean(shares), rel=0.01)


@pytest.mark.newer_waits
@pytest.mark.parametrize(
    ("name", "density", "widths"),
    [
        ("exdyna", 0.5, (4, 32)),
        # With three slots for each value, all of them empty in the last shares.
        ("random_k", lambda t: 0.25, (4, 32)),
        ("random_k", lambda t: 0.25, (32, 4)),
    ],
)
def test_averages_tell_the_errors_of_a_fair_sample(name, density, widths):
    """Coordinates that a worker chose itself have larger values, and do not count."""
    room = {"max_density": 0.75} if callable(density) else {}
    tx = getattr(sparsejax, name)(density, value_bits=widths, **room)
    tx = sparsejax.simulate(tx, workers=WORKERS)
    updates, state = jax.jit(tx.update)(DRAWN, tx.init(jnp.zeros(N)))
    sent = np.asarray(updates) != 0
    lost, exact = np.asarray(state.memory.per_worker)[:, sent], DRAWN[:, sent]
    if widths[1] < 32:  # A worker keeps w times the errors of the means that it made.
        lost, exact = lost.mean(axis=0)[None], exact.mean(axis=0)[None]
    measured = np.mean(np.abs(lost).sum(axis=1) / np.abs(exact).sum(axis=1))
    found = sparsejax.report(state).details.rounding
    assert found == pytest.approx(measured, rel=0.15)


@pytest.mark.newer_waits
def test_pairs_one_step_late_tell_them_late():
    plain, _ = _two_steps("topk", 0.5, 4)
    late = _two_steps("topk", 0.5, 4, late=True)
    found = [float(state.report.details.rounding) for state in late]
    assert found == [0, plain.report.details.rounding]


@pytest.mark.newer_waits
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["exdyna", "cltk", "topk"])
def test_fewer_bits_round_more(name, every):
    found = {}
    for bits in (32, 16, 8, 4, 2) if every else (32, 16, 8):
        first, _ = _two_steps(name, 0.5, bits)
        found[bits] = float(first.report.details.rounding)
    assert found[32] == 0
    assert np.all(np.diff(list(found.values())) > 0), found
    assert found[16] < 2**-7
    assert 0.004 < found[8] < 0.02


def test_short_lists_do_not_tell():
    first, _ = _two_steps("topk", 0.05, 16)
    assert first.report.details.rounding == 0
