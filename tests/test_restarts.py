"""Training processes that are killed, and that go on with other workers."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from tests.restart_program import SAVE_EVERY

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 18


def _start(directory, workers, steps, **more):
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={more.pop('devices', 8)}",
        "PYTHONPATH": str(ROOT),
        **more,
    }
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


def _start_two(directory, steps):
    """Two processes with four devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        _start(
            directory,
            8,
            steps,
            devices=4,
            JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(i),
        )
        for i in range(2)
    ]


def test_several_processes_are_killed_and_resumed(uninterrupted, tmp_path):
    """The whole job dies, as jobs do, and goes on from what is on the disk."""
    expected, _ = uninterrupted
    processes = _start_two(tmp_path, STEPS)
    for line in processes[0].stdout:
        if line == f"step {SAVE_EVERY + 2}\n":
            break
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    processes = _start_two(tmp_path, STEPS)
    results = []
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        results.append(json.loads(output.splitlines()[-1]))
    assert results[0]["first"] >= SAVE_EVERY
    assert results[0]["loss"] == results[1]["loss"]
    # Sums over processes are formed in another order.
    assert float.fromhex(results[0]["loss"]) == pytest.approx(
        float.fromhex(expected["loss"]), rel=1e-5
    )


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
