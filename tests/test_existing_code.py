"""The loops of the guide on existing code, before and after each diff."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests import quick
from tests.pages import EXISTING_CODE, blocks

pytestmark = pytest.mark.newer_waits

DIFFS = re.findall(r"^```diff\n(.*?)^```", EXISTING_CODE.read_text(), re.DOTALL | re.M)
# Lines that a diff adds, and the style of its loop.
STYLES = {"pmap": 4, "by_hand": 5, "linen": 5, "nnx": 5}

_RUN = """
import json, sys
losses = []
for text in json.load(sys.stdin):
    names = {}
    exec(text, names)
    losses.append(names["losses"])
print(json.dumps(losses))
"""


def changed(loop, diff):
    """The loop after the diff; every hunk has to fit in one place."""
    for hunk in re.split(r"^@@ @@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert loop.count(before) == 1, before
        loop = loop.replace(before, after)
    return loop


def losses(loop, diff):
    """Losses of the loop, the changed loop, and the changed loop with `dense()`."""
    sparse = changed(loop, diff)
    programs = [loop, sparse, re.sub(r"exdyna\(0\.05(, )?", "dense(", sparse)]
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=json.dumps(programs),
        env=quick.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}")
    return np.array(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.sampled
@pytest.mark.parametrize("style", STYLES)
def test_a_diff_makes_the_loop_sparse(style):
    index = list(STYLES).index(style)
    loop, diff = blocks(EXISTING_CODE)[index], DIFFS[index]
    assert len(re.findall(r"^\+", diff, re.MULTILINE)) == STYLES[style]
    before, sparse, dense = losses(loop, diff)
    np.testing.assert_allclose(dense, before, rtol=1e-5)
    assert np.isfinite(sparse).all()
    assert sparse[0] == pytest.approx(before[0], rel=1e-5)
    assert abs(sparse[1:] - before[1:]).max() > 1e-4  # less was exchanged
