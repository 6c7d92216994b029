"""Training processes that are killed, and that go on with other workers."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.restart_program import SAVE_EVERY

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 18


def _start(directory, workers, steps):
    environment = dict(os.environ)
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(
        [
            sys.executable,
            *("-m", "tests.restart_program"),
            *(str(directory), str(workers), str(steps)),
        ],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(directory, workers, steps):
    process = _start(directory, workers, steps)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The result of eight workers in one go, and the checkpoints it left."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    result = _finish(directory, 8, STEPS)
    assert result["first"] == 0
    assert result["sent"] == 19
    return result, directory


def test_killed_and_resumed_is_the_same_training(uninterrupted, tmp_path):
    expected, _ = uninterrupted
    process = _start(tmp_path, 8, STEPS)
    done = 0
    for line in process.stdout:
        done = int(re.fullmatch(r"step (\d+)\n", line).group(1))
        if done == 2 * SAVE_EVERY + 2:
            os.kill(process.pid, signal.SIGKILL)
            break
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert done < STEPS
    resumed = _finish(tmp_path, 8, STEPS)
    assert resumed["first"] >= 2 * SAVE_EVERY
    assert resumed["loss"] == expected["loss"]  # as hexadecimal digits
    assert resumed["digest"] == expected["digest"]  # parameters, residuals, all state
    assert resumed["steps_of_state"] == STEPS


def test_from_eight_workers_to_four_to_six(uninterrupted, tmp_path):
    expected, checkpoints = uninterrupted
    directory = tmp_path / "resized"
    shutil.copytree(checkpoints, directory)
    saved = STEPS // SAVE_EVERY * SAVE_EVERY
    four = _finish(directory, 4, saved + SAVE_EVERY)
    assert (four["first"], four["rows"]) == (saved, 4)
    six = _finish(directory, 6, saved + 2 * SAVE_EVERY)
    assert (six["first"], six["rows"]) == (saved + SAVE_EVERY, 6)
    for result in (four, six):
        # The mean pending gradient is conserved: only rounded to float32.
        assert result["resize_error"] < 1e-6
        assert result["sent"] == 19
    assert six["steps_of_state"] == saved + 2 * SAVE_EVERY
    before, *after = (float.fromhex(r["loss"]) for r in (expected, four, six))
    assert max(after) < before  # and training went on
