"""The forms that are traced for accelerators, run on the CPU against the same oracles.

They have no loop that would wait for the host, and keep the promises of the forms for
the CPU: exact density, conserved mass, and no part that starves.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import _xla
from sparsejax.sparsifiers import _exclusive

N, WORKERS, STEPS, DENSITY = 20_011, 4, 12, 0.01
TARGET = int(DENSITY * N)
RECIPES = {
    "exdyna": sparsejax.exdyna,
    "micro": sparsejax.micro,
    "topk": sparsejax.topk,
    "cltk": sparsejax.cltk,
    "random_k": sparsejax.random_k,
}
each = pytest.mark.parametrize("name", RECIPES)
later = pytest.mark.second_tier


def primitives(jaxpr):
    """The names of all primitives, in branches and loops as well."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


@functools.cache
def step(name):
    """(state, jitted update) of the form for accelerators."""
    tx = sparsejax.simulate(RECIPES[name](DENSITY), workers=WORKERS)
    with _xla.traced_for("gpu"):
        state = tx.init(jnp.zeros(N))
        traced = jax.jit(tx.update).trace(jnp.zeros((WORKERS, N)), state)
    return state, traced


@each
def test_no_loop_waits_for_the_host(name):
    found = set(primitives(step(name)[1].jaxpr.jaxpr))
    assert "while" not in found
    assert {"scatter", "scatter-add"} & found  # the walk reaches the whole step


@pytest.mark.sampled
@each
def test_density_is_exact_and_mass_conserved(name):
    state, traced = step(name)
    update = traced.lower().compile()
    rng = np.random.default_rng(5)
    profile = np.linspace(0.2, 3, N)  # the parts have to move
    given = received = scale = np.zeros(N)
    for t in range(STEPS):
        drawn = (rng.laplace(size=(WORKERS, N)) * profile).astype(np.float32)
        updates, state = update(jnp.asarray(drawn), state)
        report = sparsejax.report(state)
        given = given + drawn.mean(axis=0, dtype=np.float64)
        scale = scale + np.abs(drawn).mean(axis=0, dtype=np.float64)
        received = received + np.asarray(updates, np.float64)
        if name == "topk":
            # The threshold is nearly exact once the last one is known.
            assert (report.demand >= TARGET).all()
            assert t < 1 or (report.demand <= 1.05 * TARGET).all()
        else:
            assert report.sent == TARGET
        if name in ("exdyna", "micro"):
            assert np.count_nonzero(updates) == TARGET
            quota = TARGET // WORKERS
            assert (report.demand >= quota).all()
            assert t < 6 or (report.demand <= 1.5 * (quota + 1)).all()
    kept = np.asarray(state.memory.per_worker, np.float64).mean(axis=0)
    assert np.abs(received + kept - given).max() <= 1e-6 * scale.max()


def test_parts_beyond_the_usual_size_take_the_rare_branch(monkeypatch):
    """A part may grow to nearly the whole vector."""
    monkeypatch.setattr(_exclusive, "_LARGE", 100)
    tx = sparsejax.simulate(sparsejax.exdyna(DENSITY), workers=WORKERS)
    with _xla.traced_for("gpu"):
        state = tx.init(jnp.zeros(N))
        update = jax.jit(tx.update)
        drawn = np.zeros((WORKERS, N), np.float32)
        hot = np.random.default_rng(6).laplace(size=(WORKERS, N // 16))
        drawn[:, : N // 16] = hot  # all large coordinates are in one sixteenth
        drawn[:, N // 16 :] = 1e-3 * np.random.default_rng(7).laplace(
            size=(WORKERS, N - N // 16)
        )
        largest = 0
        for _ in range(10):
            updates, state = update(jnp.asarray(drawn), state)
            assert np.count_nonzero(updates) == TARGET
            cuts = np.asarray(state.sparsifier.partition.cuts)
            largest = max(largest, np.diff(cuts).max() / cuts[-1])
    assert largest > 2 / WORKERS


def _pairs(**options):
    return sparsejax.sparsify(
        sparsejax.sparsifiers.nonzero(0.1, rows=False),
        exchange=sparsejax.exchanges.pairs(**options),
        memory=sparsejax.memories.error_feedback(),
    )


# Exchanges of choices that are the same in both forms. Zen's last steps overflow, and
# marsit averages whole vectors in every third step.
EXCHANGES = {
    "pairs": (_pairs, jnp.float32),
    "narrow pairs": (functools.partial(_pairs, value_bits=8), jnp.float32),
    "rounded pairs": (_pairs, jnp.bfloat16),
    "zen": (functools.partial(sparsejax.zen, 0.1), jnp.float32),
    "marsit": (functools.partial(sparsejax.marsit, period=3), jnp.float32),
}


@pytest.mark.parametrize(
    "name",
    [  # Each compiles two programs.
        pytest.param(name, marks=[] if name in ("pairs", "marsit") else [later])
        for name in EXCHANGES
    ],
)
def test_an_exchange_delivers_the_same_in_both_forms(name):
    build, dtype = EXCHANGES[name]
    n, found = 3000, {}
    for platform in ("cpu", "gpu"):
        rng = np.random.default_rng(8)
        tx = sparsejax.simulate(build(), workers=WORKERS)
        with _xla.traced_for(platform):
            state = tx.init(jnp.zeros(n, dtype))
            update, rows = jax.jit(tx.update), []
            for density in (0.01, 0.03, 0.03, 0.05, 0.5):
                drawn = rng.normal(size=(WORKERS, n))
                drawn[rng.random((WORKERS, n)) > density] = 0
                updates, state = update(jnp.asarray(drawn, dtype), state)
                rows.append((updates, state.report))
        found[platform] = (rows, state.memory)
    for a, b in zip(*map(jax.tree.leaves, found.values()), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_a_sum_flushed_to_zero_counts_once():
    """Devices that flush subnormals make -0.0 of it, the mark of an empty unit."""
    tx = sparsejax.simulate(_pairs(), workers=3)
    drawn = np.zeros((3, 100), np.float32)
    drawn[:, 7] = -4.5e-38, 4.4e-38, -3.0  # thirds are normal, and their sum is not
    drawn[1, 8] = 6.0
    with _xla.traced_for("gpu"):
        state = tx.init(jnp.zeros(100))
        updates, state = jax.jit(tx.update)(jnp.asarray(drawn), state)
    assert sparsejax.report(state).sent == 2
    np.testing.assert_array_equal(updates[7:9], [-1, 2])
