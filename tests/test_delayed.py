"""Exchanges one step late: the same choices, delivered a step later."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.exchanges._delayed_pairs import InFlight
from sparsejax.testing._programs import example_params
from tests.harness import PARAMS, flat, gradients, mesh_of, residuals

W, STEPS = 4, 8

MADE = {
    "topk": sparsejax.topk(0.05),
    "topk_2_bits": sparsejax.topk(0.05, value_bits=2),
    "chunked_topk": sparsejax.chunked_topk(0.05, chunk=40),
    "sidco": sparsejax.sidco(0.05),
    "hard_threshold": sparsejax.hard_threshold(0.05, max_density=0.05),
    "everything": sparsejax.topk(1.0),
    # Two steps late, in one all-reduce.
    "exdyna": sparsejax.exdyna(0.05),
    "cltk": sparsejax.cltk(0.05),
    "random_k": sparsejax.random_k(0.05),
    "topk_union": sparsejax.topk(0.05, exchange=sparsejax.exchanges.union()),
    # Parts are disjoint, but here all workers choose the whole vector.
    "whole_union": sparsejax.exdyna(1.0),
}
LATER = ("exdyna", "cltk", "random_k", "topk_union", "whole_union")
ANNOUNCED_BY_ONE = ("cltk", "random_k")  # who may be absent


@functools.cache
def simulated(name, workers=W):
    return sparsejax.simulate(sparsejax.delayed(MADE[name]), workers=workers)


def started(tx, params):
    """The first state, compiled as a whole: it needs dozens of operations."""
    return jax.jit(tx.init)(params)


def on_its_way(state):
    """The values of all messages, [w, n]."""
    flight = state.exchange
    rows = np.zeros_like(residuals(state))
    if isinstance(flight, InFlight):
        held = flight.coordinates.per_worker, flight.values.per_worker
    else:
        values = flight.message.per_worker[:, : flight.coordinates.size]
        held = [flight.coordinates] * len(rows), values
    for row, places, values in zip(rows, *held, strict=True):
        inside = np.asarray(places) < row.size
        row[np.asarray(places)[inside]] += np.asarray(values)[inside]
    return rows


def vectors(drawn, workers=W):
    rows = jax.tree.map(lambda g: np.asarray(g, np.float32).reshape(workers, -1), drawn)
    return np.concatenate(jax.tree.leaves(rows), axis=1)


def test_top_k_one_step_late_as_by_hand():
    n, k = flat(PARAMS).size, int(0.05 * flat(PARAMS).size)
    waiting, before = np.zeros((W, n), np.float32), np.zeros(n)
    tx = simulated("topk")
    state = started(tx, PARAMS)
    for t in range(STEPS):
        drawn = gradients(t, W)
        updates, state = tx.update(drawn, state, PARAMS)
        np.testing.assert_allclose(flat(updates), before, rtol=1e-5, atol=1e-7)
        waiting = waiting + vectors(drawn)
        sent = np.zeros_like(waiting)
        for r in range(W):
            most = np.argsort(-np.abs(waiting[r]), kind="stable")[:k]
            sent[r, most] = waiting[r, most]
        waiting, before = waiting - sent, sent.mean(axis=0)
        np.testing.assert_allclose(residuals(state), waiting, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_mass_is_conserved_with_what_is_on_its_way(name, dtype):
    """Workers may be absent; a mean has the weights of the step that sent it."""
    tx, params = simulated(name), example_params(dtype)
    state = started(tx, params)
    given = received = scale = 0.0
    weight = 1.0  # the first update delivers nothing
    for t in range(STEPS):
        drawn = gradients(t, W, params=params, dtype=dtype)
        here = np.random.default_rng([5, t]).random(W) < 0.7
        updates, state = tx.update(drawn, state, params, present=here)
        received = received + weight * flat(updates)
        given = given + np.where(here[:, None], vectors(drawn), 0).mean(axis=0)
        scale = scale + np.abs(vectors(drawn)).mean(axis=0)
        weight = here.sum() / W
        if t > (name in LATER) and name not in ANNOUNCED_BY_ONE:
            assert int(sparsejax.report(state).sent) > 0
    pending = (residuals(state) + on_its_way(state)).mean(axis=0)
    assert (np.abs(received + pending - given) <= 2e-6 * scale).all()
    if name not in ANNOUNCED_BY_ONE:
        assert np.abs(on_its_way(state)).max() > 0
    # With nobody present, values in flight arrive, and nothing new is sent.
    before = residuals(state)
    updates, state = tx.update(drawn, state, params, present=np.zeros(W, bool))
    received = received + weight * flat(updates)
    assert np.abs(on_its_way(state)).max() == 0
    if dtype == jnp.float32:
        np.testing.assert_array_equal(residuals(state), before)
    total = received + residuals(state).mean(axis=0)
    assert (np.abs(total - given) <= 2e-6 * scale).all()


def test_the_leaders_choice_two_steps_late_as_by_hand():
    """Values are read once all workers have the indices, and are not chosen twice."""
    n, k = flat(PARAMS).size, int(0.05 * flat(PARAMS).size)
    waiting, travels = np.zeros((W, n), np.float32), np.zeros(n)
    chosen = np.zeros(0, int)
    tx = simulated("cltk")
    state = started(tx, PARAMS)
    for t in range(STEPS):
        drawn = gradients(t, W)
        updates, state = tx.update(drawn, state, PARAMS)
        np.testing.assert_allclose(flat(updates), travels, rtol=1e-5, atol=1e-7)
        waiting = waiting + vectors(drawn)
        travels = np.zeros(n)
        travels[chosen] = waiting[:, chosen].mean(axis=0)
        waiting[:, chosen] = 0
        chosen = np.argsort(-np.abs(waiting[t % W]), kind="stable")[:k]
        np.testing.assert_allclose(residuals(state), waiting, rtol=1e-5, atol=1e-6)
        if t >= 2:
            assert int(sparsejax.report(state).sent) == k


def test_exclusive_parts_two_steps_late_meet_their_density():
    tx = simulated("exdyna")
    state, cuts = started(tx, PARAMS), []
    hot = np.where(np.arange(flat(PARAMS).size) % 7 < 1, 9.0, 1.0)
    _, unravel = jax.flatten_util.ravel_pytree(PARAMS)
    hot_leaves = jax.device_get(jax.jit(unravel)(np.float32(hot)))
    for t in range(12):
        scaled = jax.tree.map(lambda g, h: g * h[None], gradients(t, W), hot_leaves)
        _, state = tx.update(scaled, state, PARAMS)
        report = sparsejax.report(state)
        cuts.append(np.asarray(state.sparsifier.partition.cuts))
        if t >= 2:
            assert int(report.sent) == int(0.05 * hot.size)
            assert int(report.details.histogram.sum()) == int(report.sent)
    assert np.ptp(np.stack(cuts), axis=0).max() > 0  # reports move the parts


def test_reports_are_those_of_the_delivered_step():
    late, now = simulated("topk"), sparsejax.simulate(MADE["topk"], workers=W)
    mine, theirs = started(late, PARAMS), now.init(PARAMS)
    for t in range(3):
        before = sparsejax.report(theirs)
        _, mine = late.update(gradients(t, W), mine, PARAMS)
        _, theirs = now.update(gradients(t, W), theirs, PARAMS)
        found = sparsejax.report(mine)
        # Thresholds are between two magnitudes, and depend on when a hint arrived.
        for field in ("demand", "sent", "dropped"):
            np.testing.assert_array_equal(getattr(found, field), getattr(before, field))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["topk_2_bits", "exdyna", "cltk"])
@pytest.mark.parametrize("view", ["jit", "checked", "unchecked"])
def test_on_devices_as_simulated(view, name):
    mesh, tx = mesh_of(W), sparsejax.delayed(MADE[name])
    state = sparsejax.init(tx, PARAMS, mesh)
    specs = sparsejax.state_specs(state)

    def mine(drawn, state):
        return tx.update(jax.tree.map(lambda g: g[0], drawn), state)

    def plain(drawn, state):
        return tx.update(jax.tree.map(sparsejax.PerWorker, drawn), state)

    step = plain
    if view != "jit":
        step = jax.shard_map(
            mine,
            mesh=mesh,
            in_specs=(P("data"), specs),
            out_specs=(P(), specs),
            check_vma=view == "checked",
        )
    step = jax.jit(step)
    reference = simulated(name)
    expected = started(reference, PARAMS)
    with jax.set_mesh(mesh):
        for t in range(4):
            theirs, expected = reference.update(gradients(t, W), expected, PARAMS)
            updates, state = step(gradients(t, W), state)
            np.testing.assert_allclose(
                flat(updates), flat(theirs), rtol=1e-5, atol=1e-7
            )
    assert np.abs(flat(updates)).max() > 0


@pytest.mark.parametrize("name", ["topk", "exdyna", "cltk"])
def test_one_collective_whose_operand_lies_in_the_state(name):
    """Nothing before the exchange depends on the gradients."""
    tx = sparsejax.delayed(MADE[name])

    def step(drawn, state):
        return tx.update(jax.tree.map(lambda g: g[0], drawn), state)

    mesh = mesh_of(W)
    state = sparsejax.init(tx, PARAMS, mesh)
    specs = sparsejax.state_specs(state)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
    )
    program = jax.make_jaxpr(mapped)(gradients(0, W), state).jaxpr.eqns[0]
    inner = program.params["jaxpr"]
    inner = getattr(inner, "jaxpr", inner)
    count = len(jax.tree.leaves(PARAMS))
    late = set(inner.invars[:count])  # the gradients, and all that depends on them
    kinds = ("all_gather", "psum", "all_to_all", "ppermute")
    found = []
    for eqn in inner.eqns:
        depends = any(v in late for v in eqn.invars if hasattr(v, "count"))
        if eqn.primitive.name.startswith(kinds):
            found.append((eqn.primitive.name, depends))
        if depends:
            late |= set(eqn.outvars)
    assert len(found) == 1, found
    assert not found[0][1]


@pytest.mark.parametrize(
    "name", [pytest.param("topk", marks=pytest.mark.second_tier), "exdyna"]
)
def test_a_resized_training_returns_what_is_on_its_way(name, every):
    tx = sparsejax.delayed(MADE[name])
    mesh, update = mesh_of(W), jax.jit(tx.update)
    with jax.set_mesh(mesh):
        state = tx.init(PARAMS)
        for t in range(3):
            drawn = jax.tree.map(sparsejax.PerWorker, gradients(t, W))
            _, state = update(drawn, state)
    pending = (residuals(state) + on_its_way(state)).mean(axis=0)
    assert np.abs(on_its_way(state)).max() > 0
    for workers in (2, 8):  # Each number has a compiled step of its own.
        made = sparsejax.resize_workers(tx, state, PARAMS, mesh_of(workers))
        assert isinstance(made.exchange, type(state.exchange))
        assert np.abs(on_its_way(made)).max() == 0
        kept = residuals(made)
        assert len(kept) == workers
        np.testing.assert_allclose(kept.mean(axis=0), pending, rtol=1e-5, atol=1e-7)
        if workers == 8 and not every:
            continue
        with jax.set_mesh(mesh_of(workers)):
            drawn = jax.tree.map(sparsejax.PerWorker, gradients(3, workers))
            updates, made = update(drawn, made)
        assert np.abs(flat(updates)).max() == 0  # nothing is sent twice
    same = sparsejax.resize_workers(tx, state, PARAMS, mesh)
    jax.tree.map(np.testing.assert_array_equal, same, state)


def test_rounds_one_round_late():
    def loss_fn(params, batch):
        return jnp.mean((batch @ params - 1.0) ** 2)

    recipe = sparsejax.topk(0.25)
    late = optax.chain(sparsejax.delayed(recipe), optax.sgd(1.0))
    training = sparsejax.rounds(loss_fn, optax.sgd(0.1), late, steps=2)
    training = sparsejax.simulate(training, workers=W)
    params = jnp.zeros(8)
    state, moved = training.init(params), []
    for t in range(40):
        batches = np.random.default_rng(t).normal(size=(W, 2, 3, 8))
        params, state, losses = training.step(params, state, batches.astype(np.float32))
        moved.append(float(jnp.abs(params).max()))
    assert moved[0] == 0 < moved[1]
    assert np.mean(losses) < 1.0


def test_an_empty_tree_and_one_worker():
    for params in ({}, np.zeros(0, np.float32), np.zeros(1, np.float32)):
        tx = simulated("topk", workers=1)
        drawn = jax.tree.map(lambda p: np.ones((1, *p.shape), np.float32), params)
        state, sent = started(tx, params), []
        for _ in range(2):
            updates, state = tx.update(drawn, state, params)
            sent.append([float(u.sum()) for u in jax.tree.leaves(updates)])
        expected = [float(u.size > 0) for u in jax.tree.leaves(updates)]
        assert sent == [[0.0] * len(expected), expected]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sparsejax.delayed(optax.sgd(0.1)), TypeError, "a recipe alone"),
        (
            lambda: sparsejax.delayed(optax.chain(MADE["topk"], optax.sgd(0.1))),
            TypeError,
            r"optax\.chain\(sparsejax\.delayed",
        ),
        (
            lambda: sparsejax.delayed(sparsejax.exdyna(0.01, value_bits=8)),
            ValueError,
            "`union` has no late form.*32 bits",
        ),
        (
            lambda: sparsejax.delayed(sparsejax.delayed(MADE["topk"])),
            ValueError,
            "no late form",
        ),
        (
            lambda: sparsejax.delayed(MADE["topk"], steps=2),
            ValueError,
            "steps: got 2.*1 step late",
        ),
        (
            lambda: sparsejax.delayed(MADE["cltk"], steps=1),
            ValueError,
            "steps: got 1.*2 steps late",
        ),
    ],
)
def test_wrong_calls_name_the_fix(make, error, message):
    with pytest.raises(error, match=message):
        make()
