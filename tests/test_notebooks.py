"""Notebooks run from top to bottom; their last cells assert what they say."""

from __future__ import annotations

import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


# The kernel's own libraries open sockets and event loops as they like.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=where).execute()
    shown = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    assert any("image/png" in o.get("data", ()) for o in shown)
    assert "assert " in notebook.cells[-1].source
