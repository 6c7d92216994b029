"""The example: one table, and JSON with the same numbers."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re

import jax
import pytest

from sparsejax.examples import _training, digits

KEYS = {
    "recipe",
    "seed",
    "test_accuracy",
    "density_target",
    "density_mean",
    "density_worst_error",
    "bytes_per_step",
    "dense_bytes_per_step",
    "ms_per_step",
}
STEPS = 12

pytestmark = [pytest.mark.xdist_group("digits"), pytest.mark.newer_waits]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Standard output and the rows of a short run."""
    file = tmp_path_factory.mktemp("digits") / "rows.json"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        digits.main(["--steps", str(STEPS), "--seeds", "2", "--json", str(file)])
    return printed.getvalue(), json.loads(file.read_text())


def test_json_has_one_row_per_recipe_and_seed(result):
    _, data = result
    assert list(data) == ["rows"]
    assert [(row["recipe"], row["seed"]) for row in data["rows"]] == [
        (recipe, seed) for recipe in ("dense", "exdyna", "micro") for seed in (0, 1)
    ]
    for row in data["rows"]:
        assert set(row) == KEYS
        assert 0.2 < row["test_accuracy"] <= 1
        assert row["ms_per_step"] > 0


def test_density_is_met(result):
    _, data = result
    for row in data["rows"]:
        if row["recipe"] == "dense":
            assert row["density_target"] == row["density_mean"] == 1
            assert row["density_worst_error"] == 0
        else:
            assert row["density_target"] == 0.01
            assert row["density_mean"] == pytest.approx(0.01, rel=0.05)
            assert 0 <= row["density_worst_error"] < 0.05


def test_sparse_messages_are_small(result):
    _, data = result
    # An all-reduce among 8 receives 2 x 7/8 of 38,282 float32 coordinates, plus the
    # few facts of the report.
    everything = 2 * 7 / 8 * 4 * 38282
    for row in data["rows"]:
        assert math.isclose(row["dense_bytes_per_step"], everything, rel_tol=0.001)
        if row["recipe"] == "dense":
            assert row["bytes_per_step"] == row["dense_bytes_per_step"]
        else:
            assert row["bytes_per_step"] < 0.013 * row["dense_bytes_per_step"]


def test_prints_one_table(result):
    text, data = result
    title, _, header, _, *lines = text.splitlines()
    assert title.startswith(f"digits: 38,282 parameters, 8 workers (cpu), {STEPS} ")
    assert header.split("  ")[0] == "recipe"
    assert [line.split()[0] for line in lines] == ["dense", "exdyna", "micro"]
    accuracies = [row["test_accuracy"] for row in data["rows"]]
    for i, line in enumerate(lines):
        mean = (accuracies[2 * i] + accuracies[2 * i + 1]) / 2
        assert float(line.split()[1]) == pytest.approx(100 * mean, abs=0.006)


def test_seeds_share_one_compiled_step():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    exchange = _training.RECIPES["exdyna"].build(0.01)
    trainer = _training.Trainer(digits.make_task(), exchange, mesh, steps=3)
    losses = []
    for seed in (0, 1, 0):
        trainer.run(seed, lambda metrics: losses.append(float(metrics.loss)))
    assert trainer._step._cache_size() == 1
    assert losses[:3] == losses[6:] != losses[3:6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "dense,none"], "unknown recipe 'none'; there are dense, exdyna"),
        (["--density", "1.5"], "density"),
        (["--workers", "9"], "--workers: got 9, but jax has 8 devices"),
        (["--steps", "1"], "--steps: got 1"),
        (["--seeds", "0"], "--seeds: got 0"),
        (["--local-steps", "0"], "--local-steps: got 0"),
        (["--local-steps", "7"], "600 steps are not.*rounds of 7; set --steps 602"),
        (["--local-steps", "600"], "rounds of 600; set --steps 1200"),
    ],
)
def test_wrong_options_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        digits.main(arguments)
    assert re.search(message, capsys.readouterr().err)
