"""The results of the examples: one row per run, one line per recipe."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Row:
    """One training run.

    Attributes:
      density_target: the requested density; None for recipes that send all non-zeros.
      density_worst_error: largest |achieved / target - 1| of all steps but the first;
        None without a target.
      bytes_per_step: bytes that each worker receives, on average over steps;
        `dense_bytes_per_step` is the same for the recipe `dense`.
      ms_per_step: median wall time of a step.
    """

    recipe: str
    seed: int
    test_accuracy: float
    density_target: float | None
    density_mean: float
    density_worst_error: float | None
    bytes_per_step: int
    dense_bytes_per_step: int
    ms_per_step: float


_HEADER = (
    "recipe",
    "test accuracy",
    "mean density",
    "worst density error",
    "bytes/worker/step",
    "% of dense",
    "ms/step",
)


def format_table(rows: Sequence[Row]) -> str:
    """One line per recipe, over its seeds: means, and the worst density error."""
    by_recipe: dict[str, list[Row]] = {}
    for row in rows:
        by_recipe.setdefault(row.recipe, []).append(row)
    cells = [_HEADER, *(_line(name, runs) for name, runs in by_recipe.items())]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            # Align names to the left and numbers to the right.
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _line(recipe: str, runs: list[Row]) -> tuple[str, ...]:
    share = runs[0].bytes_per_step / (runs[0].dense_bytes_per_step or 1)
    return (
        recipe,
        f"{100 * statistics.mean(run.test_accuracy for run in runs):.2f} %",
        f"{100 * statistics.mean(run.density_mean for run in runs):.3f} %",
        _worst([run.density_worst_error for run in runs]),
        f"{runs[0].bytes_per_step:,}",
        f"{100 * share:.2f} %",
        f"{statistics.mean(run.ms_per_step for run in runs):.1f}",
    )


def _worst(errors: list[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return f"{100 * max(known):.2f} %" if known else "-"


def to_json(rows: Sequence[Row]) -> str:
    """`{"rows": [...]}`, one object per run, with the attributes of `Row` as keys."""
    return json.dumps({"rows": [dataclasses.asdict(row) for row in rows]}, indent=2)
