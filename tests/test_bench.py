"""The benchmark: its rows, its advice, and hosts made of network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import jax
import pytest

import sparsejax
from sparsejax.bench import _command, _hosts, _train
from tests import quick

pytestmark = pytest.mark.newer_waits

KEYS = {
    "recipe",
    "n",
    "density",
    "workers",
    "ms_median",
    "bytes_per_step",
    "speedup_vs_dense",
}


def _run(*arguments):
    """Runs the benchmark in its own process, since it sets flags before jax starts."""
    return subprocess.run(
        [sys.executable, "-m", "sparsejax.bench", *arguments],
        env=os.environ | {"XLA_FLAGS": quick.flags(devices=None)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def _check(file, workers, more=()):
    rows = json.loads(file.read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["dense", "micro", *more]
    for row in rows:
        assert set(row) == KEYS
        assert row["workers"] == workers
        assert row["n"] == 20_000
        assert row["ms_median"] > 0
    dense, micro, *narrow = rows
    for row in narrow:
        assert row["bytes_per_step"] < micro["bytes_per_step"]
    assert dense["speedup_vs_dense"] == 1
    assert micro["speedup_vs_dense"] == dense["ms_median"] / micro["ms_median"]
    assert micro["density"] == pytest.approx(0.01)
    assert micro["bytes_per_step"] < 0.02 * dense["bytes_per_step"]


def test_local_devices(tmp_path):
    file = tmp_path / "rows.json"
    options = [
        "--recipe",
        "micro",
        "--n",
        "20000",
        "--workers",
        "2",
        "--repeats",
        "2",
        "--value-bits",
        "32,8",
        "--json",
    ]
    done = _run(*options, str(file))
    assert done.returncode == 0, done.stderr
    assert "2 workers in 1 processes" in done.stdout
    assert "\nHere " in done.stdout
    _check(file, workers=2, more=["micro 8 bits"])


@pytest.mark.second_tier
def test_scale_needs_no_preparation(tmp_path):
    """The command makes devices for the largest number of workers."""
    file = tmp_path / "rows.json"
    done = _run("scale", "--recipe", "micro", "--n", "4000000", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row["workers"] for row in rows] == [2, 8, 64, 1024]
    for row in rows:
        assert row["compile_seconds"] > 0
        rounds = 2 * (row["workers"] - 1) / row["workers"]
        assert 0.011 < row["bytes_per_step"] / rounds / 16e6 < 0.015


def test_rounds_spread_their_bytes_over_the_steps(monkeypatch):
    monkeypatch.setattr(_train, "SIZES", (8, 64, 8))
    monkeypatch.setattr(_train, "SETTLED", 1)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows = _train.measure(["micro", "dense"], mesh, 0.1, 1, local_steps=4, delayed=True)
    assert [row["recipe"] for row in rows[2:]] == ["dense", "micro, delayed"]
    alone, micro = rows[:2]
    assert (alone["recipe"], alone["times_no_exchange"]) == ("no exchange", 1)
    assert micro["local_steps"] == 4
    assert micro["density"] == pytest.approx(0.1, abs=0.01)
    recipe = _train.RECIPES["micro"].build(0.1)
    once = sparsejax.wire_bytes(recipe, _train.init(), workers=2).total
    assert micro["bytes_per_step"] == round(once / 4)


needs_namespaces = pytest.mark.skipif(
    os.name != "posix"
    or os.geteuid() != 0
    or not shutil.which("ip")
    or not shutil.which("tc"),
    reason="network namespaces need root and iproute2",
)


@needs_namespaces
def test_hosts_with_limited_links(tmp_path):
    file = tmp_path / "rows.json"
    options = "--recipe micro --n 20000 --hosts 2 --rate 1gbit --repeats 2 --json"
    done = _run(*options.split(), str(file))
    if "Operation not permitted" in done.stderr:
        pytest.skip("this root may not make network namespaces")
    assert done.returncode == 0, done.stderr
    assert "2 hosts, 1gbit links, 2 workers in 2 processes" in done.stdout
    _check(file, workers=2)
    left = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert not [line for line in left.splitlines() if line.startswith("sj")]


@needs_namespaces
def test_a_failing_host_is_reported(capfd):
    command = ["sh", "-c", 'echo "I am $JAX_PROCESS_ID"; exit $JAX_PROCESS_ID']
    try:
        status = _hosts.run_on_hosts(2, "none", command)
    except _hosts.HostsError as error:
        pytest.skip(f"this root may not make network namespaces: {error}")
    out, err = capfd.readouterr()
    assert status == 1
    assert "I am 0" in out
    assert "host 1 failed" in err


def test_bad_arguments():
    with pytest.raises(_hosts.HostsError, match="--hosts: got 0"):
        _hosts.run_on_hosts(0, "none", ["true"])
    with pytest.raises(SystemExit):
        _command.main(["--recipe", "nonsense"])
    with pytest.raises(SystemExit):
        _command.main(["sync", "--local-steps", "2"])
    with pytest.raises(SystemExit):
        _command.main(["train", "--batch", "0"])
    with pytest.raises(SystemExit):
        _command.main(["sync", "--delayed"])


@pytest.mark.parametrize(
    ("speedup", "advice"), [(0.5, "use dense"), (2.5, "micro is fastest, 2.5 times")]
)
def test_advice(speedup, advice):
    rows = [
        {"recipe": "no exchange", "speedup_vs_dense": 9.0},
        {"recipe": "dense", "speedup_vs_dense": 1.0},
        {"recipe": "micro", "speedup_vs_dense": speedup},
    ]
    assert advice in _command._advice(rows)
