"""Each misuse raises an error that names the argument, the value and the fix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import PARAMS, WORKERS, gradients, mesh_of


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


def test_init_without_mesh_names_the_remedies():
    remedies = r"set_mesh.*sparsejax\.init.*pmap.*workers=.*shard_map"
    with pytest.raises(NameError, match=remedies):
        sparsejax.exdyna(0.1).init(PARAMS)
    with pytest.raises(NameError, match=r"'batch'.*has the axes \('data',\)"):
        sparsejax.init(sparsejax.exdyna(0.1, axis_name="batch"), PARAMS, mesh_of())


def _update(tx, gradients, state, params=PARAMS):
    """Traces one update with `gradients`, as inside the axis."""
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
    with pytest.raises(TypeError, match=r"`\['bias'\]` \(int32\).*floats = jax\.tree"):
        _update(tx, wrong, state)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jnp.zeros(2, jnp.int32), r"\(int32\) is not. Split.*floats = jax\.tree\.map"),
        (jnp.zeros(2, jnp.complex64), r"\(complex64\).*split_real_and_imaginary\("),
        (jax.random.key(0), r"\(key<fry>\).*nnx\.state\(model, nnx\.Param\)"),
        (jax.nn.relu, r"\(relu\).*eqx\.partition\(model, eqx\.is_inexact_array\)"),
        ("relu", r"\(str\).*eqx\.partition"),
    ],
)
def test_leaves_that_are_no_floats(leaf, message):
    tx, params = sparsejax.exdyna(0.1), {"a": jnp.zeros(3), "z": leaf}
    for init in (tx.init, lambda p: sparsejax.init(tx, p, mesh_of())):
        with pytest.raises(TypeError, match=r"`\['z'\]` " + message):
            init(params)
    # The remedies: a tree without the leaf, and real and imaginary parts.
    floats = jax.tree.map(
        lambda x: x if jnp.issubdtype(getattr(x, "dtype", int), jnp.floating) else None,
        params,
    )
    with jax.set_mesh(mesh_of()):
        assert tx.init(floats).memory.per_worker.shape == (WORKERS, 3)


def test_complex_leaves_in_two_parts():
    tx = optax.contrib.split_real_and_imaginary(sparsejax.dense())
    tx = sparsejax.simulate(tx, workers=2)
    rows = jnp.array([[1 + 2j, 0], [3, 2j]], jnp.complex64)
    updates, _ = tx.update(rows, tx.init(rows[0]))
    assert updates.tolist() == [2 + 1j, 1j]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g | {"extra": g["bias"]}, r"`\['extra'\]` of shape \(20,\) instead"),
        (lambda g: {k: v for k, v in g.items() if k != "unused"}, "3 leaves instead"),
        (lambda g: g | {"bias": g["bias"][:, :5]}, r"shape \(5,\) instead of"),
        # Equally many coordinates, in other places.
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
    """`jax.grad` with respect to replicated parameters sums over the workers."""
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


@pytest.mark.parametrize("shape", [(), (40,), (3, 40)])
def test_simulate_needs_a_leading_axis(shape):
    tx = sparsejax.simulate(sparsejax.dense(), workers=4)
    state = tx.init(jnp.zeros(40))
    with pytest.raises(ValueError, match=r"root.*first axis.* 4 simulated workers"):
        tx.update(jnp.zeros(shape), state)


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


def _branch(predicate):
    def step(tx, g, s):
        skip = lambda g, s: (jnp.zeros(4), s)  # noqa: E731
        return jax.lax.cond(
            predicate(g), lambda g, s: tx.update(g, s, value=0.0), skip, g, s
        )

    return step


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_branch(lambda g: g[0] > 0), r"`jax\.lax\.cond` whose predicate.*lax\.pmax\("),
        (_branch(lambda g: jax.lax.pmax(g[0], "data") > 0), None),
        (lambda tx, g, s: tx.update(g, s, value=g[0]), r"value=jax\.lax\.pmean\(loss"),
        (lambda tx, g, s: tx.update(g, s, value=jax.lax.pmean(g[0], "data")), None),
    ],
    ids=["local branch", "agreed branch", "local loss", "mean loss"],
)
def test_decisions_that_differ_between_workers(step, message):
    tx = optax.chain(sparsejax.dense(), optax.contrib.reduce_on_plateau())
    state = sparsejax.init(tx, jnp.zeros(4), mesh_of())
    specs = sparsejax.state_specs(state)

    def traced():
        jax.eval_shape(
            jax.shard_map(
                lambda g, s: step(tx, g[0], s),
                mesh=mesh_of(),
                in_specs=(P("data"), specs),
                out_specs=(P(), specs),
            ),
            jnp.zeros((WORKERS, 4)),
            state,
        )

    if message is None:
        traced()
    else:
        with pytest.raises(ValueError, match=message):
            traced()


def test_a_loss_that_was_averaged_over_one_of_two_axes():
    axes = ("host", "device")
    tx = optax.chain(sparsejax.dense(axis_name=axes), optax.sgd(0.1))
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), axes, devices=jax.devices()[:4], axis_types=kinds)
    state = sparsejax.init(tx, jnp.zeros(4), mesh)
    specs = sparsejax.state_specs(state, axes)

    def step(g, s):
        return tx.update(g[0], s, value=jax.lax.pmean(g[0, 0], "device"))

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(axes), specs), out_specs=(P(), specs)
    )
    with pytest.raises(ValueError, match=r"value=jax\.lax\.pmean\(loss"):
        jax.eval_shape(mapped, jnp.zeros((4, 4)), state)


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
