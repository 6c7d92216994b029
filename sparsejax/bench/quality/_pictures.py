"""The pictures of the report, from the stored runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sparsejax.bench.quality._report import METRICS, Line, summarise
from sparsejax.bench.quality._store import Record
from sparsejax.bench.quality._task import TEST


def quality_against_bytes(stored: Record) -> Any:
    """A figure: the quality of each method, and the bytes of its steps."""

    def draw(axis, line, style):
        axis.errorbar(
            line.bytes_per_step,
            line.mean,
            yerr=line.deviation,
            fmt="o",
            label=line.method,
            **style,
        )

    return _figure(stored, draw, "bytes per worker and step", lambda m: m.name)


def loss_against_seconds(stored: Record, link: str = "1 Gbit/s") -> Any:
    """A figure: the training loss of each method over the predicted time on a link."""

    def draw(axis, line, style):
        runs = [
            run
            for run in stored["runs"]
            if (run["task"], run["method"]) == (line.task, line.method)
            and run["split"] == TEST
        ]
        steps = np.array([step for step, _ in runs[0]["curve"]])
        seconds = steps * (line.ms_per_step + line.exchange_ms[link]) / 1e3
        loss = np.mean([run["loss"] for run in runs], axis=0)
        axis.plot(seconds, loss, label=line.method, **style)

    return _figure(stored, draw, f"seconds at {link}", lambda metric: "training loss")


def _figure(
    stored: Record,
    draw: Callable[[Any, Line, dict], None],
    below: str,
    beside: Callable[[Any], str],
) -> Any:
    """One plot for each task, logarithmic along x."""
    import matplotlib.pyplot as plt

    lines = summarise(stored)
    tasks = list(dict.fromkeys(line.task for line in lines))
    methods = list(dict.fromkeys(line.method for line in lines))
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(12, 4), layout="constrained", squeeze=False
    )
    for axis, task in zip(axes[0], tasks, strict=True):
        for line in lines:
            if line.task == task:
                draw(axis, line, _style(methods.index(line.method)))
        axis.set(title=task, xscale="log", xlabel=below, ylabel=beside(METRICS[task]))
        # Labels between powers of ten overlap.
        axis.xaxis.set_minor_formatter("")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside right center")
    return figure


def _style(i: int) -> dict[str, str]:
    """A colour and a line of its own for each method; dense, the first, is black."""
    color = f"C{(i - 1) % 10}" if i else "black"
    return {"color": color, "linestyle": ("-", "--", ":")[i // 11 % 3]}
