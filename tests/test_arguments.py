"""Errors for arguments of a wrong type or out of range name the expected values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import sparsejax
from sparsejax import exchanges, memories, partitions, sparsifiers, thresholds
from tests.harness import PARAMS, mesh_of

recipes = pytest.mark.parametrize("recipe", [sparsejax.exdyna, sparsejax.micro])


@recipes
@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.5, float("nan"), float("inf")])
def test_density_out_of_range(recipe, density):
    with pytest.raises(ValueError, match=r"density: got .*number in \(0, 1\]"):
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


def test_an_axis_twice():
    with pytest.raises(ValueError, match=r"axis_name: got .*each mesh axis once"):
        sparsejax.micro(0.1, axis_name=("a", "b", "a"))


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
    density = "max_density" if recipe is sparsejax.hard_threshold else "density"
    fixed = {density: 0.1} | arguments
    tx = optax.inject_hyperparams(recipe, static_args=(density,))(**fixed)
    with jax.set_mesh(mesh_of()), pytest.raises(TypeError, match=rf'args=\("{name}"'):
        tx.init(PARAMS)


_even = functools.partial(
    sparsifiers.exclusive, partition=partitions.even(), threshold=thresholds.quota()
)
_SPARSIFIERS = {
    "exclusive": _even,
    "fitted": sparsifiers.fitted,
    "layerwise": sparsifiers.layerwise,
    "random_k": sparsifiers.random_k,
    "sampled": sparsifiers.sampled,
    "topk": sparsifiers.topk,
}


@pytest.mark.parametrize("name", _SPARSIFIERS)
def test_sparsifiers_check_as_recipes_do(name):
    make = _SPARSIFIERS[name]
    make(0.1)
    with pytest.raises(ValueError, match=r"density: got 2\.0, .*number in \(0, 1\]"):
        make(2.0)
    with pytest.raises(TypeError, match=r"density: got '1%', .*number in \(0, 1\]"):
        make("1%")
    with pytest.raises(TypeError, match="static_args"):
        make(jnp.float32(0.1))
    if name != "random_k":
        with pytest.raises(ValueError, match=r"capacity: got 0, .*slot"):
            make(0.1, capacity=0)
    if name != "sampled":
        with pytest.raises(ValueError, match="max_density: density is a schedule"):
            make(lambda step: 0.1)
        with pytest.raises(ValueError, match=r"max_density: got 0\.2 with the fixed"):
            make(0.1, max_density=0.2)
    else:
        with pytest.raises(TypeError, match="Only `exdyna`"):
            make(lambda step: 0.1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: _even(0.1, partition="even"), TypeError, r"partition: got .*even\(\)"),
        (lambda: _even(0.1, partition=partitions.even), TypeError, "parentheses"),
        (lambda: _even(0.1, threshold=None), TypeError, "threshold: got None"),
        (lambda: _even(0.1, threshold=thresholds.quota), TypeError, "parentheses"),
        (lambda: sparsifiers.fitted(0.1, fit="x"), ValueError, "fit: got 'x'"),
        (lambda: sparsifiers.fitted(0.1, stages=0), ValueError, "stages: got 0"),
        (lambda: sparsifiers.fitted(0.1, granularity=""), ValueError, "granularity: g"),
        (lambda: sparsifiers.hard_threshold(-1), ValueError, "threshold: got -1"),
        (
            lambda: sparsifiers.hard_threshold(1, max_density=0),
            ValueError,
            "max_density",
        ),
        (
            lambda: sparsifiers.hard_threshold(1, capacity=0),
            ValueError,
            "capacity: got",
        ),
        (lambda: sparsifiers.random_k(0.1, seed=-1), ValueError, "seed: got -1"),
        (lambda: sparsejax.exdyna(0.1, beta=0.0), ValueError, "beta: got 0"),
        (lambda: sparsejax.chunked_topk(chunk=0), ValueError, "chunk: got 0"),
        (lambda: sparsejax.chunked_topk(2.0), ValueError, "density: got 2"),
        (lambda: sparsifiers.chunked_topk(8, 0), ValueError, "k: got 0"),
        (lambda: sparsifiers.chunked_topk(8, 9), ValueError, "k: got 9.*Raise chunk"),
        (lambda: memories.decayed(0), ValueError, r"beta: got 0.*\(0, 1\]"),
        (lambda: memories.decayed("1"), TypeError, r"beta: got '1'.*\(0, 1\]"),
        (lambda: memories.momentum_correction(1), ValueError, "momentum: got 1"),
        (lambda: memories.momentum_correction("1"), TypeError, "momentum: got '1'"),
    ],
)
def test_parts_check_their_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_schedules_are_for_some_recipes():
    with pytest.raises(TypeError, match="Only `exdyna`"):
        sparsejax.chunked_topk(optax.linear_schedule(0.1, 0.01, 5))


@pytest.mark.parametrize("workers", [0, -1, 2.5, None, (2, 2)])
def test_simulate_needs_workers(workers):
    error = ValueError if workers in (0, -1) else TypeError
    with pytest.raises(error, match=r"workers: got .*expected an int of at least 1"):
        sparsejax.simulate(sparsejax.dense(), workers=workers)


@pytest.mark.parametrize("name", [None, ("host", "local")])
def test_simulated_workers_have_one_axis(name):
    with pytest.raises(TypeError, match=r"axis_name: got .*a single name"):
        sparsejax.simulate(sparsejax.dense(), workers=2, axis_name=name)


def test_simulated_axis_is_the_transformations():
    tx = sparsejax.simulate(sparsejax.dense(axis_name="host"), workers=2)
    with pytest.raises(NameError, match=r"got 'data'.*axis_name='host'` to `simulate`"):
        tx.init(PARAMS)


STRUCT = jax.ShapeDtypeStruct((2, 3), jnp.float32)
compiled = functools.partial(sparsejax.compiled_wire_bytes, "")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: sparsejax.marsit(seed="a"), TypeError, "seed: got 'a', expected"),
        (lambda: sparsejax.random_k(seed=1.5), TypeError, "seed: got 1.5, expected"),
        (lambda: sparsejax.random_k(seed=-1), ValueError, "seed: got -1, expected"),
        (lambda: sparsejax.dgc(clip_norm=0), ValueError, "clip_norm: got 0, .*positiv"),
        (lambda: sparsejax.dgc(clip_norm="1"), TypeError, "clip_norm: got '1'"),
        (lambda: sparsejax.small_leaves(PARAMS), TypeError, r"small_leaves\(\)\(par"),
        (lambda: sparsejax.small_leaves(-1), ValueError, "min_size: got -1"),
        (lambda: sparsejax.characteristics("x"), TypeError, "gradients: got 'x' at"),
        (lambda: sparsejax.characteristics([STRUCT]), TypeError, r"at `\[0\]`, expec"),
        (lambda: compiled(devices="8"), TypeError, "devices: got '8', expected an int"),
        (lambda: compiled(devices=jnp.int32(8)), TypeError, r"`devices\.item\(\)`\.$"),
    ],
)
def test_other_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_injected_seeds():
    """`inject_hyperparams` turns seeds into arrays, which work too."""
    tx = optax.inject_hyperparams(sparsejax.random_k, static_args=("density",))(0.1)
    with jax.set_mesh(mesh_of()):
        assert tx.init(PARAMS).hyperparams["seed"] == 0


DENSIFYING = pytest.mark.parametrize(
    "take", [sparsejax.zen, exchanges.hashed_owners, exchanges.recursive_doubling]
)


@DENSIFYING
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("2", TypeError),
        (True, TypeError),
        (jnp.float32(2), TypeError),
        (0.9, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
    ],
)
def test_densification(take, value, error):
    with pytest.raises(error, match=r"densification: got .*from 1 .*number of workers"):
        take(densification=value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n": 1000.0}, TypeError, r"n: got 1000\.0, expected an int"),
        ({"n": -5}, ValueError, "n: got -5, expected an int of at least 1"),
        ({"row_size": 2.5}, TypeError, "row_size: got 2.5"),
        ({"row_size": 3}, ValueError, "n: got 1000, expected a multiple of row_size"),
        ({"workers": 0}, ValueError, "workers: got 0"),
        ({"densification": 9.0}, ValueError, "densification: got 9.0.* here 4"),
        ({"density": jnp.float32(0.1)}, TypeError, r"numpy.*`density\.item\(\)`\.$"),
        ({"workers": jnp.int32(4)}, TypeError, r"numpy.*`workers\.item\(\)`\.$"),
    ],
)
def test_best_exchange(change, error, message):
    arguments = {"density": 0.1, "densification": None, "workers": 4, "n": 1000}
    with pytest.raises(error, match=message):
        sparsejax.best_exchange(**arguments | change)


@pytest.mark.parametrize(
    "recipe",
    [
        sparsejax.topk,
        sparsejax.chunked_topk,
        sparsejax.dgc,
        sparsejax.sidco,
        functools.partial(sparsejax.hard_threshold, 0.1),
    ],
)
@pytest.mark.parametrize("exchange", ["union", exchanges.union])
def test_exchange_is_no_name(recipe, exchange):
    with pytest.raises(
        TypeError, match=r"exchange: got .*sparsejax\.exchanges\.union\(\)"
    ):
        recipe(exchange=exchange)


def test_init_takes_its_arguments_in_order():
    tx, mesh = sparsejax.micro(0.1), mesh_of()
    for wrong in [(tx, mesh, PARAMS), (PARAMS, tx, mesh), (mesh, PARAMS, tx)]:
        with pytest.raises(TypeError, match=r"init: got a .*init\(tx, params, mesh\)"):
            sparsejax.init(*wrong)


def test_state_specs_of_a_transformation():
    with pytest.raises(TypeError, match=r"state_specs: got a transformation.*init\("):
        sparsejax.state_specs(sparsejax.micro(0.1))


PARTS = {
    "sparsifier": sparsifiers.topk(0.1),
    "exchange": exchanges.union(),
    "memory": memories.error_feedback(),
}


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_were_not_made(part):
    functions = {
        "sparsifier": sparsifiers.topk,
        "exchange": exchanges.union,
        "memory": memories.error_feedback,
    }
    sparsejax.sparsify(**PARTS)
    for wrong in (functions[part], part, None):
        with pytest.raises(TypeError, match=f"{part}: got .*parentheses included"):
            sparsejax.sparsify(**{**PARTS, part: wrong})


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("Exchange.accepts", "overlapping", TypeError, r"frozenset\({'overlapping'}\)"),
        ("Exchange.accepts", ["agreed"], TypeError, "expected a frozenset of names"),
        ("Exchange.accepts", {"all"}, ValueError, "'all', expected one of .*'every"),
        ("Exchange.tells", ["histogram"], TypeError, r"frozenset\({'histogram'}\)"),
        ("Exchange.tells", {1}, TypeError, "expected a frozenset of names"),
        ("Sparsifier.reads", "histogram", TypeError, r"frozenset\({'histogram'}\)"),
        ("Sparsifier.reads", None, TypeError, "expected a frozenset of names"),
        ("Sparsifier.support", "all", ValueError, "'all', expected one of .*'every"),
        ("Sparsifier.support", {"agreed"}, ValueError, "expected one of"),
    ],
)
def test_names_in_parts(field, value, error, message):
    part, name = field.lower().split(".")
    parts = PARTS | {part: PARTS[part]._replace(**{name: value})}
    with pytest.raises(error, match=rf"^{field}: got .*{message}"):
        sparsejax.sparsify(**parts)
