"""The command line of `quality`."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import tqdm

from sparsejax.bench.quality import _compare, _images, _ratings, _report, _text
from sparsejax.bench.quality._data import MissingDataError
from sparsejax.bench.quality._methods import METHODS, Method
from sparsejax.bench.quality._store import Store, StoreError
from sparsejax.bench.quality._task import Task

TASKS: dict[str, ModuleType] = {"images": _images, "text": _text, "ratings": _ratings}
_SEEDS = {"default": 3, "full": 5}
_WORKERS = 8


def main(argv: Sequence[str], show: Callable[[list[dict]], str]) -> None:
    """Trains the missing runs, and prints a table for each task.

    Args:
      argv: the arguments after `quality`.
      show: formats rows as a table.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        methods = _chosen(options.set, options.recipe)
        _check_steps(methods, options.steps)
        tasks = [_load(name) for name in options.task]
        settings = {"steps": options.steps, "workers": _WORKERS}
        store = Store(options.json, settings)
    except (ValueError, MissingDataError, StoreError) as error:
        parser.error(str(error))
    seeds = range(options.seeds or _SEEDS[options.set])
    runs = sum(
        _compare.runs_of(method, len(seeds), task)
        for method in methods
        for task in tasks
    )
    total = runs * options.steps
    with tqdm.tqdm(total=total, unit="step", disable=options.quiet or None) as bar:
        for method in methods:
            for task in tasks:
                _compare.compare(
                    task, [method], seeds, store, bar.set_description, bar.update
                )
                if options.time:
                    _compare.time_again(task, [method], store)
            # No other row uses the programs of this one.
            jax.clear_caches()
    lines = _report.summarise({"settings": settings, "runs": store.runs})
    for task in tasks:
        own = [line for line in lines if line.task == task.name]
        parameters = next(r["parameters"] for r in store.runs if r["task"] == task.name)
        print(f"\n{task.name}: {parameters:,} parameters, {_WORKERS} workers, ", end="")
        print(f"{options.steps} steps; seconds to dense's quality by link\n")
        print(show(_report.format_lines(own)))


def _load(name: str) -> Task:
    module = TASKS[name]
    return module.make_task(module.load())


def _chosen(kind: str, names: list[str] | None) -> list[Method]:
    """Dense, and the rows with these names.

    The name of a recipe that is not the name of a row selects all rows of the recipe.
    """
    methods = METHODS[kind]
    if names is None:
        return list(methods.values())
    known = {*methods, *(method.recipe for method in methods.values())}
    for name in names:
        if name not in known:
            raise ValueError(
                f"--recipe: unknown {name!r} in the {kind} set; one of "
                f"{', '.join(sorted(known))}"
            )
    wanted = {"dense", *names}
    recipes = wanted - set(methods)
    return [m for m in methods.values() if m.name in wanted or m.recipe in recipes]


def _check_steps(methods: list[Method], steps: int) -> None:
    for method in methods:
        if method.rounds and steps % method.rounds:
            raise ValueError(
                f"--steps: {steps} is not a multiple of the {method.rounds} local "
                f"steps of {method.name}"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sparsejax.bench quality",
        description="Trains three tasks with every method: is it as good as dense?",
    )
    add = parser.add_argument
    add(
        "--task",
        type=lambda text: [_known(name) for name in text.split(",")],
        default="images,text,ratings",
        metavar="A,B",
        help="default: %(default)s",
    )
    add(
        "--recipe",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="rows of the set, by name, such as exdyna or sparseloco; default: all",
    )
    add("--set", choices=tuple(METHODS), default="default", help="default: %(default)s")
    add("--seeds", type=int, help="default: 3, or 5 for the full set")
    add("--steps", type=int, default=300, help="default: %(default)s")
    add(
        "--json",
        type=pathlib.Path,
        metavar="FILE",
        help="keep finished runs here; a later call continues from them",
    )
    add(
        "--time",
        action="store_true",
        help="also time steps of finished rows again, on a machine that is idle now",
    )
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def _known(name: str) -> str:
    if name not in TASKS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(TASKS)}")
    return name
