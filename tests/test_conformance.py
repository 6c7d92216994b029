"""The contract that every recipe passes."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from tests.cases import CASES, RECIPES, parametrize
from tests.harness import (
    PARAMS,
    WORKERS,
    flat,
    gradients,
    memory_leaves,
    mesh_of,
    residuals,
    run,
    run_simulated,
    trainer,
)

every_case = parametrize()
every_recipe = parametrize(RECIPES)


def _types(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


@every_case
def test_state_keeps_structure_shapes_and_dtypes(case):
    before = trainer(case.make()).state
    *_, (_, _, after) = run(case.make(), 2)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert _types(before) == _types(after)


@every_case
def test_init_on_abstract_shapes(case):
    shapes = jax.eval_shape(lambda: PARAMS)
    with jax.set_mesh(mesh_of()):
        abstract = jax.eval_shape(case.make().init, shapes)
        concrete = case.make().init(PARAMS)
    assert _types(abstract) == _types(concrete)


@every_recipe
@pytest.mark.parametrize("params", [{}, jnp.zeros(())], ids=["none", "scalar"])
def test_tiny_trees(case, params):
    """No leaf, and a scalar: fewer coordinates than workers."""

    def stream(t):
        return gradients(t, params=params)

    for _, updates, state in run(case.make(), 3, params=params, stream=stream):
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        assert np.all(np.isfinite(flat([updates, np.zeros(0)])))
        assert np.isfinite(sparsejax.report(state).density)


@every_case
def test_no_recompilation(case):
    made = trainer(case.make())
    params, state = made.start()
    for t in range(3):
        params, state, _ = made.advance(params, state, gradients(t))
    assert made.step._cache_size() == 1


@every_case
def test_updates_have_structure_and_dtype_of_gradients(case):
    params = {
        **PARAMS,
        "bias": PARAMS["bias"].astype(jnp.bfloat16),
        "scale": PARAMS["scale"].astype(jnp.float16),
    }

    made = trainer(case.make(), params)
    drawn = gradients(0, params=params)
    _, state, updates = jax.eval_shape(made.step, params, made.state, drawn)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
    kept = memory_leaves(state)
    assert kept or not case.memory
    assert all(leaf.dtype == jnp.float32 for leaf in kept)


@every_case
def test_shard_map_equals_simulate(case):
    real = run(case.make(), 5)
    simulated = run_simulated(case.make(), 5)
    for (_, mine, state), (_, theirs, other) in zip(real, simulated, strict=True):
        np.testing.assert_allclose(flat(mine), flat(theirs), rtol=1e-5, atol=1e-6)
        report, expected = sparsejax.report(state), sparsejax.report(other)
        assert report.sent == expected.sent
        np.testing.assert_array_equal(report.demand, expected.demand)
        assert _types(state) == _types(other)
        if case.memory:
            np.testing.assert_allclose(
                residuals(state), residuals(other), rtol=1e-5, atol=1e-6
            )


@every_case
def test_replicas_stay_bitwise_equal(case):
    made = trainer(case.make())
    params, state = made.start()
    specs = sparsejax.state_specs(state, "data")
    for t in range(50):
        params, state, updates = made.advance(params, state, gradients(t))
    replicated = [
        leaf
        for leaf, spec in zip(
            jax.tree.leaves(state), jax.tree.leaves(specs), strict=True
        )
        if "data" not in spec
    ]
    for leaf in jax.tree.leaves((params, updates, replicated)):
        first, *others = (np.asarray(s.data) for s in leaf.addressable_shards)
        assert len(others) == WORKERS - 1
        for other in others:
            assert first.tobytes() == other.tobytes()


@parametrize(case for case in CASES if case.at_density_one)
def test_density_one_is_the_dense_mean(case):
    for drawn, updates, state in run(case.at_density_one(), 3):
        given = flat(drawn, (WORKERS,))
        # Rounded twice, and what the step before left is rounded again.
        atol = 1e-6 + 4 * case.rounding * np.abs(given).mean(axis=0).max()
        np.testing.assert_allclose(
            flat(updates), given.mean(axis=0), rtol=1e-6, atol=atol
        )
        assert sparsejax.report(state).density == 1.0


@every_case
def test_one_worker(case):
    mesh = mesh_of(1)

    def stream(t):
        return gradients(t, workers=1)

    total = np.zeros(flat(PARAMS).size)
    for drawn, updates, state in run(case.make(), 4, mesh=mesh, stream=stream):
        total += flat(drawn, (1,))[0] - flat(updates)
        kept = residuals(state)[0] if case.memory else np.zeros_like(total)
        if not case.loses:
            np.testing.assert_allclose(total, kept, atol=1e-4)
        assert sparsejax.report(state).sent > 0


@every_case
def test_fewer_coordinates_than_workers(case):
    params = jnp.zeros((3,))

    def stream(t):
        return gradients(t, params=params)

    total, sent = np.zeros(3), 0
    for drawn, updates, state in run(case.make(), 24, params=params, stream=stream):
        total += flat(drawn, (WORKERS,)).mean(axis=0) - flat(updates)
        sent += int(sparsejax.report(state).sent)
        kept = residuals(state).mean(axis=0) if case.memory else np.zeros(3)
        if not case.loses:
            np.testing.assert_allclose(total, kept, atol=1e-4)
    assert sent > 0


@every_case
def test_zero_gradients_give_zero_updates(case):
    def zeros(t):
        return jax.tree.map(jnp.zeros_like, gradients(t))

    for _, updates, state in run(case.make(), 3, stream=zeros):
        assert not flat(updates).any()
        if case.memory:
            assert not residuals(state).any()
    # and nothing is broken afterwards

    def late(t):
        return zeros(t) if t < 2 else gradients(t)

    *_, (_, updates, _) = run(case.make(), 4, stream=late)
    assert flat(updates).any()


@every_case
def test_strict_promotion(case):
    with jax.numpy_dtype_promotion("strict"):
        made = trainer(case.make())
        _, state, _ = jax.eval_shape(
            made.step, made.params, made.state, made.shard(gradients(0))
        )
    assert _types(state) == _types(made.state)


@every_case
def test_with_64_bit_types(case):
    """Where integers and floats are wider by default, states stay as they are."""
    simulated = sparsejax.simulate(case.make(), workers=3)
    drawn = gradients(0, 3)
    state = jax.eval_shape(simulated.init, PARAMS)
    with jax.enable_x64(True):
        wide = jax.eval_shape(simulated.init, PARAMS)
        updates, after = jax.eval_shape(simulated.update, drawn, wide)
    assert _types(updates) == _types(PARAMS)
    assert _types(state) == _types(wide) == _types(after)


@every_recipe
def test_without_checked_types(case):
    """All other tests run with `check_vma=True`."""
    unchecked = list(run(case.make(), 2, check_vma=False))
    expected = list(run(case.make(), 2))
    np.testing.assert_array_equal(flat(unchecked[-1][1]), flat(expected[-1][1]))


@every_case
def test_compiled_bytes_equal_the_accounting(case):
    made = trainer(case.make())
    params, state = made.start()
    compiled = made.step.lower(params, state, made.shard(gradients(0))).compile()
    static = sparsejax.wire_bytes(case.make(), PARAMS, workers=WORKERS)
    moved = sparsejax.compiled_wire_bytes(compiled)
    assert static.total > 0
    assert moved.total == pytest.approx(static.total)
    assert moved.by_kind == pytest.approx(static.by_kind)


@every_recipe
def test_works_in_chain_with_schedules(case):
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        case.make(),
        optax.scale_by_learning_rate(optax.cosine_decay_schedule(0.1, 10)),
    )
    *_, (_, updates, _) = run(tx, 3)
    assert np.all(np.isfinite(flat(updates)))
    assert flat(updates).any()
