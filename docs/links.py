"""Lets links in the README and CONTRIBUTING.md work in the repository and here."""

from __future__ import annotations

import pathlib

ROOT = pathlib.Path(__file__).parent.parent
# Pages that are files of the repository's root.
FROM_ROOT = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}


def on_page_markdown(markdown, page, **_):
    """The text of a page, with links as they are between the pages."""
    if name := FROM_ROOT.get(page.file.src_uri):
        return (ROOT / name).read_text().replace("](docs/", "](")
    return markdown.replace("../../README.md", "../index.md").replace(
        "../README.md", "index.md"
    )
