"""The language model: Zen trains like dense, with the bytes of the formula."""

from __future__ import annotations

import json
import math
import re

import jax
import numpy as np
import pytest

import sparsejax
from sparsejax.examples import _cluster, _training, text

pytestmark = pytest.mark.newer_waits

STEPS, FIRST_STEPS = 8, 6


@pytest.fixture(scope="module")
def runs(every):
    """Losses and parameters after a few steps, by recipe."""
    steps = STEPS if every else FIRST_STEPS
    mesh = _cluster.make_mesh(8)
    task = text.make_task()
    found = {}
    for name in ("dense", "zen"):
        trainer = _training.Trainer(
            task, text.RECIPES[name].build(0.01), mesh, steps=steps
        )
        found[name] = trainer.run(0, lambda metrics: None)
    return found


def test_zen_trains_as_dense_does(runs, every):
    dense, zen = runs["dense"], runs["zen"]
    assert zen.overflow == 0
    assert len(zen.loss) == (STEPS if every else FIRST_STEPS)
    # Equal up to float32 rounding of sums of eight gradients, over a few steps.
    np.testing.assert_allclose(zen.loss, dense.loss, rtol=2e-6)
    assert zen.loss[-1] < zen.loss[0] - 0.1
    assert zen.accuracy == pytest.approx(dense.accuracy, abs=1e-3)


def test_bytes_are_those_of_the_formula(tmp_path, capsys):
    file = tmp_path / "rows.json"
    text.main(
        ["--recipe", "zen+exdyna", "--steps", "2", "--quiet", "--json", str(file)]
    )
    (row,) = json.loads(file.read_text())["rows"]
    task = text.make_task()
    words, width = task.init(0)["embedding"].shape
    w = 8
    slots = math.ceil(text._MAX_DENSITY * words)
    log = w * math.log(w)
    push = math.ceil((1 + math.sqrt(9 * log / slots)) * slots / w)
    density = slots / words
    total = math.ceil(slots * (1 - (1 - density) ** w) / density)
    pull = math.ceil((1 + math.sqrt(6 * log / total)) * total / w)
    bitmap = 4 * math.ceil(math.ceil(words / w) / 32)
    facts = 24
    zen = (w - 1) * (push * (2 + 4 * width) + facts + bitmap + pull * 4 * width)
    rest = sum(x.size for x in jax.tree.leaves(task.init(0))) - words * width
    # ExDyna: 1 % of the rest in 8-byte pairs, and some facts.
    exdyna = 2 * (w - 1) / w * 0.01 * rest * (4 + 1)
    assert zen < row["bytes_per_step"] < zen + 1.3 * exdyna
    assert row["bytes_per_step"] < 0.1 * row["dense_bytes_per_step"]
    assert row["density_target"] is None
    assert row["density_worst_error"] is None
    lines = capsys.readouterr().out.splitlines()
    # The text, and so the vocabulary, differs between versions of Python.
    assert re.match(r"text: 7\d\d,\d{3} parameters, 8 workers", lines[0])
    assert lines[-1].split()[0] == "zen+exdyna"
    assert " - " in lines[-1]


@pytest.mark.second_tier
def test_rounds_of_local_steps(tmp_path, capsys):
    file = tmp_path / "rows.json"
    options = "--recipe sparseloco --density 0.5 --local-steps 4 --steps 8 --quiet"
    text.main([*options.split(), "--json", str(file)])
    assert f"{STEPS} steps, in rounds of 4, " in capsys.readouterr().out
    (row,) = json.loads(file.read_text())["rows"]
    params = text.make_task().init(0)
    recipe = text.RECIPES["sparseloco"].build(0.5)
    once = sparsejax.wire_bytes(recipe, params, workers=8).total
    assert row["bytes_per_step"] == int(once / 4)
    assert 0.1 < row["density_mean"] <= 0.5  # rows of words in no batch are zeros
    assert row["test_accuracy"] > 0.01  # from nearly 0


def test_the_embedding_is_most_of_the_model_and_sparse():
    task = text.make_task()
    params = task.init(0)
    size = sum(x.size for x in jax.tree.leaves(params))
    assert params["embedding"].size > 0.6 * size
    contexts, following = next(task.batches(0, 128))
    assert contexts.shape == (128, 4)
    assert following.max() < len(params["embedding"])
    for part in np.split(contexts, 8):
        assert len(np.unique(part)) <= text._MAX_DENSITY * len(params["embedding"])
