"""Reads the text of a compiled program: computations, calls, sizes, trip counts."""

from __future__ import annotations

import math
import re

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_CALLEES = re.compile(
    r"(?:to_apply|calls|body|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r"known_trip_count[^0-9]*(\d+)")


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, by name; and the name of the entry."""
    found: dict[str, list[str]] = {}
    entry, current = "", ""
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head and not line.startswith(" "):
            current = head.group(2)
            found[current] = []
            entry = current if head.group(1) else entry
        elif current:
            found[current].append(line)
    return found, entry


def callees(line: str) -> list[str]:
    """The computations that an instruction runs; for a loop only the body."""
    return [
        callee.strip().lstrip("%")
        for group in _CALLEES.findall(line)
        for callee in group.strip("{}").split(",")
    ]


def trip_count(line: str) -> int | None:
    """The number of turns of a loop, or None if the text does not state it."""
    found = _TRIPS.search(line)
    return int(found.group(1)) if found else None


def sizes(shape: str) -> list[float]:
    """Bytes of a shape, or of each shape of a tuple."""
    return [
        _bits(dtype) * math.prod(map(int, filter(None, dims.split(",")))) / 8
        for dtype, dims in _SHAPE.findall(shape)
    ]


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 0
