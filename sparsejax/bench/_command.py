"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

import jax

from sparsejax.bench import _hosts
from sparsejax.examples import _cluster
from sparsejax.examples._training import RECIPES

MODES = ("sync", "train", "select", "scale")
QUALITY = "quality"  # has options of its own
MOST_WORKERS = 1024  # for the mode `scale`
_ON_HOST = "SPARSEJAX_BENCH_HOST"


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints one table, and names the recipe to use."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == [QUALITY]:
        from sparsejax.bench.quality import _command

        _command.main(argv[1:], format_rows)
        return
    parser = _parser()
    options = parser.parse_args(argv)
    unknown = [name for name in options.recipe if name not in RECIPES]
    if unknown:
        parser.error(f"--recipe: unknown {unknown[0]!r}; one of {', '.join(RECIPES)}")
    if options.local_steps < 1 or (options.local_steps > 1 and options.mode != "train"):
        parser.error(
            f"--local-steps: got {options.local_steps} and the mode {options.mode}; "
            f"rounds of 2 or more steps are measured by `train --local-steps 10`"
        )
    if options.batch < 1:
        parser.error(f"--batch: got {options.batch}, expected 1 or more examples")
    if options.delayed and options.mode != "train":
        parser.error("--delayed: needs the mode `train`: a step can hide exchanges")
    if options.hosts and _ON_HOST not in os.environ:
        os.environ[_ON_HOST] = "1"
        # Without this handler, hosts would go on computing after SIGTERM.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        command = [sys.executable, "-m", "sparsejax.bench", *argv]
        try:
            status = _hosts.run_on_hosts(options.hosts, options.rate, command)
        except _hosts.HostsError as error:
            parser.error(str(error))
        finally:
            del os.environ[_ON_HOST]
        sys.exit(status)
    scale = options.mode == "scale"
    _cluster.connect(MOST_WORKERS if scale else options.hosts or options.workers)
    mesh = _cluster.make_mesh(None)
    rows = _measure(options, mesh)
    if jax.process_index() == 0:
        print(_heading(options, mesh))
        print(format_rows(rows))
        print(_advice(rows))
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


def _measure(options: argparse.Namespace, mesh: jax.sharding.Mesh) -> list[dict]:
    # Each mode imports its own dependencies only.
    if options.mode == "sync":
        from sparsejax.bench import _sync

        recipes = ["dense", *(r for r in options.recipe if r != "dense")]
        rows = _sync.measure(
            recipes,
            mesh,
            options.n,
            options.density,
            options.repeats,
            options.value_bits,
        )
        return _against("dense", rows)
    if options.mode == "train":
        from sparsejax.bench import _train

        recipes = ["dense", *(r for r in options.recipe if r != "dense")]
        rows = _train.measure(
            recipes,
            mesh,
            options.density,
            options.repeats,
            options.local_steps,
            options.delayed,
            options.batch,
        )
        return _against("dense", rows)
    if options.mode == "select":
        from sparsejax.bench import _select

        return _select.measure(options.n, options.density, options.repeats)
    from sparsejax.bench import _scale

    sizes = (2, 8, 64, MOST_WORKERS)
    return _scale.measure(options.recipe, options.n, options.density, sizes)


def _against(baseline: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    base = next(row["ms_median"] for row in rows if row["recipe"] == baseline)
    return [{**row, "speedup_vs_dense": base / row["ms_median"]} for row in rows]


def _heading(options: argparse.Namespace, mesh: jax.sharding.Mesh) -> str:
    where = f"{options.hosts} hosts, {options.rate} links, " if options.hosts else ""
    return (
        f"{options.mode}: {where}{mesh.size} workers in {jax.process_count()} "
        f"processes ({jax.devices()[0].device_kind}), jax {jax.__version__}\n"
    )


def _advice(rows: list[dict[str, Any]]) -> str:
    timed = [
        row
        for row in rows
        if "speedup_vs_dense" in row and row["recipe"] != "no exchange"
    ]
    if not timed:
        return ""
    best = max(timed, key=lambda row: row["speedup_vs_dense"])
    if best["recipe"] == "dense" or best["speedup_vs_dense"] < 1.05:
        return "\nHere the links are not a bottleneck: use dense."
    return (
        f"\nHere {best['recipe']} is fastest, {best['speedup_vs_dense']:.1f} times as "
        f"fast as dense."
    )


def format_rows(rows: list[dict[str, Any]]) -> str:
    """A table with the keys as header, and numbers aligned to the right."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, *([_cell(row.get(key, "")) for key in keys] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparsejax.bench",
        description="Times recipes against dense: do they pay off on your machines?",
        epilog=f"`{QUALITY} --help`: do models train as well as with dense?",
    )
    add = parser.add_argument
    add("mode", nargs="?", choices=MODES, default="sync", help="default: sync")
    add(
        "--recipe",
        type=lambda text: text.split(","),
        default="exdyna,micro",
        metavar="A,B",
        help=f"some of {', '.join(RECIPES)}; default: %(default)s",
    )
    add("--n", type=int, default=4_000_000, help="coordinates; default: %(default)s")
    add("--density", type=float, default=0.01, help="default: %(default)s")
    add("--repeats", type=int, default=10, help="timed rounds; default: %(default)s")
    add(
        "--value-bits",
        type=lambda text: [int(bits) for bits in text.split(",")],
        default="32",
        metavar="A,B",
        help="sync: bits per value, of 32, 16, 8, 4, 2 and 1; default: %(default)s",
    )
    add(
        "--delayed",
        action="store_true",
        help="train: also each recipe that `sparsejax.delayed` accepts",
    )
    add("--local-steps", type=int, default=1, metavar="H", help="train: steps a round")
    add("--batch", type=int, default=32, help="train: examples per worker and step")
    add("--workers", type=int, default=4, help="virtual CPU devices without --hosts")
    add("--hosts", type=int, help="run on this many hosts made on this machine (root)")
    add("--rate", default="1gbit", help="rate of host links; default: %(default)s")
    add("--json", type=pathlib.Path, metavar="FILE", help="also write the rows here")
    return parser
