"""The README and the guides, and the Python blocks in them."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
EXISTING_CODE = ROOT / "docs" / "guides" / "existing_code.md"
EVIDENCE = ROOT / "docs" / "guides" / "evidence.md"
MANY_HOSTS = ROOT / "docs" / "guides" / "many_hosts.md"


def blocks(page: pathlib.Path) -> list[str]:
    """All Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.M)


def block(page: pathlib.Path, sign: str) -> str:
    """The one block of a page that contains `sign`."""
    (found,) = [text for text in blocks(page) if sign in text]
    return found


def loop(steps: int) -> str:
    """The README's loop, of this many steps."""
    text = block(README, "jax.make_mesh(")
    assert "range(300)" in text
    return text.replace("range(300)", f"range({steps})")


def starts() -> str:
    """The block that comes first in a program of several processes."""
    return block(MANY_HOSTS, "jax.distributed.initialize(")


def row_of(file, long):
    """A row that runs `file`: in the second tier of tests if its name is in `long`."""
    marks = [pytest.mark.second_tier] if file.stem in long else []
    return pytest.param(file, id=file.stem, marks=marks)
