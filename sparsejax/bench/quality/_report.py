"""The results of the runs: quality, its difference to dense, bytes, and time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from sparsejax.bench.quality._store import Record
from sparsejax.bench.quality._task import TEST

_CONFIDENCE = 0.95


class Metric(NamedTuple):
    """How a task's quality is read; see `Task`."""

    name: str
    higher: bool
    tolerance: float
    relative: bool


METRICS = {
    "images": Metric("accuracy", True, 0.01, False),
    "text": Metric("loss", False, 0.01, True),
    "ratings": Metric("HR@10", True, 0.01, False),
}


class Line(NamedTuple):
    """One line of the report.

    Attributes:
      seeds: the number of runs.
      rate: the learning rate.
      mean, deviation: mean and standard deviation of the quality, over seeds.
      difference, interval: the mean difference to dense over pairs of runs with the
        same seed, and half the width of its 95 % confidence interval (Student's t);
        None without pairs.
      close: whether the better end of the interval is at most the tolerance worse than
        dense; None without an interval.
      share: the bytes of a step as a fraction of dense's.
      density_error: the worst error of all steps but the first; None without a target.
      steps: the steps until the mean curve reaches dense's final quality minus the
        tolerance; None if it never does.
      seconds: the time of these steps on each link; None if `steps` is None.
      ms_per_step: the time that one worker computes in a step.
      exchange_ms: the time of the exchange per step, on each link.
    """

    task: str
    method: str
    seeds: int
    rate: float
    mean: float
    deviation: float
    difference: float | None
    interval: float | None
    close: bool | None
    bytes_per_step: int
    share: float | None
    density: float
    density_error: float | None
    steps: float | None
    seconds: dict[str, float | None]
    ms_per_step: float
    exchange_ms: dict[str, float]


def summarise(stored: Record) -> list[Line]:
    """One line for each task and method, in the order of the runs.

    Args:
      stored: the content of a file of runs.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for run in stored["runs"]:
        if run["split"] == TEST:
            groups.setdefault((run["task"], run["method"]), []).append(run)
    workers = stored["settings"]["workers"]
    return [
        _line(runs, groups.get((task, "dense"), []), METRICS[task], workers)
        for (task, _), runs in groups.items()
    ]


def _line(
    runs: list[Record], dense: list[Record], metric: Metric, workers: int
) -> Line:
    first = runs[0]
    values = [run["quality"] for run in runs]
    by_seed = {run["seed"]: run["quality"] for run in dense}
    pairs = [r["quality"] - by_seed[r["seed"]] for r in runs if r["seed"] in by_seed]
    difference = statistics.mean(pairs) if pairs else None
    interval = half_width(pairs)
    base = statistics.mean(by_seed.values()) if by_seed else math.nan
    slack = metric.tolerance * (base if metric.relative else 1)
    sign = 1 if metric.higher else -1
    close = None
    if difference is not None and interval is not None:
        close = sign * difference + interval >= -slack
    steps = first_reach(runs, base - sign * slack, sign) if by_seed else None
    compute = min(run["ms_per_step"] for run in runs) / workers
    moved = statistics.mean(run["bytes_per_step"] for run in runs)
    links = {
        link: statistics.mean(run["exchange_ms"][link] for run in runs)
        for link in first["exchange_ms"]
    }
    errors = [r["density_error"] for r in runs if r["density_error"] is not None]
    return Line(
        first["task"],
        first["method"],
        len(runs),
        first["rate"],
        statistics.mean(values),
        statistics.stdev(values) if len(values) > 1 else 0.0,
        difference,
        interval,
        close,
        round(moved),
        moved / dense[0]["bytes_per_step"] if dense else None,
        statistics.mean(run["density"] for run in runs),
        max(errors) if errors else None,
        steps,
        {
            link: None if steps is None else steps * (compute + ms) / 1e3
            for link, ms in links.items()
        },
        compute,
        links,
    )


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of a mean; None for one value."""
    if len(values) < 2:
        return None
    quantile = stats.t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)
    return float(quantile * statistics.stdev(values) / len(values) ** 0.5)


def first_reach(runs: list[Record], goal: float, sign: int) -> float | None:
    """The steps until the mean curve of the runs reaches `goal`, or None.

    Between two points of the curve the steps are interpolated.
    """
    steps = [step for step, _ in runs[0]["curve"]]
    curve = np.mean([[value for _, value in run["curve"]] for run in runs], axis=0)
    over = sign * (curve - goal) >= 0
    if not over.any():
        return None
    i = int(np.argmax(over))
    if i == 0:
        return float(steps[0])
    part = (goal - curve[i - 1]) / (curve[i] - curve[i - 1])
    return float(steps[i - 1] + part * (steps[i] - steps[i - 1]))


def format_lines(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines as cells, for a table of text."""
    return [_cells(line) for line in lines]


def _cells(line: Line) -> dict[str, str]:
    scale, unit = (100, " %") if METRICS[line.task].higher else (1, "")
    digits = 2 if METRICS[line.task].higher else 4
    quality = f"{scale * line.mean:.{digits}f}{unit}"
    if line.seeds > 1:
        quality += f" ± {scale * line.deviation:.{digits}f}"
    difference = "-"
    if line.method != "dense" and line.difference is not None:
        difference = f"{scale * line.difference:+.{digits}f}"
        if line.interval is not None:
            difference += f" ± {scale * line.interval:.{digits}f}"
    error = "-" if line.density_error is None else f"{100 * line.density_error:.0f} %"
    cells = {
        "method": line.method,
        "seeds": str(line.seeds),
        METRICS[line.task].name: quality,
        "against dense": difference,
        "bytes/step": f"{line.bytes_per_step:,}",
        "density": f"{100 * line.density:.2f} %",
        "worst error": error,
    }
    for link, seconds in line.seconds.items():
        cells[link] = "-" if seconds is None else f"{seconds:.1f} s"
    return cells
