"""Every notebook runs from top to bottom, and its plots are kept in the file."""

from __future__ import annotations

import os
import sys

import nbclient
import nbformat
import pytest

from tests import quick
from tests.pages import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Ends a notebook that hangs; readers wait much less, even on two cores.
TIMEOUT = 600

# Notebooks run one after the other: each keeps both cores busy.
pytestmark = [pytest.mark.xdist_group("notebooks"), pytest.mark.newer_waits]
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def execute(notebook, directory, **variables):
    """Runs all cells of `notebook` in place, with the interpreter of the tests."""
    client = nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(directory)}},
    )
    given = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    client.execute(env=given | {"PYTHONPATH": str(ROOT), **variables})


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.second_tier  # A quarter of a minute, or longer.
@every_notebook
def test_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    # Compiling takes most of the time. Notebooks without devices simulate the workers.
    devices = 8 if "device_count" in path.read_text() else None
    execute(notebook, tmp_path, XLA_FLAGS=quick.flags(devices))
    nbformat.validate(notebook)


@every_notebook
def test_plots_are_kept_and_it_ends_with_asserts(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    images = [
        output
        for cell in cells
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    assert images
    assert all(cell.execution_count for cell in cells)
    assert not any(o.output_type == "error" for cell in cells for o in cell.outputs)
    assert "assert " in cells[-1].source
    # The file contains no path of the machine.
    assert str(ROOT) not in path.read_text()


if __name__ == "__main__":  # Executes the notebooks and stores their outputs.
    for name in sys.argv[1:]:
        stored = nbformat.read(name, as_version=4)
        execute(stored, ROOT)
        for cell in stored.cells:
            cell.metadata.pop("execution", None)  # times of day
        nbformat.write(stored, name)
