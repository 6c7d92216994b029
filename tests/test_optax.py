"""Sparsifiers inside optax's combinators, and the combinators that are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from tests.harness import PARAMS, WORKERS, flat, gradients, mesh_of, run, trainer

N = sum(p.size for p in PARAMS.values())
LABELS = {"bias": "dense", "kernel": "sparse", "scale": "dense", "unused": "dense"}


@pytest.fixture
def sparse(every):
    """A recipe. Combinators treat all alike; the first tier's compiles fast."""
    return sparsejax.exdyna if every else sparsejax.random_k


def _last(tx, steps=3, **options):
    *_, (drawn, updates, state) = run(tx, steps, **options)
    assert np.isfinite(flat(updates)).all()
    return drawn, updates, state


def test_partition_exchanges_each_group_its_own_way():
    tx = optax.partition(
        {"sparse": sparsejax.exdyna(0.05), "dense": sparsejax.dense()}, LABELS
    )
    drawn, updates, state = _last(tx, 1)
    for name in ("bias", "scale"):
        np.testing.assert_allclose(
            updates[name], drawn[name].mean(axis=0), rtol=1e-5, atol=1e-6
        )
    assert np.count_nonzero(updates["kernel"]) == int(0.05 * 600)
    reports = sparsejax.reports(state)
    assert sorted(int(r.sent) for r in reports.values()) == [21, 30]
    with pytest.raises(ValueError, match=r"2 sparsejax states.*reports"):
        sparsejax.report(state)


def test_masked_leaves_pass_through_local(sparse):
    """Masked leaves are not exchanged: their mean is the user's task."""
    tx = optax.chain(
        optax.masked(sparse(0.05), {k: k == "kernel" for k in PARAMS}),
        optax.masked(sparsejax.dense(), {k: k != "kernel" for k in PARAMS}),
    )
    drawn, updates, _ = _last(tx, 1)
    np.testing.assert_allclose(
        updates["bias"], drawn["bias"].mean(axis=0), rtol=1e-5, atol=1e-6
    )
    assert np.count_nonzero(updates["kernel"]) == 30


def test_inject_hyperparams_with_static_arguments():
    @optax.inject_hyperparams
    def rate(learning_rate):
        return optax.sgd(learning_rate)

    tx = optax.chain(
        optax.inject_hyperparams(
            sparsejax.exdyna, static_args=("density", "axis_name", "nonfinite")
        )(density=0.05),
        rate(learning_rate=optax.linear_schedule(1.0, 0.0, 10)),
    )
    _, injected, state = _last(tx)
    assert float(state[1].hyperparams["learning_rate"]) == pytest.approx(0.8)
    assert sparsejax.report(state).sent == int(0.05 * N)
    _, plain, _ = _last(sparsejax.exdyna(0.05))
    np.testing.assert_allclose(flat(injected), -0.8 * flat(plain), rtol=1e-6)


def test_clipping_before_weight_decay_and_schedules_after(sparse):
    params = jax.tree.map(jnp.ones_like, PARAMS)
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        sparse(0.05),
        optax.add_decayed_weights(0.1),
        optax.sgd(optax.cosine_decay_schedule(0.5, 10)),
    )
    tx, drawn = sparsejax.simulate(tx, workers=WORKERS), gradients(0)
    updates, state = jax.jit(tx.update)(drawn, tx.init(params), params)
    assert sparsejax.report(state).sent == int(0.05 * N)
    rows = flat(drawn, (WORKERS,))
    clipped = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    # Every coordinate has the decay; delivered ones also have the clipped mean.
    delivered = flat(updates) / -0.5 - 0.1
    np.testing.assert_allclose(
        delivered,
        np.where(abs(delivered) > 1e-6, clipped.mean(axis=0), 0),
        rtol=1e-4,
        atol=1e-6,
    )


def test_muon_after_the_sparsifier(sparse):
    params = {k: v for k, v in PARAMS.items() if v.size}  # muon divides by sizes
    tx = optax.chain(sparse(0.05), optax.contrib.muon(0.1))
    _, updates, state = _last(
        tx, params=params, stream=lambda t: gradients(t, params=params)
    )
    assert np.abs(updates["kernel"]).max() > 0
    assert sparsejax.report(state).sent == int(0.05 * N)


def test_schedule_free_after_the_sparsifier(sparse):
    """`schedule_free` wraps the optimizer; the sparsifier comes before it."""
    tx = optax.chain(
        sparse(0.05),
        optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1),
    )
    *_, state = _last(tx)
    averaged = optax.contrib.schedule_free_eval_params(state[1], PARAMS)
    assert np.isfinite(flat(averaged)).all()
    assert np.abs(flat(averaged)).max() > 0


# -- refused wrappers ------------------------------------------------------------------

INNER = {
    "exdyna": sparsejax.exdyna(0.1),
    "chain": optax.chain(optax.clip(1.0), sparsejax.dense(), optax.sgd(0.1)),
    "per_worker": sparsejax.per_worker(sparsejax.micro(0.1)),
}
inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER)


def _refused(wrap, inner, match):
    """`init` and `update` raise, even with a state of the unwrapped transformation."""
    wrapped = wrap(inner)
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match=f"init: .*{match}"):
        wrapped.init(PARAMS)
    with (
        jax.set_mesh(mesh_of()),
        pytest.raises(ValueError, match=f"init: .*{match}"),
    ):
        jax.eval_shape(wrapped.init, PARAMS)
    plain = wrap(optax.identity()).init(PARAMS)
    state = sparsejax.init(inner, PARAMS, mesh_of())
    field = "inner_opt_state" if hasattr(plain, "inner_opt_state") else "inner_state"
    with pytest.raises(ValueError, match=f"update: .*{match}"):
        jax.eval_shape(wrapped.update, PARAMS, plain._replace(**{field: state}), PARAMS)


@inner
def test_multi_steps_is_refused(inner):
    _refused(
        lambda tx: optax.MultiSteps(tx, 4),
        inner,
        r"`optax\.MultiSteps`.*Average the gradients of the microbatches",
    )
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match="MultiSteps"):
        optax.MultiSteps(inner, 4).gradient_transformation().init(PARAMS)


@inner
def test_apply_if_finite_is_refused(inner):
    _refused(
        lambda tx: optax.apply_if_finite(tx, 3),
        inner,
        r"`optax\.apply_if_finite`.*nonfinite=\"drop\"",
    )


def _after_the_first(step):
    return step > 0


BRANCHING = {
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, _after_the_first
    ),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, _after_the_first),
}


@inner
@pytest.mark.parametrize("name", BRANCHING)
def test_wrappers_that_skip_steps_are_refused(inner, name):
    _refused(BRANCHING[name], inner, rf"`optax\.{name}`.*after the recipe")


@inner
def test_wrappers_that_mix_gradients_are_refused(inner):
    with jax.set_mesh(mesh_of()):
        sam = optax.contrib.sam(inner, optax.sgd(0.1))
        with pytest.raises(ValueError, match=r"contrib\.sam`.*recipe before it"):
            sam.init(PARAMS)
        with pytest.raises(ValueError, match=r"contrib\.mechanize`.*recipe before it"):
            optax.contrib.mechanize(inner).init(PARAMS)


def test_lookahead_keeps_the_residual():
    """A reset would lose the residual, and give the report's flags other types."""
    fast = optax.LookaheadParams.init_synced(PARAMS)
    recipe = sparsejax.simulate(sparsejax.exdyna(0.1), workers=8)
    fixed = optax.chain(recipe, optax.sgd(0.1))
    tx = optax.lookahead(fixed, 2, 0.5, reset_state=True)
    state = tx.init(fast)
    with pytest.raises(ValueError, match=r"init: .*Leave `reset_state` out"):
        jax.eval_shape(tx.update, gradients(0), state, fast)
    tx = optax.lookahead(fixed, 2, 0.5)
    _, after = jax.eval_shape(tx.update, gradients(0), tx.init(fast), fast)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(
        lambda x: x.dtype, state
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "behind",
    [
        lambda tx: optax.apply_if_finite(tx, 3),
        *BRANCHING.values(),
        lambda tx: optax.contrib.mechanize(tx),
    ],
    ids=["apply_if_finite", *BRANCHING, "mechanize"],
)
def test_the_fixes_work(behind, sparse):
    """The remedies in the errors run."""
    _, updates, _ = _last(optax.chain(sparse(0.1), behind(optax.sgd(0.1))))
    assert flat(updates).any()


def test_microbatches_are_one_exchange(sparse):
    """The mean over two halves of a batch equals the gradient of the whole."""
    made = trainer(sparse(0.1))
    first, second = gradients(0), gradients(1)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    _, state, updates = made.advance(*made.start(), mean)
    assert int(state.step) == 1
    assert np.count_nonzero(flat(updates)) == int(0.1 * N)


# -- labels ----------------------------------------------------------------------------


def test_small_leaves():
    params = {
        "kernel": jnp.zeros((64, 64)),
        "small": jnp.zeros((4, 4)),
        "vector": jnp.zeros(100_000),
        "scalar": jnp.zeros(()),
        "abstract": jax.ShapeDtypeStruct((65, 64), jnp.bfloat16),
    }
    labels = sparsejax.small_leaves()(params)
    assert labels == {
        "kernel": "sparse",
        "small": "dense",
        "vector": "dense",
        "scalar": "dense",
        "abstract": "sparse",
    }
    labels = sparsejax.small_leaves(min_size=0, sparse="a", dense="b")(params)
    assert labels["small"] == "a"
    assert labels["vector"] == "b"
    with pytest.raises(ValueError, match="min_size: got -1"):
        sparsejax.small_leaves(-1)
    with pytest.raises(ValueError, match="two different labels"):
        sparsejax.small_leaves(sparse="x", dense="x")


def test_small_leaves_with_partition(sparse):
    tx = optax.partition(
        {"sparse": sparse(0.05), "dense": sparsejax.dense()},
        sparsejax.small_leaves(min_size=500),
    )
    _, updates, _ = _last(tx, 1)
    assert np.count_nonzero(updates["kernel"]) == 30
    assert np.count_nonzero(updates["bias"]) == 20


def test_tree_map_params_is_for_the_states_behind():
    tx = optax.chain(sparsejax.dense(), optax.adam(0.1))
    state = sparsejax.init(tx, PARAMS, mesh_of())
    with pytest.raises(ValueError, match=r"tree_map_params\(optax\.adam.*opt_state\[1"):
        optax.tree_map_params(tx, jnp.ones_like, state)
    mapped = optax.tree_map_params(optax.adam(0.1), jnp.ones_like, state[1])
    assert flat(mapped[0].mu).min() == 1


def test_an_ensemble_by_vmap():
    """The axis of the members comes before the axis of the workers."""
    tx, members = optax.chain(sparsejax.topk(0.5), optax.sgd(0.1)), jnp.zeros((3, 4))
    with jax.set_mesh(mesh_of()):
        state = jax.vmap(tx.init)(members)
        specs = sparsejax.state_specs(state)
        assert specs[0].memory.per_worker == jax.P(None, "data")
        assert specs[0].report.sent == jax.P()
        rows = sparsejax.PerWorker(jnp.zeros((3, WORKERS, 4)))
        new, after = jax.eval_shape(jax.vmap(tx.update), rows, state)
    assert new.shape == members.shape
    assert jax.tree.structure(after) == jax.tree.structure(state)


def test_simulated_steps_with_a_loss_compile_once():
    traces = []

    def update(updates, state, params=None, *, value, value_fn=None):
        traces.append(value_fn)
        return jax.tree.map(lambda u: value * u, updates), state

    scaled = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = sparsejax.simulate(optax.chain(sparsejax.dense(), scaled), workers=2)
    state, rows = tx.init(jnp.zeros(2)), jnp.ones((2, 2))
    for value in (2.0, 3.0):
        updates, state = tx.update(rows, state, value=value)
        assert updates.tolist() == [value, value]
    assert traces == [None]
    tx.update(rows, state, value=2.0, value_fn=flat)
    assert traces == [None, flat]
