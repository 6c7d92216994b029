"""The rules of memories, choices and reports: `sparsejax.testing` names broken ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import memories, testing
from sparsejax.parts import Memory
from sparsejax.testing._reports import require_true_reports
from tests.cases import RECIPES, parametrize
from tests.wrong_parts import dense, fails, memory_with, method, settled


@parametrize(RECIPES)
def test_recipes_keep_the_rules_of_parts(case):
    testing.check_memory(case.make(), workers=3)
    testing.check_choices(case.make(), workers=3)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"sent": jnp.int32(5)}, r"`report\.sent` counts .*: it is 5, and n is 4"),
        ({"sent": jnp.int32(-1)}, r"`report\.sent` counts .*: it is -1, and n is 4"),
        ({"density": jnp.float32(0.5)}, "density` is `sent / n`: it is 0.5, sent is 0"),
        ({"demand": jnp.array([3, -1])}, r"demand` counts coordinates: .* \[3, -1\]"),
        ({"threshold": jnp.array([0, jnp.nan])}, r"is a number: it is \[0\.0, nan\]"),
    ],
)
def test_reports_that_cannot_be_true_are_named(lie, message):
    state = sparsejax.simulate(dense(), workers=2).init(jnp.zeros(4))
    require_true_reports(state)
    lying = state._replace(report=state.report._replace(**lie))
    with pytest.raises(AssertionError, match=message):
        require_true_reports(lying)


def test_every_run_reads_its_reports():
    def more(delivery):
        report = delivery.report
        return delivery._replace(report=report._replace(sent=report.sent + 1))

    tx, given = dense(deliver=more), {"params": np.zeros(3, np.float32)}
    for check, options in (
        (testing.check_conservation, given),
        (testing.check_zero_gradients, given),
        (testing.check_nonfinite, given),
        (testing.check_tiny_tree, {}),
    ):
        fails(check, tx, r"`report\.sent` counts distinct coordinates", **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"init": lambda n: jnp.zeros((2, n), jnp.float32)},
            r"residual is float32\[n\]: `\(root\)` is float32\[2, 621\], and n is 621",
        ),
        (
            {"init": lambda n: {"a": jnp.zeros(n, jnp.float32), "b": jnp.float32(0)}},
            r"residual is float32\[n\]: `\['b'\]` is float32\[\].*step\.index",
        ),
        ({"init": lambda n: jnp.zeros(n, jnp.int32)}, r"`\(root\)` is int32\[621\]"),
        (
            {"settle": lambda v, d, _: jax.lax.pmean(settled(v, d), "data")},
            "no collective: `Memory.settle` raises .*data",
        ),
        (
            {"accumulate": lambda g, kept: (jax.lax.pmean(g, "data") + kept, kept)},
            "no collective: `Memory.accumulate` raises .*data",
        ),
    ],
    ids=["matrix", "scalar", "int", "settle", "accumulate"],
)
def test_memories_against_the_rules_are_named(fields, message):
    fails(testing.check_contract, dense(memory_with(**fields)), message)


def test_conservation_names_a_leaf_of_another_shape():
    """Mass cannot be counted in it."""
    counted = Memory(
        lambda n: (jnp.zeros(n, jnp.float32), jnp.float32(0)),
        lambda grads, kept: (grads + kept[0], kept),
        lambda v, d, kept: (settled(v, d), kept[1] + 1),
    )
    message = r"residual is float32\[n\]: `\[1\]` is float32\[\], and n is 3"
    given = {"params": np.zeros(3, np.float32), "steps": 1}
    fails(testing.check_conservation, dense(counted), message, **given)


def _two_leaves(accumulate, settle):
    def init(n):
        return {"age": jnp.zeros(n, jnp.float32), "error": jnp.zeros(n, jnp.float32)}

    return Memory(init, accumulate, settle)


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (
            _two_leaves(
                lambda g, kept: (g + kept["error"], kept),
                lambda v, d, _: {"age": jnp.zeros_like(v), "error": settled(v, d)},
            ),
            r"first leaf .*, `\['age'\]`.* put `\['error'\]` first",
        ),
        (
            _two_leaves(
                lambda g, kept: (g + kept["age"] + kept["error"], kept),
                lambda v, d, _: dict.fromkeys(("age", "error"), settled(v, d) / 2),
            ),
            r"first leaf .*, `\['age'\]`.* put the sum of the 2 leaves there",
        ),
        (memories.momentum_correction(0.9), r"first leaf .*, `\.unsent`.*or `Delivery"),
    ],
    ids=["second", "halves", "momentum"],
)
def test_mass_outside_of_the_first_leaf_is_named(memory, message):
    given = {"params": np.zeros(6, np.float32), "steps": 3}
    fails(testing.check_conservation, method(memory=memory), message, **given)


def test_a_memory_that_counts_is_named():
    counts = _two_leaves(
        lambda g, kept: (g + kept["age"], kept),
        lambda v, d, kept: {"age": settled(v, d), "error": kept["error"] + 1},
    )
    message = r"zeros in each leaf of the memory, here `\['error'\]`: .*counts steps"
    params = np.zeros(3, np.float32)
    fails(testing.check_zero_gradients, dense(counts), message, params=params)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            lambda: method(support="agreed"),
            "agreed choices are equal on .*overlapp",
        ),
        (
            lambda: method(support="everything"),
            "a choice of everything has no indices: `select` returns 1 indices",
        ),
        (lambda: method(lossless=True), "6 coordinates are not zero, and [12] were"),
    ],
    ids=["agreed", "everything", "lossless"],
)
def test_declarations_that_do_not_hold_are_named(tx, message):
    params = np.zeros(6, np.float32)
    fails(testing.check_contract, tx(), message, params=params)
