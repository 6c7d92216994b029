"""The contract that every recipe passes: the checks of `sparsejax.testing`."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import testing
from tests.cases import CASES, RECIPES, parametrize
from tests.harness import WORKERS, flat, memory_leaves, run, trainer

every_case = parametrize()
every_recipe = parametrize(RECIPES)

# Each costs a trace, or a run of programs that the other checks have compiled.
CHECKS = (
    testing.check_replicated,
    testing.check_state_types,
    testing.check_strict_promotion,
    functools.partial(testing.check_wide_types, workers=3),
    testing.check_abstract_init,
    testing.check_update_types,
    testing.check_zero_gradients,
    testing.check_devices_equal_simulation,
    testing.check_no_recompilation,
    testing.check_replicas_equal,
    testing.check_wire_bytes,
)


# These run the compiled step of `shard_map`, so they cost little more.
EACH_RECIPE = (
    testing.check_zero_gradients,
    testing.check_no_recompilation,
    testing.check_replicas_equal,
    testing.check_wire_bytes,
)


def _row(check):
    name = getattr(check, "func", check).__name__.removeprefix("check_")
    marks = [pytest.mark.each_recipe] if check in EACH_RECIPE else []
    return pytest.param(check, id=name, marks=marks)


@pytest.mark.parametrize("check", [_row(check) for check in CHECKS])
@every_case
def test_check(case, check):
    check(case.make(), **{"workers": WORKERS, **getattr(check, "keywords", {})})


@every_recipe
@pytest.mark.parametrize("params", [{}, jnp.zeros(())], ids=["none", "scalar"])
def test_tiny_trees(case, params):
    """No leaf, and a scalar: fewer coordinates than workers."""
    testing.check_tiny_tree(case.make(), workers=WORKERS, params=params)


@every_case
def test_one_worker(case):
    testing.check_one_worker(case.make(), conserves=not case.loses)


@every_case
def test_fewer_coordinates_than_workers(case):
    testing.check_few_coordinates(
        case.make(), workers=WORKERS, conserves=not case.loses
    )


@parametrize(case for case in CASES if case.at_density_one)
def test_density_one_is_the_dense_mean(case):
    testing.check_dense_mean(
        case.at_density_one(), workers=WORKERS, rounding=case.rounding
    )


@every_recipe
def test_without_checked_types(case):
    """All other tests run with `check_vma=True`."""
    testing.check_unchecked_types(case.make(), workers=WORKERS)


@pytest.mark.each_recipe
@every_case
def test_memory(case):
    assert bool(memory_leaves(trainer(case.make()).state)) == case.memory


@every_recipe
def test_works_in_chain_with_schedules(case):
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        case.make(),
        optax.scale_by_learning_rate(optax.cosine_decay_schedule(0.1, 10)),
    )
    *_, (_, updates, _) = run(tx, 3)
    assert np.all(np.isfinite(flat(updates)))
    assert flat(updates).any()
    assert sparsejax.reports(trainer(tx).state)
