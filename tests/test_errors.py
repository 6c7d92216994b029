"""Each misuse raises an error that names the argument, the value and the fix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import PARAMS, WORKERS, gradients, mesh_of, trainer

recipes = pytest.mark.parametrize("recipe", [sparsejax.exdyna, sparsejax.micro])


@recipes
@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_density_out_of_range(recipe, density):
    with pytest.raises(ValueError, match=r"density: got .*fraction in \(0, 1\]"):
        recipe(density)


@recipes
@pytest.mark.parametrize("density", ["1%", None, True, 0.5j, [0.1]])
def test_density_of_wrong_type(recipe, density):
    with pytest.raises(TypeError, match=r"density: got .*number in \(0, 1\]"):
        recipe(density)


@recipes
def test_traced_density_names_static_args(recipe):
    with pytest.raises(TypeError, match="static_args"):
        jax.jit(lambda d: recipe(d).init(PARAMS))(0.1)
    tx = optax.inject_hyperparams(recipe)(density=0.1)
    with jax.set_mesh(mesh_of()), pytest.raises(TypeError, match="static_args"):
        tx.init(PARAMS)
    fixed = optax.inject_hyperparams(recipe, static_args=("density", "nonfinite"))
    with jax.set_mesh(mesh_of()):
        fixed(density=0.1).init(PARAMS)


@recipes
@pytest.mark.parametrize(
    ("capacity", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)]
)
def test_capacity(recipe, capacity, error):
    with pytest.raises(error, match=r"capacity: got .*slot"):
        recipe(0.1, capacity=capacity)


@recipes
def test_unknown_nonfinite_policy(recipe):
    with pytest.raises(ValueError, match="nonfinite: got 'ignore', expected one of"):
        recipe(0.1, nonfinite="ignore")


def test_exchange_that_cannot_deliver():
    picky = sparsejax.exchanges.union()._replace(
        accepts=frozenset({"disjoint"}), name="picky"
    )
    with pytest.raises(ValueError, match="exchange: `picky` cannot deliver everything"):
        sparsejax.sparsify(
            sparsejax.sparsifiers.everything(),
            exchange=picky,
            memory=sparsejax.memories.none(),
        )


def test_unbound_axis_in_update():
    tx = sparsejax.exdyna(0.1)
    state = sparsejax.init(tx, PARAMS, mesh_of())
    with pytest.raises(NameError, match=r"'data' is not bound.*shard_map"):
        tx.update(PARAMS, state)
    with pytest.raises(NameError, match="localize: the axis 'data' is not bound"):
        sparsejax.localize(PARAMS)
    with pytest.raises(NameError, match="value_and_grad: the axis"):
        sparsejax.value_and_grad(jnp.sum)(1.0)


def test_another_axis_name_in_shard_map():
    tx = sparsejax.exdyna(0.1, axis_name="batch")
    with pytest.raises(NameError, match=r"'batch' is not bound.*axis_name="):
        jax.shard_map(
            lambda g: tx.update(g, None)[0],
            mesh=mesh_of(),
            in_specs=P("data"),
            out_specs=P(),
        )(jnp.zeros(8))


def test_init_without_mesh_names_both_remedies():
    with pytest.raises(ValueError, match=r"set_mesh.*sparsejax\.init.*shard_map"):
        sparsejax.exdyna(0.1).init(PARAMS)
    with pytest.raises(ValueError, match="no axis 'batch' here"):
        sparsejax.init(sparsejax.exdyna(0.1, axis_name="batch"), PARAMS, mesh_of())


def _update(tx, gradients, state, params=PARAMS):
    """Traces one update with `gradients` as they are inside the axis."""
    specs = sparsejax.state_specs(state, "data")
    return jax.eval_shape(
        jax.shard_map(
            lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s)[0],
            mesh=mesh_of(),
            in_specs=(P("data"), specs),
            out_specs=P(),
        ),
        gradients,
        state,
    )


def test_integer_gradients():
    tx = sparsejax.exdyna(0.1)
    state = sparsejax.init(tx, PARAMS, mesh_of())
    wrong = gradients(0) | {"bias": jnp.zeros((WORKERS, 20), jnp.int32)}
    with pytest.raises(TypeError, match=r"`\['bias'\]` \(int32\).*optax.masked"):
        _update(tx, wrong, state)
    with pytest.raises(TypeError, match="complex64"):
        sparsejax.init(tx, {"z": jnp.zeros(2, jnp.complex64)}, mesh_of())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g | {"extra": g["bias"]}, r"`\['extra'\]` of shape \(20,\) where"),
        (lambda g: {k: v for k, v in g.items() if k != "unused"}, "3 leaves where"),
        (lambda g: g | {"bias": g["bias"][:, :5]}, r"shape \(5,\) where it had"),
        # As many coordinates, in other places.
        (lambda g: g | {"kernel": g["kernel"].swapaxes(1, 2)}, r"shape \(20, 30\)"),
    ],
)
def test_another_tree_than_at_init(change, message):
    tx = sparsejax.exdyna(0.1)
    state = sparsejax.init(tx, PARAMS, mesh_of())
    with pytest.raises(ValueError, match=rf"another structure.*{message}.*tx\.init"):
        _update(tx, change(gradients(0)), state)


def test_too_many_coordinates():
    huge = {"a": jax.ShapeDtypeStruct((2**30,), jnp.float32)}
    huge["b"] = jax.ShapeDtypeStruct((2**15, 2**15), jnp.bfloat16)
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match=r"optax\.partition"):
        jax.eval_shape(sparsejax.exdyna(0.1).init, huge)


def test_global_state_inside_the_axis():
    tx = sparsejax.exdyna(0.1)
    state = sparsejax.init(tx, PARAMS, mesh_of())
    with pytest.raises(ValueError, match=r"leading axis of 1.*state_specs"):
        jax.eval_shape(
            jax.shard_map(
                lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s)[0],
                mesh=mesh_of(),
                in_specs=(P("data"), P()),
                out_specs=P(),
            ),
            gradients(0),
            state,
        )


def _loss(w, x):
    return jnp.mean((w * x) ** 2)


def test_already_reduced_gradients():
    """`jax.grad` with respect to replicated parameters sums over workers."""
    tx = sparsejax.exdyna(0.5)
    w = jnp.ones(4)
    state = sparsejax.init(tx, w, mesh_of())
    x = jnp.ones(4 * WORKERS)  # [4] on each worker

    def traced(gradient):
        return jax.eval_shape(
            jax.shard_map(
                lambda w, x, s: tx.update(gradient(w, x), s)[0],
                mesh=mesh_of(),
                in_specs=(P(), P("data"), sparsejax.state_specs(state)),
                out_specs=P(),
            ),
            w, x, state,
        )  # fmt: skip

    message = r"already reduced.*sparsejax\.value_and_grad"
    with pytest.raises(ValueError, match=message):
        traced(jax.grad(_loss))
    with pytest.raises(ValueError, match=message):
        traced(lambda w, x: jax.lax.pmean(_local(w, x), "data"))
    traced(_local)


def _local(w, x):
    return sparsejax.value_and_grad(_loss)(w, x)[1]


def test_names_the_reduced_leaves_only():
    tx = sparsejax.exdyna(0.5)
    params = {"good": jnp.ones(4), "bad": jnp.ones(4)}
    state = sparsejax.init(tx, params, mesh_of())

    def step(g, s):
        g = g[0]
        return tx.update({"good": g, "bad": jax.lax.pmean(g, "data")}, s)[0]

    with pytest.raises(ValueError, match=r"gradients `\['bad'\]` are typed"):
        jax.eval_shape(
            jax.shard_map(
                step,
                mesh=mesh_of(),
                in_specs=(P("data"), sparsejax.state_specs(state)),
                out_specs=P(),
            ),
            jnp.zeros((WORKERS, 4)),
            state,
        )


def test_pmean_inside_the_loss():
    def step(w, x):
        return sparsejax.value_and_grad(
            lambda w: jax.lax.pmean(_loss(w, x), "data"), has_aux=False
        )(w)

    with pytest.raises(ValueError, match="without a `pmean`"):
        jax.eval_shape(
            jax.shard_map(
                step, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P()
            ),
            jnp.ones(4),
            jnp.ones(4 * WORKERS),
        )


def test_report_needs_exactly_one():
    with pytest.raises(ValueError, match="no sparsejax state"):
        sparsejax.report(optax.sgd(0.1).init(PARAMS))
    both = optax.chain(sparsejax.exdyna(0.1), sparsejax.dense())
    state = sparsejax.init(both, PARAMS, mesh_of())
    with pytest.raises(ValueError, match=r"2 sparsejax states.*sparsejax\.reports"):
        sparsejax.report(state)
    assert list(sparsejax.reports(state)) == ["[0].report", "[1].report"]


@pytest.mark.parametrize("workers", [0, -1, 2.5, None, (2, 2)])
def test_simulate_needs_workers(workers):
    error = ValueError if workers in (0, -1) else TypeError
    with pytest.raises(error, match=r"workers: got .*expected an int of at least 1"):
        sparsejax.simulate(sparsejax.dense(), workers=workers)


@pytest.mark.parametrize("shape", [(), (40,), (3, 40)])
def test_simulate_needs_a_leading_axis(shape):
    tx = sparsejax.simulate(sparsejax.dense(), workers=4)
    state = tx.init(jnp.zeros(40))
    with pytest.raises(ValueError, match=r"root.*first axis.* 4 simulated workers"):
        tx.update(jnp.zeros(shape), state)


@recipes
@pytest.mark.parametrize("rule", ["x", 0.5, sparsejax.thresholds.staircase])
def test_threshold_rule(recipe, rule):
    with pytest.raises(TypeError, match=r"threshold: got .*staircase\(\)"):
        recipe(0.1, threshold=rule)


@recipes
@pytest.mark.parametrize("name", [["data"], None, (), ("a", 1)])
def test_axis_name(recipe, name):
    with pytest.raises(TypeError, match=r"axis_name: got .*name of a mesh axis"):
        recipe(0.1, axis_name=name)


def test_wire_bytes_asks_for_one_number_per_axis():
    tx = sparsejax.exdyna(0.1)
    for workers in ((2, 4), ()):
        with pytest.raises(ValueError, match=r"workers: got .*each axis"):
            sparsejax.wire_bytes(tx, PARAMS, workers=workers)
    with pytest.raises(ValueError, match="workers: got 0"):
        sparsejax.wire_bytes(tx, PARAMS, workers=0)
    other = sparsejax.exdyna(0.1, axis_name="host")
    with pytest.raises(ValueError, match=r"no axis 'host'.*`wire_bytes`"):
        sparsejax.wire_bytes(other, PARAMS, workers=4)


def test_branching_on_a_local_predicate_is_refused():
    from sparsejax._workers import Workers

    workers = Workers("data")

    def step(x, agreed):
        flag = x[0] > 0
        flag = workers.any(flag) if agreed else flag
        return workers.cond(flag, lambda: 1.0, lambda: 0.0)

    def traced(agreed):
        return jax.shard_map(
            lambda x: step(x, agreed), mesh=mesh_of(), in_specs=P("data"), out_specs=P()
        )(jnp.arange(8.0))

    with pytest.raises(ValueError, match=r"predicate differs.*workers\.any"):
        traced(False)
    assert traced(True) == 1.0


def test_state_is_independent_of_capacity():
    """Another density takes over the same state."""
    first, second = sparsejax.exdyna(0.25), sparsejax.exdyna(0.01)
    made = trainer(first)
    _, state, _ = made.advance(*made.start(), gradients(0))
    other = trainer(second)
    assert jax.tree.structure(state) == jax.tree.structure(other.state)
    _, state, updates = other.advance(other.start()[0], state, gradients(1))
    assert int(sparsejax.report(state).sent) == 6
    assert np.isfinite(np.asarray(updates["bias"])).all()


def test_wire_bytes_whatever_mesh_is_set():
    tx = sparsejax.exdyna(0.1)
    expected = sparsejax.wire_bytes(tx, PARAMS, workers=4)
    with jax.set_mesh(mesh_of()):
        assert sparsejax.wire_bytes(tx, PARAMS, workers=4) == expected


def test_only_what_is_compiled_has_compiled_bytes():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert sparsejax.compiled_wire_bytes(lowered.compile()).total == 0
    with pytest.raises(TypeError, match=r"compiled: got Lowered.*compile\(\)"):
        sparsejax.compiled_wire_bytes(lowered)
    with pytest.raises(ValueError, match=r"no ENTRY.*compile\(\)"):
        sparsejax.compiled_wire_bytes(lowered.as_text())


def test_state_of_another_number_of_workers():
    tx = sparsejax.exdyna(0.1)
    state = sparsejax.init(tx, PARAMS, mesh_of())
    specs = sparsejax.state_specs(state)
    with pytest.raises(ValueError, match=r"leading axis of 1.*resize_workers"):
        jax.eval_shape(
            jax.shard_map(
                lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s)[0],
                mesh=mesh_of(4),
                in_specs=(P("data"), specs),
                out_specs=P(),
            ),
            gradients(0, workers=4),
            state,
        )


def test_differentiated_arguments_go_by_position():
    def step(w, x):
        return sparsejax.value_and_grad(_loss)(w=w, x=x)

    with pytest.raises(TypeError, match="by position"):
        jax.eval_shape(
            jax.shard_map(
                step, mesh=mesh_of(), in_specs=(P(), P("data")), out_specs=P()
            ),
            jnp.ones(4),
            jnp.ones(4 * WORKERS),
        )


@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        (sparsejax.exdyna, {"capacity": 8}),
        (sparsejax.dgc, {"momentum": 0.9}),
        (sparsejax.topk, {"capacity": 3}),
        (sparsejax.hard_threshold, {"threshold": 0.1}),
    ],
)
def test_injected_arguments_name_static_args(recipe, arguments):
    (name,) = arguments
    fixed = {"density": 0.1} | arguments
    tx = optax.inject_hyperparams(recipe, static_args=("density",))(**fixed)
    with jax.set_mesh(mesh_of()), pytest.raises(TypeError, match=rf'args=\("{name}"'):
        tx.init(PARAMS)


def test_schedules_are_for_some_recipes():
    with pytest.raises(TypeError, match="Schedules are taken by `exdyna`"):
        sparsejax.sidco(optax.linear_schedule(0.1, 0.01, 5))
