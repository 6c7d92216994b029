"""The cost of a program compiled for a GPU, read from its text.

The text has one instruction per kernel, so it shows how many kernels a step launches,
how many bytes they move, and where the device waits for the host.
"""

from __future__ import annotations

import collections
import functools
import re
from typing import NamedTuple

from sparsejax.planning import _hlo

_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
# Instructions that launch no kernel.
_FREE = {
    "parameter",
    "constant",
    "bitcast",
    "get-tuple-element",
    "tuple",
    "partition-id",
    "replica-id",
    "after-all",
    "opt-barrier",
}
# Inside a kernel these pass a value on.
_TRANSPARENT = {"bitcast", "copy", "convert", "reshape", "transpose"}
# These read as much of their first operand as they return.
_READERS = {"dynamic-slice", "slice", "gather"}
# These write as much into their first operand as the operand at this index holds.
_WRITERS = {"dynamic-update-slice": 1, "scatter": -1}


class Cost(NamedTuple):
    """The cost of one run of a program.

    Attributes:
      moved: bytes read and written by kernels.
      kernels: the number of kernels launched.
      host_loops: loops whose trip count the compiler does not know. The device waits
        for the host in each turn.
      conditionals: branches. The device waits for the host once in each of them.
      sorts: kernels and library calls that sort.
    """

    moved: float = 0.0
    kernels: int = 0
    host_loops: int = 0
    conditionals: int = 0
    sorts: int = 0

    def plus(self, other: Cost, times: int = 1) -> Cost:
        return Cost(
            self.moved + times * other.moved,
            *(a + times * b for a, b in zip(self[1:], other[1:], strict=True)),
        )


class _Instruction(NamedTuple):
    name: str
    size: float
    kind: str
    operands: list[str]
    line: str


def cost_of(text: str) -> Cost:
    """The cost of one run of an optimised HLO module for a GPU.

    A conditional costs as much as its usual branch, which moves the fewest bytes.
    """
    program = _Program(text)
    return program.cost(program.entry)


def size_of(shape: str) -> float:
    """Bytes of a shape, or of all shapes of a tuple."""
    return sum(_hlo.sizes(shape))


def _instruction(found: re.Match[str]) -> _Instruction:
    name, shape, kind, rest = found.groups()
    if kind.endswith("-start"):  # operands and results
        shape = re.split(r"[)}], ", shape)[-1]
    operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
    return _Instruction(name, size_of(shape), kind, operands, found.string)


class _Program:
    def __init__(self, text: str):
        lines, self.entry = _hlo.computations(text)
        self.bodies = {
            name: [_instruction(found) for x in body if (found := _LINE.match(x))]
            for name, body in lines.items()
        }

    @functools.cache  # noqa: B019  A program lives as long as one table row.
    def cost(self, name: str) -> Cost:
        total = Cost()
        sizes = {x.name: x.size for x in self.bodies[name]}
        for x in self.bodies[name]:
            total = total.plus(self._one(x, sizes))
        return total

    def _one(self, x: _Instruction, sizes: dict[str, float]) -> Cost:
        if x.kind in _FREE or x.kind.endswith("-done"):
            return Cost()
        called = _hlo.callees(x.line)
        if x.kind == "while":
            trips = _hlo.trip_count(x.line)
            unknown = Cost(host_loops=int(trips is None))
            return unknown.plus(self.cost(called[0]), 1 if trips is None else trips)
        if x.kind == "conditional":
            usual = min(map(self.cost, called), key=lambda cost: cost.moved)
            return usual.plus(Cost(conditionals=1))
        if x.kind == "call":
            return self.cost(called[0])
        if x.kind == "fusion":
            moved = self._fused(called[0], [sizes.get(y, 0) for y in x.operands])
        else:
            moved = x.size + sum(sizes.get(y, 0) for y in x.operands)
        sorts = x.kind == "sort" or "cub" in x.line.split("metadata=")[0].lower()
        return Cost(moved, 1, sorts=int(sorts and x.kind in ("sort", "custom-call")))

    def _fused(self, name: str, operands: list[float]) -> float:
        """Bytes of one kernel: slices, gathers and scatters move touched values."""
        body = {x.name: x for x in self.bodies[name]}
        users = collections.defaultdict(list)
        for x in body.values():
            for y in x.operands:
                users[y].append(x)

        def readers(value):
            for x in users[value]:
                if x.kind in _TRANSPARENT:
                    yield from readers(x.name)
                else:
                    yield x, x.operands[0] == value

        def read(parameter, size):
            uses = list(readers(parameter))
            if not uses or not all(first for _, first in uses):
                return size
            if not all(x.kind in _READERS or x.kind in _WRITERS for x, _ in uses):
                return size
            # A written value is not read: the kernel works in place.
            return min(size, sum(x.size for x, _ in uses if x.kind in _READERS))

        def written(value):
            x = body[value]
            while x.kind in _TRANSPARENT and x.operands[0] in body:
                x = body[x.operands[0]]
            if x.kind in _WRITERS:
                return 2 * body[x.operands[_WRITERS[x.kind]]].size
            return body[value].size

        root = next(x for x in body.values() if x.line.lstrip().startswith("ROOT"))
        outputs = root.operands if root.kind == "tuple" else [root.name]
        total = float(sum(map(written, outputs)))
        for x in body.values():
            if x.kind == "parameter":
                place = x.line.split("parameter(")[1].split(")")[0]
                total += read(x.name, operands[int(place)])
        return total
