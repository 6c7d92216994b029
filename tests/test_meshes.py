"""Meshes with more than one axis, and axes of either kind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import flat

kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def _mesh(shape, names, kind=AUTO):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def _loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - 1.0) ** 2)


def _params(seed=0, hidden=12):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)  # noqa: E731
    return {"w1": draw(6, hidden), "w2": draw(hidden, 4)}


def _batch(t, size=32):
    rng = np.random.default_rng([7, t])
    return jnp.asarray(rng.normal(size=(size, 6)), jnp.float32)


def _train(step, mesh, params, state, specs, batch_axes, steps=4, **options):
    param_specs = options.pop("param_specs", P())
    out = (param_specs, specs)
    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(param_specs, specs, P(batch_axes)),
            out_specs=out,
            **options,
        )
    )
    for t in range(steps):
        batch = jax.device_put(_batch(t), NamedSharding(mesh, P(batch_axes)))
        params, state = mapped(params, state, batch)
    return params, state


def _reference(tx, workers, steps=4, params=None):
    """The same training under `simulate`."""
    params = _params() if params is None else params
    simulated = sparsejax.simulate(tx, workers=workers)
    state = simulated.init(params)

    @jax.jit
    def step(params, state, batch):
        batch = batch.reshape(workers, -1, 6)
        grads = jax.vmap(jax.grad(_loss), in_axes=(None, 0))(params, batch)
        updates, state = simulated.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for t in range(steps):
        params, state = step(params, state, _batch(t))
    return params, state


def _close(mine, theirs):
    np.testing.assert_allclose(flat(mine), flat(theirs), rtol=1e-5, atol=1e-6)


def _tx(axis_name, density=0.1):
    return optax.chain(sparsejax.exdyna(density, axis_name=axis_name), optax.sgd(0.5))


@kinds
def test_tuple_of_axes_is_one_axis(kind):
    """("host", "local") exchanges over all eight, in major order."""
    mesh, axes = _mesh((2, 4), ("host", "local"), kind), ("host", "local")
    tx = _tx(axes)
    state = sparsejax.init(tx, _params(), mesh)
    memory = state[0].memory.per_worker
    assert memory.shape == (8, 120)
    assert all(s.data.shape == (1, 120) for s in memory.addressable_shards)

    def step(params, state, x):
        _, grads = sparsejax.value_and_grad(_loss, axis_name=axes)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = _train(
        step, mesh, _params(), state, sparsejax.state_specs(state, axes), axes
    )
    expected, other = _reference(_tx("data"), 8)
    _close(params, expected)
    _close(state[0].memory.per_worker, other[0].memory.per_worker)


@kinds
def test_two_level_cluster(kind):
    """A dense mean inside each host, sparse between hosts."""
    mesh, axes = _mesh((4, 2), ("host", "local"), kind), ("host", "local")
    tx = _tx("host")
    state = sparsejax.init(tx, _params(), mesh)
    memory = state[0].memory.per_worker
    assert memory.shape == (4, 120)
    assert all(s.data.shape == (1, 120) for s in memory.addressable_shards)

    def step(params, state, x):
        # With respect to both axes, so that no gradient is summed behind our back.
        _, grads = sparsejax.value_and_grad(_loss, axis_name=axes)(params, x)
        grads = jax.lax.pmean(grads, "local")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = _train(
        step, mesh, _params(), state, sparsejax.state_specs(state, "host"), axes
    )
    expected, other = _reference(_tx("data"), 4)
    _close(params, expected)
    _close(state[0].memory.per_worker, other[0].memory.per_worker)
    sparsejax.check_replicas((params, state), mesh)


def _two_level_step(mesh, value_and_grad_axes, pmean):
    tx = _tx("host")
    state = sparsejax.init(tx, _params(), mesh)
    specs = sparsejax.state_specs(state, "host")

    def step(params, state, x):
        _, grads = sparsejax.value_and_grad(_loss, axis_name=value_and_grad_axes)(
            params, x
        )
        grads = jax.lax.pmean(grads, "local") if pmean else grads
        return tx.update(grads, state, params)

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), specs, P(("host", "local"))),
        out_specs=(P(), specs),
    )
    return jax.eval_shape(mapped, _params(), state, _batch(0))


def test_forgotten_local_mean_names_the_axes():
    mesh = _mesh((4, 2), ("host", "local"))
    both = ("host", "local")
    with pytest.raises(
        ValueError, match=r"also varies over \['local'\].*pmean.*axis_n"
    ):
        _two_level_step(mesh, both, pmean=False)
    _two_level_step(mesh, both, pmean=True)
    # The gradients of parameters that are equal over "local" were summed over it.
    with pytest.raises(
        ValueError, match=r"value_and_grad: .*summed over it\. Name all"
    ):
        _two_level_step(mesh, "host", pmean=True)


def test_defaults_of_make_mesh():
    """Explicit axes today: nothing has to be said about kinds."""
    mesh = jax.make_mesh((8,), ("data",))
    tx = _tx("data")
    state = sparsejax.init(tx, _params(), mesh)

    def step(params, state, x):
        _, grads = sparsejax.value_and_grad(_loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    specs = sparsejax.state_specs(state)
    params, state = _train(step, mesh, _params(), state, specs, "data")
    _close(params, _reference(_tx("data"), 8)[0])


# -- a model axis beside the workers ---------------------------------------------------


@kinds
@pytest.mark.parametrize("model", [AUTO, EXPLICIT])
def test_automatic_model_axis(kind, model):
    """Manual over "data" only; what varies over "model" is the compiler's business."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, model))
    tx = _tx("data")
    with jax.set_mesh(mesh):
        state = tx.init(_params())

        def step(params, state, x):
            _, grads = sparsejax.value_and_grad(_loss)(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        specs = sparsejax.state_specs(state)
        params, state = _train(
            step, mesh, _params(), state, specs, "data", axis_names={"data"}
        )
    memory = state[0].memory.per_worker
    assert all(s.data.shape[0] == 1 for s in memory.addressable_shards)
    _close(params, _reference(_tx("data"), 4)[0])


PARAM_SPECS = {"w1": P(None, "model"), "w2": P("model", None)}


def _sharded(mesh, specs=PARAM_SPECS):
    return jax.tree.map(
        lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), _params(), specs
    )


def _loss_of_shard(params, x):
    """Column-parallel, then row-parallel: this shard's part of the outputs, summed."""
    outputs = jnp.tanh(x @ params["w1"]) @ params["w2"]
    return jnp.mean((jax.lax.psum(outputs, "model") - 1.0) ** 2)


def _model_step(tx):
    def step(params, state, x):
        _, grads = sparsejax.value_and_grad(_loss_of_shard)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@kinds
@pytest.mark.parametrize("nonfinite", ["drop", "propagate"])
def test_manual_model_axis(kind, nonfinite):
    """Each shard is sparsified by itself, among the workers that hold it."""
    mesh = _mesh((4, 2), ("data", "model"), kind)
    tx = sparsejax.per_shard(
        optax.chain(
            sparsejax.exdyna(0.1, nonfinite=nonfinite), optax.sgd(0.5, momentum=0.9)
        )
    )
    state = sparsejax.init(tx, _sharded(mesh), mesh)
    specs = sparsejax.state_specs(state)
    inner = state.per_shard
    assert inner[0].memory.per_worker.shape == (2, 4, 60)
    assert specs.per_shard[0].memory.per_worker == P("model", "data")
    assert specs.per_shard[0].step == P("model")
    shards = inner[0].memory.per_worker.addressable_shards
    assert all(s.data.shape == (1, 1, 60) for s in shards)
    assert inner[1][0].trace["w1"].shape == (2, 6, 6)
    params, state = _train(
        _model_step(tx),
        mesh,
        _sharded(mesh),
        state,
        specs,
        "data",
        param_specs=PARAM_SPECS,
    )
    report = sparsejax.report(state)
    np.testing.assert_array_equal(report.sent, [6, 6])
    sparsejax.check_replicas((params, state), mesh)
    _close(params, _manual_reference())


def _manual_reference():
    """Two simulated groups of four, one for each half of the model."""
    tx = optax.chain(sparsejax.exdyna(0.1), optax.sgd(0.5, momentum=0.9))
    tx = sparsejax.simulate(tx, workers=4)
    params = _params()

    def half(tree, i):  # of the hidden units
        return {
            "w1": jnp.split(tree["w1"], 2, axis=-1)[i],
            "w2": jnp.split(tree["w2"], 2, axis=-2)[i],
        }

    states = [tx.init(half(params, i)) for i in range(2)]
    for t in range(4):
        batch = _batch(t).reshape(4, -1, 6)
        grads = jax.vmap(jax.grad(_loss), in_axes=(None, 0))(params, batch)
        halves = []
        for i in range(2):
            mine = half(params, i)
            updates, states[i] = tx.update(half(grads, i), states[i], mine)
            halves.append(optax.apply_updates(mine, updates))
        params = {
            "w1": jnp.concatenate([h["w1"] for h in halves], axis=1),
            "w2": jnp.concatenate([h["w2"] for h in halves], axis=0),
        }
    return params


def test_init_of_shards_inside_the_axes():
    mesh = _mesh((4, 2), ("data", "model"))
    tx = sparsejax.per_shard(sparsejax.micro(0.1))

    def inside(params, x):
        state = tx.init(params)
        assert state.per_shard.memory.per_worker.shape == (1, 1, 60)
        step = _model_step(tx)

        def body(carry, _):  # the state is a legal carry from the start
            return step(*carry, x), None

        (params, _), _ = jax.lax.scan(body, (params, state), length=3)
        return params

    mapped = jax.shard_map(
        inside,
        mesh=mesh,
        in_specs=(PARAM_SPECS, P("data")),
        out_specs=PARAM_SPECS,
    )
    params = jax.jit(mapped)(_sharded(mesh), _batch(0))
    assert np.isfinite(flat(params)).all()


def test_leaf_sharded_over_an_automatic_axis():
    tx = sparsejax.exdyna(0.1)
    mesh = _mesh((4, 2), ("data", "model"))
    message = r"`\['w1'\]` is sharded over \['model'\].*per_shard\("
    with pytest.raises(ValueError, match=f"init: the leaf {message}"):
        sparsejax.init(tx, _sharded(mesh), mesh)
    # Where types know it, `update` sees it too.
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AUTO, EXPLICIT))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=f"init: the leaf {message}"),
    ):
        jax.eval_shape(tx.init, _sharded(mesh))
    state = sparsejax.init(tx, _params(), mesh)
    mapped = jax.shard_map(
        lambda g, s: tx.update(sparsejax.localize(g), s),
        mesh=mesh,
        in_specs=(P(), sparsejax.state_specs(state)),
        out_specs=(P(), sparsejax.state_specs(state)),
        axis_names={"data"},
    )
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=f"update: the leaf {message}"),
    ):
        jax.eval_shape(mapped, _sharded(mesh), state)


def test_parameters_that_all_shards_share():
    mesh = _mesh((4, 2), ("data", "model"))
    specs = PARAM_SPECS | {"bias": P()}
    params = _sharded(mesh) | {"bias": jax.device_put(jnp.zeros(4))}
    alone = sparsejax.per_shard(sparsejax.exdyna(0.1))
    with pytest.raises(ValueError, match=r"`\['bias'\]` is not known.*partition"):
        sparsejax.init(alone, params, mesh)

    def loss(params, x):
        outputs = jnp.tanh(x @ params["w1"]) @ params["w2"]
        outputs = jax.lax.psum(outputs, "model") + params["bias"][None]
        return jnp.mean((outputs - 1.0) ** 2)

    def gradients(params, x):
        return sparsejax.value_and_grad(loss)(params, x)[1]

    with pytest.raises(ValueError, match=r"`\['bias'\]` are typed as equal.*partition"):
        jax.eval_shape(
            jax.shard_map(
                lambda p, x: alone.update(gradients(p, x), alone.init(p))[0],
                mesh=mesh,
                in_specs=(specs, P("data")),
                out_specs=specs,
            ),
            params,
            _batch(0),
        )
    tx = optax.chain(
        optax.partition(
            {"sharded": alone, "shared": sparsejax.exdyna(0.1)},
            {"w1": "sharded", "w2": "sharded", "bias": "shared"},
        ),
        optax.sgd(0.5),
    )
    state = sparsejax.init(tx, params, mesh)

    def step(params, state, x):
        updates, state = tx.update(gradients(params, x), state, params)
        return optax.apply_updates(params, updates), state

    trained, state = _train(
        step, mesh, params, state, sparsejax.state_specs(state), "data",
        steps=12, param_specs=specs,
    )  # fmt: skip
    sparsejax.check_replicas((trained, state), mesh)
    assert np.abs(trained["bias"]).max() > 0


def test_shards_unknown_under_jit():
    mesh = _mesh((4, 2), ("data", "model"))
    tx = sparsejax.per_shard(sparsejax.exdyna(0.1))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"outside `jax\.jit`"):
        jax.jit(tx.init)(_sharded(mesh))
    with pytest.raises(ValueError, match="per_shard: no axes"):
        tx.init(_params())
    explicit = _mesh((4, 2), ("data", "model"), EXPLICIT)
    with jax.set_mesh(explicit):
        state = jax.jit(tx.init)(_sharded(explicit))
    assert state.per_shard.memory.per_worker.shape == (2, 4, 60)


def test_all_of_a_chain_belongs_in_per_shard():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P(None, "model"))
    params = {"w": jax.device_put(jnp.zeros((20, 6)), sharding)}
    tx = optax.chain(sparsejax.per_shard(sparsejax.exdyna(0.1)), optax.adam(0.1))
    state = sparsejax.init(tx, params, mesh)
    with pytest.raises(ValueError, match=r"mu\['w'\]`.*per_shard\(optax\.chain"):
        sparsejax.state_specs(state)
