"""Every notebook runs from top to bottom, and its plots are kept in the file."""

from __future__ import annotations

import os
import pathlib
import sys

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Ends a notebook that hangs; readers wait much less, even on two cores.
TIMEOUT = 600

# Notebooks run one after the other: each keeps both cores busy.
pytestmark = pytest.mark.xdist_group("notebooks")
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def execute(notebook, directory, **variables):
    """Runs all cells of `notebook` in place, with the interpreter of the tests."""
    # Removes the tests' own settings: a notebook sets its number of devices.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "MPLBACKEND")
    }
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    client = nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(directory)}},
    )
    client.execute(env=environment)


def test_there_are_notebooks():
    assert NOTEBOOKS


@every_notebook
def test_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    # Most of the time goes into compiling.
    execute(notebook, tmp_path, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
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
