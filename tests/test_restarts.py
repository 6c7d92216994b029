"""Training processes that are killed, and that continue with other workers.

A run continues in the other view: killed in a `shard_map` loop, it goes on under plain
`jax.jit`.
"""

from __future__ import annotations

import json
import re
import shutil
import signal

import pytest

from tests.processes import running
from tests.restart_program import SAVE_EVERY

STEPS = 18

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.newer_waits]


def _running(directory, workers, steps, view="shard_map", **how):
    arguments = (str(directory), str(workers), str(steps), view)
    return running("-m", "tests.restart_program", *arguments, **how)


def _last(process):
    return json.loads(process.output().splitlines()[-1])


def _finish(directory, workers, steps, view="shard_map"):
    with _running(directory, workers, steps, view) as (process,):
        return _last(process)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The result of an uninterrupted run with eight workers, and its checkpoints."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    result = _finish(directory, 8, STEPS)
    assert result["first"] == 0
    assert result["sent"] == 19
    return result, directory


@pytest.mark.second_tier
def test_killed_and_resumed_is_the_same_training(uninterrupted, tmp_path):
    expected, _ = uninterrupted
    with _running(tmp_path, 8, STEPS) as (process,):
        for line in process.lines():
            done = int(re.fullmatch(r"step (\d+)", line).group(1))
            if done == 2 * SAVE_EVERY + 2:
                process.kill()
                break
        assert process.result().status == -signal.SIGKILL
    assert done < STEPS
    resumed = _finish(tmp_path, 8, STEPS, "jit")
    assert resumed["first"] >= 2 * SAVE_EVERY
    assert resumed["loss"] == expected["loss"]  # compared as hexadecimal digits
    assert resumed["digest"] == expected["digest"]  # parameters, residuals, all state
    assert resumed["steps_of_state"] == STEPS


@pytest.mark.second_tier
def test_several_processes_are_killed_and_resumed(uninterrupted, tmp_path):
    """The whole job dies, and continues from the checkpoint on disk."""
    expected, _ = uninterrupted
    two = {"processes": 2, "devices": 4}
    with _running(tmp_path, 8, STEPS, **two) as processes:
        processes[0].wait_for(f"step {SAVE_EVERY + 2}")
        for process in processes:
            process.kill()
        for process in processes:
            assert process.result().status == -signal.SIGKILL
    with _running(tmp_path, 8, STEPS, "jit", **two) as processes:
        results = [_last(process) for process in processes]
    assert results[0]["first"] >= SAVE_EVERY
    assert results[0]["loss"] == results[1]["loss"]
    # Sums over processes are formed in another order.
    assert float.fromhex(results[0]["loss"]) == pytest.approx(
        float.fromhex(expected["loss"]), rel=1e-5
    )


@pytest.mark.second_tier
def test_rounds_are_killed_and_resumed(tmp_path):
    """In two processes, in the middle of a schedule, with messages in flight."""
    two = {"processes": 2, "devices": 1}
    rounds = 2 * SAVE_EVERY - 1

    def finish(directory):
        with _running(directory, 2, rounds, "rounds", **two) as processes:
            return [_last(process) for process in processes]

    straight = finish(tmp_path / "straight")
    directory = tmp_path / "killed"
    with _running(directory, 2, rounds, "rounds", **two) as processes:
        processes[0].wait_for(f"step {SAVE_EVERY + 1}")
        for process in processes:
            process.kill()
        for process in processes:
            assert process.result().status == -signal.SIGKILL
    resumed = finish(directory)
    for mine, expected in zip(resumed, straight, strict=True):
        assert (expected["first"], mine["first"]) == (0, SAVE_EVERY)
        assert mine["digest"] == expected["digest"]
        assert mine["steps_of_state"] == rounds


def test_from_eight_workers_to_four_to_six(uninterrupted, tmp_path):
    expected, checkpoints = uninterrupted
    directory = tmp_path / "resized"
    shutil.copytree(checkpoints, directory)
    saved = STEPS // SAVE_EVERY * SAVE_EVERY
    four = _finish(directory, 4, saved + SAVE_EVERY, "jit")
    assert (four["first"], four["rows"]) == (saved, 4)
    six = _finish(directory, 6, saved + 2 * SAVE_EVERY)
    assert (six["first"], six["rows"]) == (saved + SAVE_EVERY, 6)
    for result in (four, six):
        # The mean pending gradient is conserved up to rounding to float32.
        assert result["resize_error"] < 1e-6
        assert result["sent"] == 19
    assert six["steps_of_state"] == saved + 2 * SAVE_EVERY
    before, *after = (r["held_out"] for r in (expected, four, six))
    assert max(after) < before  # and training went on
