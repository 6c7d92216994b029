"""`check_contract` passes methods that keep their promises, and names broken ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparsejax
from sparsejax import exchanges, memories, sparsifiers, testing
from tests.cases import RECIPES, parametrize
from tests.harness import WORKERS, run_simulated
from tests.pages import ROOT, blocks


@parametrize(case for case in RECIPES if case.name in ("dense", "random_k"))
def test_recipes_pass(case):
    testing.check_contract(case.make(), workers=WORKERS)


def _method(select=None, deliver=None, **fields):
    """Top-k through pairs, with a changed choice, delivery or field."""
    sparsifier, exchange = sparsifiers.chunked_topk(20, 2), exchanges.pairs()
    if "adapt" in fields:  # Chunks have no state, and compile faster.
        sparsifier = sparsifiers.topk(0.1)

    def changed_select(vector, state, step):
        choice, state = sparsifier.select(vector, state, step)
        return select(choice, vector), state

    def changed_apply(vector, choice, state, step):
        delivery, state = exchange.apply(vector, choice, state, step)
        return deliver(delivery, vector), state

    if select:
        fields["select"] = changed_select
    return sparsejax.sparsify(
        sparsifier._replace(**fields),
        exchange=exchange._replace(apply=changed_apply) if deliver else exchange,
        memory=memories.error_feedback(),
    )


def _fails(check, tx, message, **options):
    with pytest.raises(AssertionError, match=message) as caught:
        check(tx, workers=2, **options)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text


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
    _fails(testing.check_contract, _method(**change), message)


def test_replicas_that_differ_are_named():
    """The types of `shard_map` miss a branch on a predicate that differs."""

    def branch(delivery, vector):
        mean = delivery.mean
        mean = jax.lax.cond(vector[0] > 0, lambda: mean + 1, lambda: mean)
        return delivery._replace(mean=mean)

    tx = _method(deliver=branch)
    message = r"bitwise equal for 3 steps: `\['params'\]\['bias'\]` differs"
    _fails(testing.check_replicas_equal, tx, message, steps=3)
    _fails(testing.check_contract, tx, "equal on all workers")


def test_lost_mass_is_named():
    def half(delivery, vector):
        return delivery._replace(mean=delivery.mean / 2)

    _fails(
        testing.check_conservation,
        _method(deliver=half),
        r"mass is conserved: after 20 steps of 2 workers, .* of coordinate \d+, .*left",
    )


def test_nan_that_spreads_is_named():
    def spread(delivery, vector):
        # A report that no longer shows the dropped worker.
        return delivery._replace(report=delivery.report._replace(dropped=flags))

    flags = jnp.zeros(2, jnp.bool_)
    _fails(
        testing.check_nonfinite,
        _method(deliver=spread),
        "the report says who was left out: value 1 is 0 instead of 1, and 1 of 2 ",
    )


def test_updates_from_nothing_are_named():
    def one_more(delivery, vector):
        return delivery._replace(mean=delivery.mean + 1)

    _fails(
        testing.check_zero_gradients,
        _method(deliver=one_more),
        "zero gradients give zeros as updates: value 0 is 1 instead of 0",
    )


def test_one_worker_is_no_contract():
    with pytest.raises(ValueError, match="workers: got 1"):
        testing.check_contract(sparsejax.dense(), workers=1)


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
    _fails(testing.check_tiny_tree, _method(select=three), message)
