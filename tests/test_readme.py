"""The README's code runs unchanged, one block after the other."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"

# The imports that the first lines of the page assume.
PREAMBLE = "import optax\nimport sparsejax\n"
# This call starts a program of several processes: see test_processes.py.
STARTS = "jax.distributed.initialize("
# Checks to run after a block.
CHECKS = {
    "## A complete example": """
assert loss < 0.2, loss  # from 1
assert abs(sparsejax.report(opt_state).density - 0.01) < 1e-3
assert opt_state[0].memory.per_worker.shape == (8, 1000)
""",
    "from flax import linen": """
first = float(loss)
state, loss = linen_step(state, batch)
assert float(loss) < first and int(state.step) == 2
assert sparsejax.report(state).sent == 10
""",
    "from flax import nnx": """
first = float(loss)
state, loss = nnx_step(state, batch)
assert float(loss) < first
assert sparsejax.report(optimizer.opt_state).sent == 10
""",
    "def microbatched(": """
assert sorted(sparsejax.reports(opt_state)) == [
    "[2].inner_states['dense'].inner_state.report",
    "[2].inner_states['sparse'].inner_state.report",
]
assert loss > 0 and 0 <= row["density"] <= 1, row
""",
}


def _program():
    text = README.read_text()
    parts = [PREAMBLE]
    used = set()
    for found in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        block = found.group(1)
        if STARTS in block:
            continue
        parts.append(block)
        heading = re.findall(r"^## .*$", text[: found.start()], re.MULTILINE)
        for key, check in CHECKS.items():
            if key in block or (heading and key == heading[-1]):
                parts.append(check)
                used.add(key)
    assert used == set(CHECKS), "a block was renamed"
    return "\n".join(parts)


def test_blocks_run_in_order(tmp_path):
    program = tmp_path / "readme.py"
    program.write_text(_program())
    environment = dict(os.environ)
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}")
    assert re.search(r"loss 0\.\d{4}, density 1\.00%", done.stdout), done.stdout
