"""Shows the examples in docstrings as code: the pages' parser knows "Examples" only."""

from __future__ import annotations

import re

import griffe


class Doctests(griffe.Extension):
    """Renames the section "Example" of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
            )
