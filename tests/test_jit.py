"""The same transformations under plain `jax.jit`, where no axis is bound."""

from __future__ import annotations

import functools

import chex
import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import sparsejax
from tests.cases import RECIPES, param
from tests.jit_training import (
    AUTO,
    EXPLICIT,
    LAYOUTS,
    OLD,
    assert_copies_equal,
    draw,
    jit_loop,
    manual_loop,
    program,
    setting,
)

ROWS = {case.name: case for case in RECIPES}


def chain(name, at):
    return optax.chain(ROWS[name].make(axis_name=at.axis_name), optax.sgd(0.1))


@functools.cache
def shard_map_program(name, layout):
    """The program of a device in the update of a `jax.shard_map` loop."""
    at = setting(layout)
    tx = ROWS[name].make(axis_name=at.axis_name)
    state = sparsejax.init(tx, at.params(), at.mesh)
    specs = sparsejax.state_specs(state, at.axis_name)
    rows = {k: P(at.axis_name, *spec) for k, spec in at.specs.items()}

    def update(rows, state):
        return tx.update(jax.tree.map(lambda row: row[0], rows), state)

    mapped = jax.shard_map(
        update, mesh=at.mesh, in_specs=(rows, specs), out_specs=(at.specs, specs)
    )
    return program(mapped, {k: row.per_worker for k, row in at.rows().items()}, state)


SETTINGS = [(layout, kind) for layout in LAYOUTS for kind in (AUTO, EXPLICIT)]


# One kind of axis for each layout without shards, since both are bound alike.
TRACED = (("one", AUTO), ("tuple", EXPLICIT), ("sharded", AUTO), ("sharded", EXPLICIT))


def _traced(case, layout, kind):
    at = (layout, kind)
    first = at in TRACED if case.name == "exdyna" else at == ("sharded", AUTO)
    marks = () if first else (pytest.mark.second_tier,)
    return param(case, layout, kind, marks=marks)


@pytest.mark.parametrize(
    ("case", "layout", "kind"),
    [_traced(case, *at) for case in RECIPES for at in SETTINGS],
)
def test_computes_the_program_of_the_shard_map_loop(case, layout, kind):
    # The same text compiles to the same code, and so to the same bits.
    at = setting(layout, kind)
    tx = case.make(axis_name=at.axis_name)
    with jax.set_mesh(at.mesh):
        text = program(tx.update, at.rows(), tx.init(at.params()))
    assert text == shard_map_program(case.name, layout)


@functools.cache
def trained_by_shard_map(name, layout):
    at = setting(layout)
    return jax.device_get(manual_loop(chain(name, at), at).train(20)[0])


# Equal programs give equal numbers, so that a few settings are trained for exdyna, and
# one for each other recipe. Exdyna in shards on automatic axes is trained by
# `test_leaves_that_shards_share_stay_equal`.
TRAINED = [("exdyna", "sharded", EXPLICIT), ("marsit", "tuple", AUTO)]
TRAINED_LATER = [
    ("exdyna", "one", AUTO),
    ("exdyna", "one", EXPLICIT),
    ("exdyna", "tuple", EXPLICIT),
    *((name, *SETTINGS[i % len(SETTINGS)]) for i, name in enumerate(ROWS)),
]


def rows(names, first, second):
    marked = [
        pytest.param(*row, marks=pytest.mark.second_tier)
        for row in dict.fromkeys(second)
        if row not in first
    ]
    return pytest.mark.parametrize(names, [*first, *marked])


@rows(("name", "layout", "kind"), TRAINED, TRAINED_LATER)
def test_trains_as_the_shard_map_loop(name, layout, kind):
    at = setting(layout, kind)
    loop = jit_loop(chain(name, at), at)
    if OLD and kind == EXPLICIT and layout == "sharded":
        with pytest.raises(ValueError, match=r"need jax 0\.11"):
            loop.train(1)
        return
    params, state = loop.train(20)
    # "tuple" has the workers of "one", in the same order; marsit's ring is a torus.
    same = "one" if layout == "tuple" and name != "marsit" else layout
    expected = trained_by_shard_map(name, same)
    chex.assert_trees_all_close(jax.device_get(params), expected, atol=1e-6, rtol=0)
    assert_copies_equal((params, state))


@rows(("name",), [("exdyna",), ("marsit",)], [(name,) for name in ROWS])
def test_leaves_that_shards_share_stay_equal(name, every):
    at = setting("sharded")
    loop = jit_loop(chain(name, at), at)
    params, state = loop.train(20)
    if name == "exdyna":
        expected = trained_by_shard_map(name, "sharded")
        chex.assert_trees_all_close(jax.device_get(params), expected, atol=1e-6, rtol=0)
    params, state = loop.train(180 if every else 20, (20, params, state))
    assert_copies_equal((params, state))
    sparsejax.check_replicas((params, state), at.mesh)
    assert abs(params["b"] - draw({"b": (8,)})["b"]).max() > 0
