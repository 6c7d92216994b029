"""Finished runs in a file: an interrupted comparison continues from them."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

Record = dict[str, Any]
_KEY = ("task", "method", "seed", "split", "rate")


class StoreError(Exception):
    """The file belongs to a comparison with other settings."""


class Store:
    """The runs that are finished.

    Args:
      file: the file that keeps them; None keeps them in memory only.
      settings: the settings that all runs have in common.

    Raises:
      StoreError: if the runs in the file have other settings.
    """

    def __init__(self, file: pathlib.Path | None, settings: Record):
        self.file, self.settings = file, settings
        self.runs: list[Record] = []
        if file is not None and file.exists():
            stored = json.loads(file.read_text())
            if stored["settings"] != settings:
                raise StoreError(
                    f"--json: the runs in {file} were made with "
                    f"{stored['settings']}, not with {settings}. Name another file."
                )
            self.runs = stored["runs"]

    def find(self, **key: Any) -> Record | None:
        """The run with this task, method, seed, split and rate."""
        return next((r for r in self.runs if {k: r[k] for k in _KEY} == key), None)

    def add(self, run: Record) -> None:
        """Keeps a run."""
        self.runs.append(run)
        self.save()

    def save(self) -> None:
        """Writes the file, which holds only whole runs, even after a crash."""
        if self.file is None:
            return
        lines = ",\n".join(json.dumps(run) for run in self.runs)
        text = f'{{"settings": {json.dumps(self.settings)},\n"runs": [\n{lines}\n]}}\n'
        new = self.file.with_name(self.file.name + ".new")
        new.write_text(text)
        os.replace(new, self.file)
