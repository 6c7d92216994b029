"""The guide's loss scaling: one worker overflows, and all agree on the next scale."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.harness import WORKERS, mesh_of
from tests.pages import ROOT, block

BAD_WORKER = 5


def _skipping(step):
    """Keeps the old parameters and state where a worker overflowed."""

    def skip(*args):
        *new, loss = step(*args)
        overflowed = sparsejax.report(new[1]).dropped.any()
        keep = functools.partial(jnp.where, overflowed)
        return (*jax.tree.map(keep, args[:2], tuple(new[:2])), new[2], loss)

    return skip


def _manual(step, state, check_vma):
    """The same step in a `jax.shard_map`."""

    def local(*args):
        *kept, loss = step(*args)
        return (*kept, jax.lax.pmean(loss, "data"))

    specs = (P(), sparsejax.state_specs(state), P())
    return jax.shard_map(
        local,
        in_specs=(*specs, P("data")),
        out_specs=(*specs, P()),
        check_vma=check_vma,
    )


@pytest.fixture(scope="module")
def guide():
    """Names of the guide's block, and a scale at which only the bad batch overflows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2 * WORKERS, 1000)).astype(np.float32) / 32
    y = x.sum(axis=1)
    bad = np.repeat(np.arange(WORKERS), 2)[:, None] == BAD_WORKER
    code = block(ROOT / "docs" / "guides" / "flax.md", "DynamicScale")
    with jax.set_mesh(mesh_of()):
        names = {"jax": jax, "jnp": jnp, "optax": optax, "sparsejax": sparsejax}
        names["tx"] = optax.chain(sparsejax.topk(0.01), optax.sgd(0.1))
        names["batch"] = jax.device_put((x, y), P("data"))
        exec(code, names)
        names["spoilt"] = jax.device_put((np.where(bad, 1e6, x), y), P("data"))
        scale = names["dynamic_scale"].replace(scale=jnp.float32(256), fin_steps=1)
        names["start"] = (names["half_params"], names["half_state"], scale)
        yield names


@pytest.mark.parametrize(
    "view",
    [
        "jit",
        "typed",
        pytest.param("untyped", marks=pytest.mark.second_tier),
        "skipping",
    ],
)
def test_one_worker_overflows(guide, view):
    start, step = guide["start"], guide["half_step"]
    step = _skipping(step) if view == "skipping" else step
    if view != "jit":
        step = _manual(step, start[1], check_vma=view != "untyped")
    params, state, scale, _ = jax.jit(step)(*start, guide["spoilt"])
    sparsejax.check_replicas((params, state, scale), mesh_of())
    assert (int(scale.fin_steps), float(scale.scale)) == (0, 128)
    if view == "skipping":
        for old, new in zip(start[:2], (params, state), strict=True):
            jax.tree.map(np.testing.assert_array_equal, old, new)
        return
    wanted = np.arange(WORKERS) == BAD_WORKER
    np.testing.assert_array_equal(sparsejax.report(state).dropped, wanted)
    _, plain, _, _ = jax.jit(guide["half_step"])(*start, guide["spoilt"])
    rows, same = (np.asarray(s[0].memory.per_worker) for s in (state, plain))
    assert np.isfinite(rows).all()
    assert np.isfinite(params["w"]).all()
    np.testing.assert_allclose(rows, same, atol=1e-6)
    assert (params["w"] != start[0]["w"]).any()  # the others' gradients arrive
