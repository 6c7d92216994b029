"""A small model trained under plain `jax.jit`, and in a `jax.shard_map` loop."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import sparsejax

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit

# Before 0.11 jax gathers shards on explicit axes whole, see `sparsejax._xla`.
OLD = jax.__version_info__ < (0, 11)

SHAPES = {"w": (6, 8), "v": (8, 4), "b": (8,)}
REPLICATED = {name: P() for name in SHAPES}
SHARDED = {"w": P(None, "model"), "v": P("model", None), "b": P()}

LAYOUTS = {
    "one": ((8,), ("data",), "data", REPLICATED),
    "tuple": ((2, 4), ("host", "local"), ("host", "local"), REPLICATED),
    "sharded": ((4, 2), ("data", "model"), "data", SHARDED),
}


class Setting(NamedTuple):
    """A mesh, the axis of its workers, and how parameters are sharded over it."""

    mesh: jax.sharding.Mesh
    axis_name: object
    specs: dict
    explicit: bool

    def place(self, tree, specs):
        return jax.tree.map(
            lambda x, spec: jax.device_put(x, NamedSharding(self.mesh, spec)),
            tree,
            specs,
            is_leaf=lambda x: isinstance(x, P),
        )

    def params(self):
        return self.place(draw(SHAPES), self.specs)

    def drawn(self, step):
        return draw({"x": (16, 6), "y": (16, 4)}, seed=100 + step)

    def batch(self, step):
        drawn = self.drawn(step)
        return self.place(drawn, dict.fromkeys(drawn, P(self.axis_name)))

    def rows(self, seed=0):
        """Gradients of all workers, as `sparsejax.rows` gives them."""
        axes = (
            self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        )
        count = int(np.prod([self.mesh.shape[a] for a in axes]))
        drawn = draw({k: (count, *shape) for k, shape in SHAPES.items()}, seed)
        return {
            k: sparsejax.PerWorker(self.place(x, P(axes, *self.specs[k])))
            for k, x in drawn.items()
        }


@functools.cache
def setting(layout, kind=AUTO):
    shape, axes, axis_name, specs = LAYOUTS[layout]
    mesh = jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))
    return Setting(mesh, axis_name, specs, kind == EXPLICIT)


def draw(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def explicit_loss_fn(params, batch):
    """The loss of `loss_fn`, where types must show how products are sharded."""
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"][None])
    out = jnp.matmul(hidden, params["v"], out_sharding=P())
    return jnp.mean((out - batch["y"]) ** 2)


class Loop(NamedTuple):
    """A jitted step, and the parameters and state that it starts from."""

    step: object
    params: object
    state: object
    setting: Setting

    def train(self, steps, start=None):
        """`(params, state)` after some steps, from `start` or the beginning."""
        first, params, state = start or (0, self.params, self.state)
        with jax.set_mesh(self.setting.mesh):
            for t in range(first, first + steps):
                params, state = self.step(params, state, self.setting.batch(t))
                jax.block_until_ready(params)
        return params, state


def jit_loop(tx, at, loss=None, **options):
    """The loop as a user writes it: no `shard_map`, no specs."""
    sharded = any(at.specs.values())
    loss = loss or (explicit_loss_fn if sharded and at.explicit else loss_fn)
    differentiate = sparsejax.value_and_grad(loss, axis_name=at.axis_name, **options)

    @jax.jit
    def step(params, state, batch):
        _, grads = differentiate(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = at.params()
    with jax.set_mesh(at.mesh):
        return Loop(step, params, tx.init(params), at)


def manual_loop(tx, at, loss=None, check_vma=True):
    """The same steps as a `jax.shard_map` over all axes, sharded or not."""
    params = at.params()
    state = sparsejax.init(tx, params, at.mesh)
    shards = any(at.specs.values())

    def loss_of_shards(params, batch):
        bias = params["b"]
        if shards:  # this shard's part of a bias that all of them hold
            start = jax.lax.axis_index("model") * 4
            bias = jax.lax.dynamic_slice(bias, (start,), (4,))
        hidden = jnp.tanh(batch["x"] @ params["w"] + bias[None])
        out = hidden @ params["v"]
        out = jax.lax.psum(out, "model") if shards else out
        return jnp.mean((out - batch["y"]) ** 2)

    def step(params, state, batch):
        local = sparsejax.localize(params, axis_name=at.axis_name)
        grads = jax.grad(loss or loss_of_shards)(local, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    out = (at.specs, sparsejax.state_specs(state, at.axis_name))
    mapped = jax.shard_map(
        step,
        mesh=at.mesh,
        in_specs=(*out, P(at.axis_name)),
        out_specs=out,
        check_vma=check_vma,
    )
    return Loop(jax.jit(mapped), params, state, at)


def program(update, *args):
    """The program of a device in the `shard_map` of `update`, as jax lowers it."""
    text = jax.jit(update).lower(*args).as_text()
    body = re.search(r"sdy\.manual_computation.*sdy\.return[^\n]*", text, re.DOTALL)
    names = {}
    return re.sub(
        r"%\w+", lambda found: names.setdefault(found[0], f"%{len(names)}"), body[0]
    )


def assert_copies_equal(tree):
    for leaf in jax.tree.leaves(tree):
        first = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            assert first.setdefault(str(shard.index), data) == data
