"""Lets links in the README, and to it, lead on both in the repository and here."""

from __future__ import annotations

import pathlib

README = pathlib.Path(__file__).parent.parent / "README.md"


def on_page_markdown(markdown, page, **_):
    """The text of a page, where the README is the first page."""
    if page.file.src_uri == "index.md":
        return README.read_text().replace("](docs/", "](")
    return markdown.replace("../../README.md", "../index.md").replace(
        "../README.md", "index.md"
    )
