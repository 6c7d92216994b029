"""`check_contract` passes methods that keep their promises, and names broken ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax
from sparsejax import exchanges, memories, sparsifiers, testing
from tests.cases import RECIPES, parametrize
from tests.harness import WORKERS, run_simulated
from tests.pages import ROOT, blocks
from tests.wrong_parts import dense, fails, memory_with, method


@parametrize(case for case in RECIPES if case.name in ("dense", "random_k"))
def test_recipes_pass(case):
    testing.check_contract(case.make(), workers=WORKERS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # Everything after the exchange is this worker's own.
        (
            {"deliver": lambda d, vector: d._replace(mean=vector)},
            "equal on all workers: .*without a collective",
        ),
        (
            {"select": lambda c, vector: c._replace(indices=c.indices[:, None])},
            "`init` and `update` trace: got .*another shape",
        ),
        (
            {"deliver": lambda d, vector: d._replace(left=d.left[:-1])},
            "`init` and `update` trace: got .*another shape",
        ),
        (
            {"adapt": lambda state, report, step: state.astype(jnp.float16)},
            r"keeps its types: `\.sparsifier` is float16\[2\] after an update and "
            r"float32\[2\] after `init`; ",
        ),
        (
            {
                "select": lambda c, vector: c._replace(demand=c.demand[None]),
                "adapt": lambda state, report, step: state,
            },
            r"`\.report\.demand` is int32\[2, 1\] after an update",
        ),
        (
            {
                "deliver": lambda d, vector: d._replace(
                    mean=d.mean * jnp.ones(d.mean.shape, jnp.bfloat16)
                )
            },
            "no dtype is promoted implicitly: .*without `astype`",
        ),
    ],
    ids=["replicas", "indices", "left", "dtype", "demand", "promotion"],
)
def test_broken_parts_are_named(change, message):
    """All of these fail in a trace, before anything is compiled."""
    fails(testing.check_contract, method(**change), message)


def test_replicas_that_differ_are_named():
    """The types of `shard_map` miss a branch on a predicate that differs."""

    def branch(delivery, vector):
        mean = delivery.mean
        mean = jax.lax.cond(vector[0] > 0, lambda: mean + 1, lambda: mean)
        return delivery._replace(mean=mean)

    tx = method(deliver=branch)
    message = r"bitwise equal for 3 steps: `\['params'\]\['bias'\]` differs"
    fails(testing.check_replicas_equal, tx, message, steps=3)
    fails(testing.check_contract, tx, "equal on all workers")


def test_lost_mass_is_named():
    def half(delivery, vector):
        return delivery._replace(mean=delivery.mean / 2)

    fails(
        testing.check_conservation,
        method(deliver=half),
        r"mass is conserved: after 20 steps of 2 workers, at coordinate \d+, .*left",
    )


def test_nan_that_spreads_is_named():
    def spread(delivery, vector):
        # A report that no longer shows the dropped worker.
        return delivery._replace(report=delivery.report._replace(dropped=flags))

    flags = jnp.zeros(2, jnp.bool_)
    fails(
        testing.check_nonfinite,
        method(deliver=spread),
        "the report says who was left out: value 1 is 0 instead of 1, and 1 of 2 ",
    )


def test_updates_from_nothing_are_named():
    def one_more(delivery, vector):
        return delivery._replace(mean=delivery.mean + 1)

    fails(
        testing.check_zero_gradients,
        method(deliver=one_more),
        "zero gradients give zeros as updates: value 0 is 1 instead of 0",
    )


@pytest.mark.parametrize(
    ("tx", "error", "message"),
    [
        (lambda: sparsifiers.everything(), TypeError, "Sparsifier`.* Build it first"),
        (lambda: exchanges.dense(), TypeError, "`Exchange`.* Build it first"),
        (lambda: memories.none(), TypeError, "`Memory`.* Build it first"),
        (lambda: sparsejax.dense, TypeError, "tx: got a `function`, expected a tra"),
        (
            lambda: sparsejax.dense(axis_name="host"),
            ValueError,
            "the axis 'host', .*`axis_name=\"data\"`",
        ),
        (
            lambda: sparsejax.dense(nonfinite="propagate"),
            ValueError,
            "got .* `nonfinite='propagate'`.*Make it with `nonfinite=\"drop\"`",
        ),
    ],
)
def test_other_subjects_are_refused(tx, error, message):
    with pytest.raises(error, match=message):
        testing.check_contract(tx())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 1}, "workers: got 1"),
        ({"params": {}}, "params: .*without coordinates.*check_tiny_tree"),
        ({"params": np.zeros((0, 3))}, "params: .*without coordinates"),
    ],
)
def test_no_contract_without(options, message):
    with pytest.raises(ValueError, match=message):
        testing.check_contract(sparsejax.dense(), **options)


def test_an_axis_within_a_chain_is_named():
    """A chain does not show its axis, but the trace does."""
    tx = optax.chain(sparsejax.dense(axis_name="host"), optax.sgd(0.1))
    fails(testing.check_contract, tx, "over the axis 'data': .*`axis_name=\"data\"`")


def test_details_of_another_structure_are_named():
    def bare(delivery, vector):
        return delivery._replace(report=delivery.report._replace(details=()))

    message = r"`\.report\.details\.chosen` is missing after an update and int32\[2\]"
    fails(testing.check_contract, method(deliver=bare), message)


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (
            lambda: dense(init=lambda layout, w: jnp.zeros(3)),
            r"`\.sparsifier` is float64\[3\] after `init` with 64-bit types and fl",
        ),
        (
            lambda: dense(init=lambda layout, w: jnp.arange(3)),
            r"`\.sparsifier` is int64\[3\] after .*give it one, such as",
        ),
        (
            lambda: dense(memory_with(init=jnp.zeros)),
            r"`\.memory\.per_worker` is float64\[2, 621\] after `init`.*give it one",
        ),
        (
            # `lax.add` refuses the float64 zeros.
            lambda: dense(
                memory_with(settle=lambda v, d, _: jax.lax.add(v, jnp.zeros(v.size)))
            ),
            "64-bit types change nothing: `update` does not trace, TypeError: .*give",
        ),
        (
            lambda: dense(
                init=lambda layout, w: jnp.float32(0),
                adapt=lambda state, report, step: jnp.zeros(()),
            ),
            r"`\.sparsifier` is float64\[\] after an update with 64-bit types",
        ),
    ],
    ids=["float64", "int64", "memory", "refused", "update"],
)
def test_64_bits_are_named(tx, message):
    fails(testing.check_wide_types, tx(), message)


@pytest.mark.parametrize("recipe", [sparsejax.topk, sparsejax.exdyna])
def test_late_exchanges_promote_nothing(recipe):
    testing.check_strict_promotion(sparsejax.delayed(recipe(0.1)), workers=2)


def test_the_files_to_copy_run(monkeypatch):
    """Its trace is enough: the notebook runs the whole contract on the same rule."""
    checked = []

    def trace(tx):
        testing.check_replicated(tx)
        checked.append(tx)

    monkeypatch.setattr(testing, "check_contract", trace)
    names = {}
    for text in blocks(ROOT / "docs" / "new_method.md"):
        exec(text, names)
    assert len(checked) == 2
    # The second has a state: a few steps of it steer the density.
    drawn = jax.random.laplace(jax.random.key(0), (2, 2000))
    sizes = {"params": jnp.zeros(2000), "workers": 2, "stream": lambda t: drawn}
    steps = list(run_simulated(checked[1], 60, **sizes))[30:]
    demand = [sparsejax.report(state).demand.mean() for *_, state in steps]
    assert 0.03 < np.mean(demand) / 2000 < 0.1


def test_a_choice_larger_than_a_tiny_tree_is_named():
    def three(choice, vector):
        return choice._replace(indices=jax.lax.top_k(jnp.abs(vector), 3)[1])

    message = "tiny trees .* more than n coordinates"
    fails(testing.check_tiny_tree, method(select=three), message)
