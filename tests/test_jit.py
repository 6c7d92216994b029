"""The same transformations under plain `jax.jit`, where no axis is bound."""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.cases import RECIPES, param
from tests.harness import mesh_of

PARAMS = {"w": (6, 8), "v": (8, 4), "b": (8,)}
REPLICATED = {name: P() for name in PARAMS}
SHARDED = {"w": P(None, "model"), "v": P("model", None), "b": P()}


class Setting(NamedTuple):
    """A mesh, the axis of its workers, and how parameters are sharded over it."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    axis_name: object
    specs: dict
    kind: AxisType

    def mesh(self):
        return jax.make_mesh(
            self.shape, self.axes, axis_types=(self.kind,) * len(self.axes)
        )


def _setting(layout, kind):
    shape, axes, axis_name, specs = {
        "one": ((8,), ("data",), "data", REPLICATED),
        "tuple": ((2, 4), ("host", "local"), ("host", "local"), REPLICATED),
        "sharded": ((4, 2), ("data", "model"), "data", SHARDED),
    }[layout]
    return Setting(shape, axes, axis_name, specs, kind)


def draw(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def batches(step):
    return draw({"x": (16, 6), "y": (16, 4)}, seed=100 + step)


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def explicit_loss_fn(params, batch):
    """The same where types say how products are sharded."""
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    out = jnp.matmul(hidden, params["v"], out_sharding=P())
    return jnp.mean((out - batch["y"]) ** 2)


class Loop(NamedTuple):
    """A jitted step, and the parameters, state and batches that go in."""

    step: object
    params: object
    state: object
    place: object


def jit_loop(tx, setting, mesh):
    loss = loss_fn
    if setting.specs is SHARDED and setting.kind == AxisType.Explicit:
        loss = explicit_loss_fn

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        value, grads = sparsejax.value_and_grad(loss, axis_name=setting.axis_name)(
            params, batch
        )
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    def place(tree, specs):
        return jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
        )

    params = place(draw(PARAMS), setting.specs)
    spec = P(setting.axis_name)
    return Loop(step, params, tx.init(params), lambda b: place(b, {k: spec for k in b}))


def train(loop, steps):
    params, state = loop.params, loop.state
    for t in range(steps):
        params, state, loss = loop.step(params, state, loop.place(batches(t)))
        jax.block_until_ready(params)
    return params, state, float(loss)


def manual(tx, setting, mesh, steps):
    """The same steps as a `jax.shard_map` over all axes, sharded or not."""
    axis = setting.axis_name
    shards = setting.specs is SHARDED
    loop = jit_loop(tx, setting, mesh)
    states = sparsejax.state_specs(loop.state, axis)

    def local_loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["w"] + params["b_shard"][None])
        out = hidden @ params["v"]
        out = jax.lax.psum(out, "model") if shards else out
        return jnp.mean((out - batch["y"]) ** 2)

    def step(params, state, batch):
        def loss(params, batch):
            bias = params["b"]
            if shards:  # this shard's part of a bias that all of them hold
                size = bias.shape[0] // 2
                start = jax.lax.axis_index("model") * size
                bias = jax.lax.dynamic_slice(bias, (start,), (size,))
            return local_loss({**params, "b_shard": bias}, batch)

        grads = jax.grad(loss)(sparsejax.localize(params, axis_name=axis), batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(setting.specs, states, P(axis)),
            out_specs=(setting.specs, states),
        )
    )
    params, state = loop.params, loop.state
    for t in range(steps):
        params, state = mapped(params, state, loop.place(batches(t)))
        jax.block_until_ready(params)
    return params, state


def assert_copies_equal(tree):
    for leaf in jax.tree.leaves(tree):
        first = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            assert first.setdefault(str(shard.index), data) == data


def cases():
    for case in RECIPES:
        for layout in ("one", "tuple", "sharded"):
            for kind in (AxisType.Auto, AxisType.Explicit):
                yield param(case, layout, kind)


@pytest.mark.parametrize(("case", "layout", "kind"), list(cases()))
def test_equals_the_shard_map_loop(case, layout, kind):
    setting = _setting(layout, kind)
    mesh = setting.mesh()
    if setting.axis_name != "data":
        tx = case.make(axis_name=setting.axis_name)
    else:
        tx = case.make()
    tx = optax.chain(tx, optax.sgd(0.1))
    with jax.set_mesh(mesh):
        if kind == AxisType.Explicit and layout == "sharded" and OLD:
            with pytest.raises(ValueError, match="jax 0.11"):
                train(jit_loop(tx, setting, mesh), 1)
            return
        params, state, _ = train(jit_loop(tx, setting, mesh), 20)
        expected, _ = manual(tx, setting, mesh, 20)
    chex.assert_trees_all_close(
        jax.device_get(params), jax.device_get(expected), atol=1e-6, rtol=0
    )
    assert_copies_equal((params, state))


OLD = jax.__version_info__ < (0, 11)
