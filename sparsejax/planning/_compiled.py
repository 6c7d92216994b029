"""`compiled_wire_bytes`: bytes on the wire, from the text of a compiled program."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import jax

from sparsejax._checks import check_optional_count
from sparsejax.planning import _hlo
from sparsejax.planning._arguments import refuse_arrays
from sparsejax.planning._collectives import (
    Operation,
    WireBytes,
    received,
    summarise,
)

# `%name = SHAPE opcode(operands), attributes`. Asynchronous collectives are pairs of a
# start and a done; only the start is counted.
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(?P<start>-start)?\("
)
# Groups along named axes, `mesh['data'=4,'model'=2] {'data'}`, or along a part of one,
# `{'data':(1)2}`.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")


def compiled_wire_bytes(
    compiled: str | jax.stages.Compiled, *, devices: int | None = None
) -> WireBytes:
    """Bytes that each worker receives per step, read from a compiled program.

    Counts like `wire_bytes`, but after the compiler merged, split and converted
    messages.

    Args:
      compiled: a `jax.stages.Compiled`, or the text of an optimised HLO module.
      devices: the number of devices that run the program, for collectives whose text
        names no groups; by default the number in the text.

    Returns:
      The bytes by collective and branch, as from `wire_bytes`.

    Raises:
      TypeError: if `compiled` is neither a compiled program nor a text, or `devices`
        is not an int.
      ValueError: if the text is not a compiled program, or `devices` is less than 1.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
      >>> mean = jax.shard_map(
      ...     lambda x: jax.lax.pmean(x, "data"),
      ...     mesh=mesh, in_specs=P("data"), out_specs=P(),
      ... )
      >>> compiled = jax.jit(mean).lower(jnp.zeros(800)).compile()
      >>> sparsejax.compiled_wire_bytes(compiled).total  # 2 * 7/8 * 4 bytes * 100
      700.0
    """
    if not isinstance(compiled, str | jax.stages.Compiled):
        raise TypeError(
            f"compiled: got {type(compiled).__name__}, expected the result of "
            f"`jax.jit(step).lower(*arguments).compile()`, or its text."
        )
    refuse_arrays(devices=devices)
    devices = check_optional_count("devices", devices)
    text = compiled if isinstance(compiled, str) else str(compiled.as_text())
    if devices is None:
        found = re.search(r"num_partitions=(\d+)", text) or re.search(
            r"replica_count=(\d+)", text
        )
        devices = int(found.group(1)) if found else 1
    computations, entry = _hlo.computations(text)
    if not entry:
        raise ValueError(
            "compiled: this text has no ENTRY computation, so it is not a compiled "
            "program; call `.compile()` on the lowered program."
        )
    return summarise(map(received, _walk(computations, entry, devices, "", 1)))


def _walk(
    computations: dict[str, list[str]], name: str, devices: int, branch: str, times: int
) -> Iterator[Operation]:
    conditionals = 0
    for line in computations.get(name, ()):
        if found := _INSTRUCTION.match(line):
            yield _operation(found, line, devices, branch, times)
        callees = _hlo.callees(line)
        if " conditional(" in line:
            if "true_computation" in line:
                callees = callees[::-1]  # jax's order: false is branch 0
            for i, callee in enumerate(callees):
                inside = f"{branch}cond{conditionals}[{i}]"
                yield from _walk(computations, callee, devices, inside, times)
            conditionals += 1
        elif not found:
            trips = _hlo.trip_count(line) if " while(" in line else None
            repeats = 1 if trips is None else trips
            for callee in callees:
                yield from _walk(computations, callee, devices, branch, times * repeats)


def _operation(found, line: str, devices: int, branch: str, times: int) -> Operation:
    kind = found["kind"].removeprefix("collective-")
    shapes = _hlo.sizes(found["shape"])
    if found["start"]:
        # An asynchronous start returns (operands, results, ...), equally many of each.
        halves = len(shapes) // 2
        shapes = shapes[halves : 2 * halves] if kind != "all-reduce" else shapes
    count = _group_size(line, devices)
    size = sum(shapes) * (count if kind == "reduce-scatter" else 1)
    return Operation(kind, size, count, branch, times)


def _group_size(line: str, devices: int) -> int:
    if found := re.search(r"replica_groups=\{\{([0-9,]+)\}", line):
        return len(found.group(1).split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found.group(1))
    if found := _MESH.search(line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found.group(1)))
        axes = _AXIS.findall(found.group(2))
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return devices
