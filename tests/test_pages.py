"""The code of the README and the guides runs unchanged, and their links work."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

from tests import quick
from tests.pages import (
    EVIDENCE,
    EXISTING_CODE,
    GUIDES,
    MANY_HOSTS,
    README,
    ROOT,
    blocks,
    loop,
    row_of,
)

pytestmark = pytest.mark.newer_waits

# Checks that run at the end of a page's program.
CHECKS = {
    "README": """
assert loss < 0.2, loss  # from 1
assert abs(sparsejax.report(opt_state).density - 0.01) < 1e-3
assert opt_state[0].memory.per_worker.shape == (8, 1000)
""",
    "checkpoints": """
assert continued[0].memory.per_worker.shape == (4, 1000)
assert jax.device_get(restored["step"]) == 2
""",
    "choosing": "",
    "flax": """
assert linen_losses[1] < linen_losses[0] and int(state.step) == 2
assert sparsejax.report(state).sent == 10
assert nnx_losses[1] < nnx_losses[0]
assert sparsejax.report(optimizer.opt_state).sent == 10
assert jax.tree.leaves(statistics)[0].shape == (16,)
assert reader_losses[0] != reader_losses[1] and 0 < reader_losses[0] < 9
assert sparsejax.report(reader_optimizer.opt_state).sent == 8
assert dynamic_scale.scale == 2**16 and dynamic_scale.fin_steps == 1
assert 0 < loss < 2, loss
""",
    "local_steps": """
assert losses.shape == (H,) and 0 < losses[-1] < 2, losses
assert 0.02 < float(sparsejax.report(state).density) <= 8 * 0.02
assert state.inner.per_worker[0].count.tolist() == [2 * H] * 8
assert hsdp_state.inner.per_worker[0].count.tolist() == [H] * 2
""",
    "manual_loops": """
assert 0 < loss < 1
assert abs(sparsejax.report(opt_state).density - 0.01) < 1e-3
assert opt_state[0].memory.per_worker.shape == (8, 1000)
""",
    "optax": """
assert sorted(sparsejax.reports(opt_state)) == [
    "[2].inner_states['dense'].inner_state.report",
    "[2].inner_states['sparse'].inner_state.report",
]
assert 0 < loss < 2 and 0 <= row["density"] <= 1, row
assert (adapted["base"] == 0).all() and (adapted["lora_b"] != 0).any()
assert 0 < adapter_bytes < 0.03 * 4 * 4004, adapter_bytes
memory = adapter_state.inner_states["adapter"].inner_state[0].memory
assert memory.per_worker.shape == (8, 4004)
""",
    "overlap": """
flight = opt_state[0].exchange
values = flight.message.per_worker[:, : flight.coordinates.size]
assert values.shape[0] == 8 and values.size and (values == 0).all()
assert 0 < jnp.abs(params["w"]).max()
""",
    "sharded_models": "",
    "troubleshooting": "",
}
# MANY_HOSTS starts processes: see tests/test_processes.py. The loops of EXISTING_CODE
# are complete programs: see tests/test_existing_code.py. EVIDENCE has no Python.
OWN_TESTS = (MANY_HOSTS, EXISTING_CODE, EVIDENCE)
PROGRAMS = [page for page in (README, *GUIDES) if page not in OWN_TESTS]


def program(page):
    """The program of a page; guides continue the README's loop."""
    if page == README:
        return "\n".join([*blocks(page), CHECKS["README"]])
    return "\n".join([loop(2), *blocks(page), CHECKS[page.stem]])


# These programs compile for a quarter of a minute or longer.
LONG = (
    "checkpoints",
    "choosing",
    "flax",
    "local_steps",
    "optax",
    "overlap",
    "sharded_models",
)


@pytest.mark.parametrize("page", [row_of(page, LONG) for page in PROGRAMS])
def test_blocks_run_in_order(page, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(program(page))
    environment = quick.environment()
    done = subprocess.run(
        [sys.executable, str(file)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr}")
    assert re.search(r"loss 0\.\d{4}, density 1\.00%", done.stdout), done.stdout


def test_every_guide_is_in_the_list_of_pages():
    listed = (ROOT / "mkdocs.yml").read_text()
    text = README.read_text()
    for page in GUIDES:
        assert f"guides/{page.name}" in listed
        assert f"docs/guides/{page.name}" in text
    assert {page.stem for page in PROGRAMS} == set(CHECKS)


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 140


def _pages():
    written = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in written)


@pytest.mark.parametrize("page", _pages())
def test_links_lead_to_files(page):
    page = ROOT / page
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.M)
    text = re.sub(r"`[^`\n]*`", "`code`", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in _anchors(file), target


def _anchors(page: pathlib.Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    kept = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {re.sub(r"\s+", "-", heading.strip()) for heading in kept}
