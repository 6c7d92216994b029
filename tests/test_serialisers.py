"""A state goes through any serialiser, and the next step is bitwise the same."""

from __future__ import annotations

import functools
import pickle

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.cases import RECIPES, param
from tests.harness import PARAMS, gradients, mesh_of, trainer

NONEMPTY = {k: v for k, v in PARAMS.items() if v.size}  # orbax refuses empty arrays
BY_NAME = {case.name: case for case in RECIPES}


def through_bytes(state, like, path):
    return serialization.from_bytes(like, serialization.to_bytes(state))


def through_dict(state, like, path):
    copied = jax.tree.map(np.array, state)
    return serialization.from_state_dict(like, serialization.to_state_dict(copied))


def through_pickle(state, like, path):
    arrays = {name: getattr(state, name) for name in ("step", "params", "opt_state")}
    return like.replace(**pickle.loads(pickle.dumps(arrays)))


def through_equinox(state, like, path):
    equinox.tree_serialise_leaves(path / "saved.eqx", state)
    return equinox.tree_deserialise_leaves(path / "saved.eqx", like)


def through_orbax(state, like, path):
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "saved", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "saved", abstract)


SERIALISERS = (
    through_bytes,
    through_dict,
    through_pickle,
    through_equinox,
    through_orbax,
)


def train_state(params, opt_state, tx):
    return TrainState(
        step=jnp.int32(3), apply_fn=None, params=params, tx=tx, opt_state=opt_state
    )


@functools.cache
def chained(recipe):
    momentum = sparsejax.per_worker(optax.trace(0.9))
    return optax.chain(momentum, recipe(), optax.adam(0.1))


@functools.cache
def trained(recipe):
    """A compiled step, the state after two steps, and everything after the third."""
    made = trainer(chained(recipe), NONEMPTY)
    params, state = made.start()
    for t in range(2):
        drawn = gradients(t, params=NONEMPTY)
        params, state, _ = made.advance(params, state, drawn)
    before = jax.tree.map(lambda x: x.copy(), (params, state))
    return made, before, made.advance(params, state, gradients(2, params=NONEMPTY))


def assert_same(mine, theirs):
    assert jax.tree.structure(mine) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(
    ("case", "through"),
    [
        param(BY_NAME[name], through)
        for name in ("exdyna", "marsit", "dgc", "zen")
        for through in SERIALISERS
    ],
)
def test_goes_on_bitwise(case, through, tmp_path):
    made, before, after = trained(case.make)
    tx = chained(case.make)
    # The target comes from `init` alone, as after a restart.
    like = train_state(*made.start(), tx)
    with jax.set_mesh(made.mesh):
        restored = through(train_state(*before, tx), like, tmp_path)
    assert_same(restored, train_state(*before, tx))
    placed = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), restored, like)
    again = made.advance(placed.params, placed.opt_state, gradients(2, params=NONEMPTY))
    assert_same(again, after)
    assert made.step._cache_size() == 1


@pytest.mark.sampled
@pytest.mark.parametrize("through", [through_bytes, through_pickle, through_orbax])
def test_groups_of_sharded_leaves(through, tmp_path):
    """The shardings of the parameters come back too, if the serialiser keeps them."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = {
        "w": jax.device_put(jnp.ones((6, 4)), NamedSharding(mesh, P(None, "model"))),
        "b": jax.device_put(jnp.ones(4), NamedSharding(mesh, P())),
    }
    tx = optax.chain(sparsejax.exdyna(0.1), optax.adam(0.1))
    with jax.set_mesh(mesh):
        like = train_state(params, tx.init(params), tx)
        like = jax.tree.map(
            lambda x: x if x.ndim else jax.device_put(x, NamedSharding(mesh, P())), like
        )
        state = jax.tree.map(lambda x: x + jnp.ones((), x.dtype), like)
        assert_same(through(state, like, tmp_path), state)


def restored_update(tx, state, params=NONEMPTY):
    """Traces one update of `tx` from `state`, on gradients as `params`."""
    return jax.eval_shape(
        jax.shard_map(
            lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s)[0],
            mesh=mesh_of(),
            in_specs=(P("data"), sparsejax.state_specs(state)),
            out_specs=P(),
        ),
        gradients(0, params=params),
        state,
    )


@pytest.mark.parametrize("kind", ["flax", "pickle"])
def test_state_of_another_tree_is_refused(kind):
    tx = sparsejax.exdyna(0.1)
    state = sparsejax.init(tx, NONEMPTY, mesh_of())
    other = NONEMPTY | {"kernel": NONEMPTY["kernel"].T}  # the same size, another shape
    if kind == "flax":
        target = sparsejax.init(tx, other, mesh_of())
        state = serialization.from_bytes(target, serialization.to_bytes(state))
    else:
        state = pickle.loads(pickle.dumps(state))
    with pytest.raises(ValueError, match=r"`\['kernel'\]` of shape \(20, 30\)"):
        restored_update(tx, state, other)
    restored_update(tx, state)


def test_state_of_another_method_is_refused():
    def made(tx):
        return sparsejax.init(tx, NONEMPTY, mesh_of())

    exdyna, deft = sparsejax.exdyna(0.1), sparsejax.deft(0.1)
    saved = serialization.to_bytes(made(sparsejax.random_k(0.1)))
    # The names and shapes are the same.
    restored = serialization.from_bytes(made(deft), saved)
    with pytest.raises(ValueError, match=r"another method, agreed.*disjoint choices"):
        restored_update(deft, restored)
    saved, target = serialization.to_bytes(made(exdyna)), made(sparsejax.micro(0.1))
    with pytest.raises(ValueError, match="sparsifier/partition"):
        serialization.from_bytes(target, saved)
    restored = pickle.loads(pickle.dumps(made(sparsejax.micro(0.1))))
    with pytest.raises(ValueError, match=r"not made by this transformation.*cuts"):
        restored_update(exdyna, restored)


def test_state_of_another_density_is_taken_over():
    first, second = sparsejax.exdyna(0.25), sparsejax.exdyna(0.01)
    saved = serialization.to_bytes(sparsejax.init(first, NONEMPTY, mesh_of()))
    target = sparsejax.init(second, NONEMPTY, mesh_of())
    restored_update(second, serialization.from_bytes(target, saved))
