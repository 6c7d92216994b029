"""Runs the comparison: chooses the rate of every row, then trains all seeds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import sparsejax
from sparsejax.bench.quality._methods import Method
from sparsejax.bench.quality._store import Record, Store
from sparsejax.bench.quality._task import TEST, VALIDATION, Task
from sparsejax.bench.quality._train import Run, Trainer

# Learning rates are chosen with a seed that is not among those reported.
VALIDATION_SEED = 1000
# Steps of a run that only measures the time of a step.
_TIMED = 60
# Seconds per message, and bits per second of each link.
LATENCY = 1e-4
LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}


def compare(
    task: Task,
    methods: Sequence[Method],
    seeds: Sequence[int],
    store: Store,
    say: Callable[[str], None] = lambda text: None,
    on_step: Callable[[int], None] = lambda steps: None,
) -> None:
    """Trains the runs of a task that the store lacks, and adds them.

    Args:
      methods: the rows; a row with `rate_of` follows the row that it names.
      seeds: the seeds to report.
      say: is called with the name of each run that begins.
      on_step: is called with the number of steps done since the last call.
    """
    for method in methods:
        row = _Row(task, method, store, say, on_step)
        rate = row.rate()
        for seed in seeds:
            row.run(seed, rate, TEST)


def time_again(task: Task, methods: Sequence[Method], store: Store) -> None:
    """Times the steps of stored rows again, and keeps the shorter times."""
    for method in methods:
        rows = [
            run
            for run in store.runs
            if (run["task"], run["method"]) == (task.name, method.name)
        ]
        if not rows:
            continue
        trainer = Trainer(task, method, _TIMED, store.settings["workers"])
        taken = _rounded(trainer.run(0, rows[0]["rate"]).ms_per_step)
        for run in rows:
            run["ms_per_step"] = min(taken, run["ms_per_step"])
        store.save()


def runs_of(method: Method, seeds: int, task: Task) -> int:
    """The number of runs that a row needs."""
    return seeds + (len(method.rates(task)) if method.rate_of is None else 0)


class _Row:
    def __init__(self, task, method, store, say, on_step):
        self.task, self.method, self.store = task, method, store
        self.say, self.on_step = say, on_step

    def rate(self) -> float:
        """The best learning rate on the validation split."""
        if self.method.rate_of is not None:
            stored = self.store.runs
            taken = [
                run["rate"]
                for run in stored
                if (run["task"], run["method"]) == (self.task.name, self.method.rate_of)
                and run["split"] == TEST
            ]
            if taken:
                return taken[0]
        rates = self.method.rates(self.task)
        found = {rate: self.run(VALIDATION_SEED, rate, VALIDATION) for rate in rates}
        sign = 1 if self.task.higher else -1

        def worth(rate):
            value = sign * found[rate]["quality"]
            return value if np.isfinite(value) else -np.inf

        return max(rates, key=worth)

    def run(self, seed: int, rate: float, split: str) -> Record:
        """The stored run, or else a new one."""
        key = {
            "task": self.task.name,
            "method": self.method.name,
            "seed": seed,
            "split": split,
            "rate": rate,
        }
        steps = self._settings["steps"]
        if (stored := self.store.find(**key)) is not None:
            self.on_step(steps)
            return stored
        self.say(f"{self.task.name}, {self.method.name}, {split} {seed}, rate {rate:g}")
        run = self._trainer.run(seed, rate, split, self.on_step)
        record = key | self._facts(run)
        self.store.add(record)
        return record

    @property
    def _settings(self):
        return self.store.settings

    @functools.cached_property
    def _trainer(self) -> Trainer:
        settings = self._settings
        return Trainer(self.task, self.method, settings["steps"], settings["workers"])

    @functools.cached_property
    def _costs(self) -> list[Any]:
        """The bytes of the exchange and its seconds, predicted for each link."""
        exchange, params = self._trainer.exchange, self._trainer.params
        return [
            sparsejax.predict(
                exchange,
                params,
                workers=self._settings["workers"],
                bandwidth=bandwidth,
                latency=LATENCY,
            )
            for bandwidth in LINKS.values()
        ]

    def _facts(self, run: Run) -> Record:
        method, target = self.method, self.method.density
        share = run.overflow if method.lossless else 1 / method.period
        each = max(1, method.rounds)
        seconds = [c.least + share * (c.seconds - c.least) for c in self._costs]
        cost = self._costs[0]
        moved = cost.least_bytes + share * (cost.bytes - cost.least_bytes)
        leaves = jax.tree.leaves(self._trainer.params)
        error = None
        if target is not None:
            error = _rounded(np.abs(run.density[1:] / target - 1).max())
        return {
            "quality": _rounded(run.quality),
            "curve": [(step, _rounded(value)) for step, value in run.curve],
            "loss": [_rounded(value) for value in run.loss],
            "density": _rounded(run.density.mean()),
            "density_error": error,
            "parameters": sum(leaf.size for leaf in leaves),
            "bytes_per_step": round(moved / each),
            "exchange_ms": {
                link: _rounded(1e3 * s / each)
                for link, s in zip(LINKS, seconds, strict=True)
            },
            "ms_per_step": _rounded(run.ms_per_step),
        }


def _rounded(value: Any) -> float:
    return float(f"{value:.5g}")
