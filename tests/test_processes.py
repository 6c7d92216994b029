"""Several real processes: a whole job, failures, and agreement."""

from __future__ import annotations

import json
import re
import signal
import time

import jax
import numpy as np
import pytest

from tests import sharded_program as sharded
from tests.pages import loop, starts
from tests.processes import running
from tests.processes_program import STEPS

# Tests run one after the other: some measure times, and each uses all cores.
pytestmark = pytest.mark.xdist_group("processes")


# -- a whole job -----------------------------------------------------------------------


def _job(processes, devices, *directories):
    """Runs a job and returns the results that its processes print."""
    arguments = ("-m", "tests.processes_program", *map(str, directories))
    with running(*arguments, processes=processes, devices=devices) as started:
        first, *others = [json.loads(p.output().splitlines()[-1]) for p in started]
    difference, whole_numbers_equal = first.pop("difference")
    assert difference < 1e-6
    assert whole_numbers_equal
    expected = first.pop("expected_row")
    assert all(other == first for other in others)
    assert first["row"] == pytest.approx(expected, rel=1e-5)
    assert first["row"]["sent"] == 19
    continued, restored = first["next"]
    assert continued == restored
    return first


@pytest.fixture(scope="module")
def job_of_four_workers(tmp_path_factory):
    """The results of two processes with two devices each, and their checkpoint."""
    checkpoint = tmp_path_factory.mktemp("job") / "saved"
    return _job(2, 2, checkpoint), checkpoint


def test_a_job_trains_and_goes_on_with_fewer_workers(job_of_four_workers):
    said, _ = job_of_four_workers
    assert said["losses"][-1] < 0.95 * said["losses"][0]
    assert said["errors"][0] is None
    assert said["errors"][1] < 1e-6  # the error of the mean pending gradient
    assert (said["workers"], said["steps_of_state"]) == (2, STEPS + 2)


@pytest.mark.second_tier
@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (4, 1), (4, 2)])
def test_another_job_goes_on(processes, devices, job_of_four_workers, tmp_path):
    before, checkpoint = job_of_four_workers
    said = _job(processes, devices, tmp_path / "saved", checkpoint)
    if processes * devices == 4:
        assert said["started"] == before["saved"]
    else:
        assert said["errors"][0] < 1e-6
    # Losses are comparable: batches are the same for any number of workers.
    assert max(said["losses"]) < before["losses"][0]
    # With two devices each, resized once more.
    assert said["workers"] == processes
    assert said["steps_of_state"] == 2 * STEPS + (2 if devices == 2 else 0)
    assert len(said["errors"]) == devices


# -- a sharded model -------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded_model(request, tmp_path_factory):
    """The results of two processes, each of which holds a whole model in two shards."""
    rows = [getattr(item, "callspec", None) for item in request.session.items]
    named = {row.params.get("sharded_recipe") for row in rows if row}
    recipes = [name for name in sharded.RECIPES if name in named | {"exdyna"}]
    directory = str(tmp_path_factory.mktemp("sharded"))
    arguments = ("-m", "tests.sharded_program", directory, *recipes)
    with running(*arguments, processes=2, devices=2) as started:
        first, other = [json.loads(p.output().splitlines()[-1]) for p in started]
    assert first == other
    return first


@pytest.mark.parametrize(
    "sharded_recipe",
    # exdyna and marsit both gather and reduce.
    ["exdyna", pytest.param("topk", marks=pytest.mark.second_tier), "marsit"],
)
def test_a_sharded_model_trains_as_in_one_process(sharded_recipe, sharded_model):
    found = sharded_model[sharded_recipe]
    expected = sharded.result(sharded_recipe, sharded.setting(jax.devices()[:4]))
    for leaf, values in expected["params"].items():
        np.testing.assert_allclose(found["params"][leaf], values, rtol=0, atol=1e-6)
    bad = [[False, step == sharded.BAD_STEP] for step in range(sharded.STEPS)]
    assert found["dropped"] == expected["dropped"] == bad


def test_a_sharded_model_is_restored(sharded_model):
    assert sharded_model["exdyna"]["restored"] is True


@pytest.mark.newer_waits
def test_the_loop_of_the_readme_is_started_by_hand():
    program = starts() + loop(300)
    with running("-c", program, processes=2, devices=2) as started:
        printed = {re.search(r"loss .*", p.output()).group() for p in started}
    (line,) = printed
    assert re.fullmatch(r"loss 0\.[01]\d{3}, density 1\.00%", line), line


# -- failures --------------------------------------------------------------------------

_ENDLESS = """
import itertools
import numpy as np
import sparsejax
from tests import restart_program as job

mesh = jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))
tx = sparsejax.ef_sign()  # quickly compiled
params, state = job.start(tx, mesh)
step = job.make_step(tx, mesh, sparsejax.state_specs(state))
for t in itertools.count(1):
    params, state, loss = step(params, state, job.placed(job.batch_of(t), mesh))
    loss.block_until_ready()
    if t == 5:
        print("running", flush=True)
"""


def _fails(start, processes, index, how):
    """Sends the signal `how` to one process; returns the time until the others end.

    Returns the seconds, and the errors of the other processes.
    """
    with running("-c", start + _ENDLESS, processes=processes, devices=1) as started:
        for process in started:
            process.wait_for("running")
        began = time.monotonic()
        started[index].send(how)
        others = [process.result() for process in started if process != started[index]]
        seconds = time.monotonic() - began
    assert all(other.status != 0 for other in others)
    return seconds, [other.errors for other in others]


_AS_EXAMPLES_DO = """
import jax
from sparsejax.examples import _cluster
_cluster.connect(4)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    "start", [starts(), _AS_EXAMPLES_DO], ids=["readme", "examples"]
)
def test_a_killed_process_ends_the_others_within_seconds(start):
    # In a ring of four, one process has no connection to the killed process.
    seconds, errors = _fails(start, 4, 2, signal.SIGKILL)
    assert seconds < 20  # heartbeats are missed after 100
    assert any("by peer" in text for text in errors), errors


@pytest.mark.sampled
@pytest.mark.parametrize("index", [0, 1])
def test_a_frozen_process_ends_the_others_after_its_heartbeats(index):
    argument, timeout = "heartbeat_timeout_seconds=", 5
    start = starts().replace(f"{argument}100", f"{argument}{timeout}")
    seconds, (errors,) = _fails(start, 2, index, signal.SIGSTOP)
    assert seconds < timeout + 10
    assert "the JAX distributed service detected fatal errors" in errors


# -- agreement -------------------------------------------------------------------------

_OVERFLOW = """
import jax, jax.numpy as jnp, numpy as np
import sparsejax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
w, n = mesh.size, 501
assert jax.process_count() == 2
for name in EXCHANGES:
    exchange = getattr(sparsejax.exchanges, name)()
    tx = sparsejax.sparsify(
        sparsejax.sparsifiers.nonzero(0.02),
        exchange=exchange,
        memory=sparsejax.memories.none(),
    )
    params = jax.device_put(jnp.zeros(n), NamedSharding(mesh, P()))
    state = sparsejax.init(tx, params, mesh)
    specs = sparsejax.state_specs(state, "data")
    step = jax.jit(jax.shard_map(
        lambda g, s: tx.update(g[0], s), mesh=mesh,
        in_specs=(P("data"), specs), out_specs=(P(), specs),
    ))
    # Only the last worker, in the second process, has too many in the second step.
    for many in (5, 100, 3):
        drawn = np.zeros((w, n), np.float32)
        drawn[:, [0, n - 1]] = 1 + np.arange(w)[:, None]
        drawn[-1, :many] = 7
        update, state = step(
            jax.make_array_from_callback(
                drawn.shape, NamedSharding(mesh, P("data")), lambda i: drawn[i]
            ),
            state,
        )
        found = np.asarray(update.addressable_data(0))
        np.testing.assert_array_equal(found, drawn.sum(axis=0) / w)
        details = sparsejax.report(state).details
        overflow = bool(details.overflow.addressable_data(0))
        assert overflow == (many == 100), (exchange.name, many, overflow)
print("agreed", jax.process_index())
"""


def test_overflow_is_agreed_by_two_processes(every):
    """All processes average densely and report this, and no process hangs."""
    names = ("hashed_owners", "recursive_doubling")[: 2 if every else 1]
    program = starts() + f"EXCHANGES = {names}\n" + _OVERFLOW
    with running("-c", program, processes=2, devices=2) as started:
        for index, process in enumerate(started):
            assert f"agreed {index}" in process.output()
