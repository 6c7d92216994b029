"""Frozen parameters keep their values, and cost no bytes and no residual."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.jit_training import SHARDED, Setting, draw, jit_loop, manual_loop, setting

# A low-rank adapter of a frozen matrix.
SHAPES = {"base": (6, 4), "lora_a": (6, 2), "lora_b": (2, 4)}
SPECS = {"base": P(None, "model"), "lora_a": P(), "lora_b": P(None, "model")}
FROZEN = {name: name == "base" for name in SHAPES}
TRAINED = {name: not frozen for name, frozen in FROZEN.items()}
RECIPE = sparsejax.topk(0.5)
TX = optax.chain(RECIPE, optax.sgd(0.1))


def labels(params):
    return {name: "frozen" if FROZEN[name] else "trained" for name in params}


def partition(frozen):
    return optax.partition({"trained": TX, "frozen": frozen}, labels)


# Zeros made from the parameter have its type: equal on all workers.
ZEROS = optax.stateless_with_tree_map(lambda _, p: jnp.zeros_like(p))
HOW = {
    "partition": partition(optax.set_to_zero()),
    "zeros": partition(ZEROS),
    "selective": optax.selective_transform(TX, freeze_mask=FROZEN),
    "freeze": optax.chain(optax.masked(TX, TRAINED), optax.freeze(FROZEN)),
}


class Adapter(Setting):
    """The model, replicated or in shards."""

    def params(self):
        return self.place(draw(SHAPES), self.specs)


def loss_fn(params, batch):
    weight = params["base"] + params["lora_a"] @ params["lora_b"]
    return jnp.mean((batch["x"] @ weight - batch["y"]) ** 2)


def loop(how, layout, view):
    at = setting(layout)
    specs = SPECS if at.specs is SHARDED else dict.fromkeys(SHAPES, P())
    at = Adapter(at.mesh, at.axis_name, specs, explicit=False)
    if view == "jit":
        return jit_loop(HOW[how], at, loss_fn)
    # Zeros made from a gradient have its type: this worker's own.
    return manual_loop(HOW[how], at, loss_fn, check_vma=how == "zeros")


def memories(state):
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return sum(x.size for path, x in leaves if ".memory" in jax.tree_util.keystr(path))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("how", "layout", "view"),
    [(how, "one", view) for how in HOW for view in ("jit", "shard_map")]
    + [("partition", "sharded", "jit")],
)
def test_they_cost_nothing(how, layout, view):
    """The trace of a step shows this."""
    made = loop(how, layout, view)
    at, params = made.setting, made.params
    workers = at.mesh.shape["data"]
    with jax.set_mesh(at.mesh):
        after, state = jax.eval_shape(made.step, params, made.state, at.batch(0))
    assert {k: x.shape for k, x in after.items()} == SHAPES
    assert memories(state) == workers * (12 + 8)
    adapter = {name: x for name, x in params.items() if TRAINED[name]}
    found, expected = (
        sparsejax.wire_bytes(tx, tree, workers=workers)
        for tx, tree in ((HOW[how], params), (RECIPE, adapter))
    )
    assert found == expected
    assert found.total > 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("how", "layout", "view"),
    [
        ("selective", "sharded", "jit"),
        ("freeze", "one", "shard_map"),
        ("zeros", "one", "shard_map"),
    ],
)
def test_they_keep_their_values(how, layout, view):
    made = loop(how, layout, view)
    before, after = jax.device_get((made.params, made.train(2)[0]))
    for name, frozen in FROZEN.items():
        assert (before[name] == after[name]).all() == frozen


def test_zeros_of_gradients_where_types_are_checked():
    """The guides name this error of jax."""
    at = loop("zeros", "one", "shard_map").setting
    made = manual_loop(HOW["partition"], at, loss_fn)
    with pytest.raises(ValueError, match="could not infer replication"):
        jax.eval_shape(made.step, made.params, made.state, at.batch(0))
