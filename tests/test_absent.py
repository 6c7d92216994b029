"""Workers that are absent from a step: they add nothing, and keep their residuals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax import exchanges, memories, sparsifiers
from tests.cases import RECIPES
from tests.harness import PARAMS, flat, gradients, mesh_of, residuals

W, STEPS = 4, 12


def present(t):
    """Nobody in step 3, worker 0 alone in step 5, and otherwise a random choice."""
    if t in (3, 5):
        return np.arange(W) == (0 if t == 5 else W)
    return np.random.default_rng([11, t]).random(W) < 0.6


ABSTAINING = [
    case
    for case in RECIPES
    if case.name not in ("marsit", "sign_majority", "ef_sign", "dgc", "sparseloco")
]
FEW_BITS = sparsejax.exdyna(0.05, value_bits=4)
MADE = {case.name: case.make() for case in ABSTAINING} | {"exdyna_4_bits": FEW_BITS}


# The first tier runs one pair of recipes, so that tests share compiled programs.
each = pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("exdyna", "topk")
        else pytest.param(name, marks=pytest.mark.second_tier)
        for name in MADE
    ],
)


@functools.cache
def rows(name):
    """`(present, gradients [w, n], update, residuals [w, n] or None, report)`."""
    tx = sparsejax.simulate(MADE[name], workers=W)
    state, made = tx.init(PARAMS), []
    for t in range(STEPS):
        drawn, here = gradients(t, W), present(t)
        updates, state = tx.update(drawn, state, PARAMS, present=here)
        kept = residuals(state) if jax.tree.leaves(state.memory) else None
        mine = np.stack(
            [flat(jax.tree.map(lambda g, r=r: g[r], drawn)) for r in range(W)]
        )
        made.append((here, mine, flat(updates), kept, sparsejax.report(state)))
    return made


@each
def test_mass_is_conserved_with_weights(name):
    """Divisors count those present: an update of p of w workers weighs p / w."""
    given = received = scale = 0.0
    for here, mine, update, kept, report in rows(name):  # noqa: B007 (the last)
        given = given + np.where(here[:, None], mine, 0).mean(axis=0)
        received = received + update * here.sum() / W
        scale = scale + np.abs(mine).mean(axis=0)
        np.testing.assert_array_equal(report.dropped, ~here)
        # A rule's least threshold, for zeros, would be the least of all workers.
        absent = np.asarray(report.threshold)[~here]
        assert (np.isinf(absent) | (absent == 0)).all()
    total = received + (0 if kept is None else kept.mean(axis=0))
    assert (np.abs(total - given) <= 2e-6 * scale).all()


@each
def test_an_absent_worker_keeps_its_residual(name):
    before = None
    for here, _, update, kept, _ in rows(name):
        if not here.any():
            np.testing.assert_array_equal(update, 0)
        # With few bits an absent worker averages for others, and keeps the errors.
        if before is not None and name != "exdyna_4_bits":
            np.testing.assert_array_equal(kept[~here], before[~here])
        before = kept


@pytest.mark.parametrize(
    "name", ["exdyna", pytest.param("micro", marks=pytest.mark.second_tier)]
)
def test_parts_of_absent_workers_wait(name):
    """Only the present workers' share of K* is sent, and the thresholds stay."""
    for here, _, _, _, report in rows(name):
        target = 0.05 * sum(p.size for p in jax.tree.leaves(PARAMS))
        # Each present worker sends the quota of its part, a whole number.
        assert abs(int(report.sent) - target * here.sum() / W) <= W
        assert (np.asarray(report.demand)[~here] == 0).all()


@pytest.mark.sampled
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_devices_as_simulated(check_vma):
    mesh, tx = mesh_of(W), MADE["exdyna"]
    state = sparsejax.init(tx, PARAMS, mesh)
    specs = sparsejax.state_specs(state)

    def mine(drawn, state, here):
        drawn = jax.tree.map(lambda g: g[0], drawn)
        return tx.update(drawn, state, present=here[0])

    bound = jax.jit(
        jax.shard_map(
            mine,
            mesh=mesh,
            in_specs=(P("data"), specs, P("data")),
            out_specs=(P(), specs),
            check_vma=check_vma,
        )
    )

    @jax.jit
    def plain(drawn, state, here):
        return tx.update(jax.tree.map(sparsejax.PerWorker, drawn), state, present=here)

    other = state
    for t in range(4):
        drawn, here = gradients(t, W), present(t)
        expected = rows("exdyna")[t][2]
        updates, state = bound(drawn, state, here)
        np.testing.assert_allclose(flat(updates), expected, rtol=1e-5, atol=1e-7)
        if check_vma:
            with jax.set_mesh(mesh):
                updates, other = plain(drawn, other, here)
            np.testing.assert_allclose(flat(updates), expected, rtol=1e-5, atol=1e-7)


def test_a_broken_gradient_of_an_absent_worker_does_not_matter(every):
    for policy in ("propagate", "drop") if every else ("propagate",):
        tx = sparsejax.simulate(sparsejax.micro(0.1, nonfinite=policy), workers=W)
        drawn, here = gradients(0, W), np.arange(W) != 2
        drawn["kernel"][2] = np.nan
        updates, state = tx.update(drawn, tx.init(PARAMS), PARAMS, present=here)
        assert np.isfinite(flat(updates)).all()
        assert (residuals(state)[2] == 0).all()


def test_velocities_of_an_absent_worker_wait():
    tx = sparsejax.sparsify(
        sparsifiers.topk(0.1),
        exchange=exchanges.pairs(),
        memory=memories.momentum_correction(0.9),
    )
    tx = sparsejax.simulate(optax.chain(tx, optax.sgd(1.0)), workers=2)
    params = jnp.zeros(40)
    drawn = np.random.default_rng(0).normal(size=(3, 2, 40)).astype(np.float32)
    state = tx.init(params)
    for t in range(3):
        before = state[0].memory
        here = np.array([True, t != 1])
        _, state = tx.update(drawn[t], state, params, present=here)
        if t == 1:
            for old, new in zip(
                jax.tree.leaves(before), jax.tree.leaves(state[0].memory), strict=True
            ):
                np.testing.assert_array_equal(old[1], new[1])
                assert (old[0] != new[0]).any()


def test_a_round_without_a_worker():
    def loss_fn(params, batch):
        return jnp.mean((batch @ params - 1.0) ** 2)

    outer = optax.chain(sparsejax.exdyna(0.5), optax.sgd(1.0))
    training = sparsejax.rounds(loss_fn, optax.adam(0.1), outer, steps=2)
    batches = np.random.default_rng(0).normal(size=(W, 2, 3, 6)).astype(np.float32)
    here = np.arange(W) != 1
    alone = sparsejax.simulate(training, workers=W)
    batches[1] = np.nan  # must change neither the updates nor the loss
    params, state, losses = alone.step(
        jnp.zeros(6), alone.init(jnp.zeros(6)), batches, present=here
    )
    assert np.isfinite(losses).all()
    np.testing.assert_array_equal(state.inner.per_worker[0].count, 2 * here)
    np.testing.assert_array_equal(sparsejax.report(state).dropped, ~here)
    mesh = mesh_of(W)
    with jax.set_mesh(mesh):
        rows = np.moveaxis(batches, 0, 1).reshape(2, -1, 6)
        mine, _, means = jax.jit(training.step)(
            jnp.zeros(6), training.init(jnp.zeros(6)), rows, present=here
        )
    np.testing.assert_allclose(mine, params, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(means, losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("tx", "here", "error", "message"),
    [
        (sparsejax.marsit(), np.ones(2, bool), ValueError, "would vote too.*exdyna"),
        (sparsejax.ef_sign(), np.ones(2, bool), ValueError, "would vote too"),
        (sparsejax.dense(), np.ones(2), TypeError, "got float32, expected one Bool"),
        (sparsejax.dense(), np.ones(3, bool), ValueError, r"shape \(3,\).*Bool\[2\]"),
        (sparsejax.dense(), True, ValueError, r"shape \(\).*Bool\[2\]"),
    ],
)
def test_wrong_calls_name_the_fix(tx, here, error, message):
    """Under `simulate`, on devices, and for wrong arrays in rounds too."""
    params, mesh = jnp.zeros(4), mesh_of(2)
    simulated = sparsejax.simulate(tx, workers=2)
    with pytest.raises(error, match=message):
        simulated.update(jnp.ones((2, 4)), simulated.init(params), params, present=here)
    with jax.set_mesh(mesh):
        drawn = sparsejax.PerWorker(jnp.ones((2, 4)))
        with pytest.raises(error, match=message):
            tx.update(drawn, tx.init(params), present=here)
    outer = optax.chain(tx, optax.sgd(1.0))
    training = sparsejax.rounds(lambda p, b: jnp.sum(p * b), tx, outer, steps=1)
    training = training._replace(init=None)  # an inner recipe is refused there
    if np.shape(here) != (2,) or np.asarray(here).dtype != bool:
        with jax.set_mesh(mesh), pytest.raises(error, match=message):
            training.step(params, None, jnp.ones((1, 2, 4)), present=here)


def test_lists_and_python_bools_are_booleans():
    """`~True` is -2, so a Python bool must become an array first."""
    # A recipe that compiles fast: four programs differ only in `present`.
    tx, mesh, params = sparsejax.random_k(0.5), mesh_of(2), jnp.zeros(4)
    rows = jnp.arange(8.0).reshape(2, 4)
    simulated = sparsejax.simulate(tx, workers=2)
    start = simulated.init(params)
    expected, _ = simulated.update(rows, start, params)
    same, _ = simulated.update(rows, start, params, present=[True, True])
    np.testing.assert_array_equal(same, expected)
    state = sparsejax.init(tx, params, mesh)
    specs = sparsejax.state_specs(state)
    mapped = jax.shard_map(
        lambda row, state: tx.update(row[0], state, present=True),
        mesh=mesh,
        in_specs=(P("data"), specs),
        out_specs=(P(), specs),
        check_vma=False,
    )
    updates, new = jax.jit(mapped)(rows, state)
    np.testing.assert_array_equal(updates, expected)
    assert sparsejax.report(new).dropped.tolist() == [False, False]

    @jax.jit
    def plain(rows, state):
        return tx.update(sparsejax.PerWorker(rows), state, present=[True, True])

    with jax.set_mesh(mesh):
        updates, _ = plain(rows, state)
    np.testing.assert_array_equal(updates, expected)


def late_forms():
    """`(name, whether late)` of all recipes, and of their late forms."""
    for name, tx in MADE.items():
        yield name, False
        if tx.parts.exchange.later is not None:
            yield name, True


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "late"), list(late_forms()))
def test_traces_under_strict_promotion(name, late):
    """The numbers of workers, by which means are divided, are floats."""
    tx = sparsejax.delayed(MADE[name]) if late else MADE[name]
    tx = sparsejax.simulate(tx, workers=W)
    params = PARAMS | {"narrow": jnp.zeros(5, jnp.bfloat16)}
    state = jax.eval_shape(tx.init, params)
    drawn = jax.tree.map(lambda p: jnp.zeros((W, *p.shape), p.dtype), params)
    update = functools.partial(tx.update, present=jnp.ones(W, bool))
    with jax.numpy_dtype_promotion("strict"):
        updates, after = jax.eval_shape(update, drawn, state, params)
    assert jax.tree.map(jnp.dtype, after) == jax.tree.map(jnp.dtype, state)
    assert updates["narrow"].dtype == jnp.bfloat16


def test_a_round_traces_under_strict_promotion():
    training = sparsejax.rounds(
        lambda params, batch: jnp.mean(batch @ params).astype(jnp.bfloat16),
        optax.sgd(0.1),
        optax.chain(sparsejax.delayed(sparsejax.topk(0.5)), optax.sgd(1.0)),
        steps=2,
    )
    alone, params = sparsejax.simulate(training, workers=W), jnp.zeros(6)
    state = jax.eval_shape(alone.init, params)
    step = functools.partial(alone.step, present=jnp.ones(W, bool))
    with jax.numpy_dtype_promotion("strict"):
        *_, losses = jax.eval_shape(step, params, state, jnp.zeros((W, 2, 3, 6)))
    assert losses.dtype == jnp.bfloat16
