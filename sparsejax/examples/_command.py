"""The command line of the examples."""

from __future__ import annotations

import argparse
import functools
import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np
import tqdm

import sparsejax
from sparsejax.examples import _cluster
from sparsejax.examples._table import Row, format_table, to_json
from sparsejax.examples._training import (
    RECIPES,
    Metrics,
    Recipe,
    Run,
    Task,
    Trainer,
    place,
)

_DEFAULT_WORKERS = 8
# Steps between two losses on the progress bar: reading a loss waits for the device.
_SHOW_LOSS_EVERY = 25


def main(
    make_task: Callable[[], Task],
    description: str,
    steps: int,
    argv: Sequence[str] | None = None,
    recipes: dict[str, Recipe] = RECIPES,
    default: str = "dense,exdyna,micro",
) -> None:
    """Trains a task with several recipes and prints one table.

    Args:
      make_task: makes the task; called after `_cluster.connect`.
      description: the text of `--help`.
      steps: the default of `--steps`.
      argv: the arguments; None for the process's arguments.
      recipes: the recipes that `--recipe` can name.
      default: the default of `--recipe`.
    """
    parser = _parser(description, steps, recipes, default)
    options = parser.parse_args(argv)
    if options.steps < 2:
        parser.error(f"--steps: got {options.steps}, need 2 or more")
    if options.seeds < 1:
        parser.error(f"--seeds: got {options.seeds}, need 1 or more")
    _check_rounds(parser, options.steps, options.local_steps)
    try:
        exchanges = {
            name: recipes[name].build(options.density) for name in options.recipe
        }
        _cluster.connect(options.workers or _DEFAULT_WORKERS)
        task = make_task()
        mesh = _cluster.make_mesh(options.workers, task.placement.axes)
    except ValueError as error:
        parser.error(str(error))

    runs = len(exchanges) * options.seeds
    # disable=None hides the bar if stderr is not a terminal.
    quiet = options.quiet or jax.process_index() > 0 or None
    rows: list[Row] = []
    with tqdm.tqdm(total=runs * options.steps, unit="step", disable=quiet) as bar:

        def on_step(metrics: Metrics) -> None:
            bar.update(options.local_steps)
            if not bar.disable and bar.n % _SHOW_LOSS_EVERY == 0:
                bar.set_postfix(loss=f"{float(metrics.loss.mean()):.3f}")

        params = place(task.init(0), task.placement, mesh)
        axis = task.placement.axis_name
        workers = mesh.shape[axis]
        dense = sparsejax.dense(axis_name=axis)
        size = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
        dense_bytes = _bytes_per_step(dense, params, workers, axis)[1]
        for name, exchange in exchanges.items():
            trainer = Trainer(task, exchange, mesh, options.steps, options.local_steps)
            least, most = _bytes_per_step(trainer.tx, params, workers, axis)
            for seed in range(options.seeds):
                bar.set_description(f"{name}, seed {seed}")
                run = trainer.run(seed, on_step)
                recipe = recipes[name]
                share = run.overflow if recipe.lossless else 1 / recipe.period
                received = least + share * (most - least)
                target = recipe.target(options.density)
                rows.append(_row(name, seed, target, received, dense_bytes, run))

    if jax.process_index() > 0:
        return
    alone = f"in rounds of {options.local_steps}, " if options.local_steps > 1 else ""
    print(
        f"{task.name}: {size:,} parameters, {workers} workers "
        f"({jax.devices()[0].platform}), {options.steps} steps, {alone}"
        f"mean of {options.seeds} seed{'s' if options.seeds > 1 else ''}\n\n"
        f"{format_table(rows)}"
    )
    if options.json:
        options.json.write_text(to_json(rows) + "\n")


def _parser(
    description: str, steps: int, recipes: dict[str, Recipe], default: str
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--recipe",
        type=functools.partial(_recipes, recipes),
        default=default,
        metavar="A,B,C",
        help=f"some of {', '.join(recipes)}, or all; default: %(default)s",
    )
    add("--density", type=float, default=0.01, help="default: %(default)s")
    add(
        "--workers",
        type=int,
        help=f"default: all accelerators, or {_DEFAULT_WORKERS} virtual CPU devices",
    )
    add("--steps", type=int, default=steps, help="default: %(default)s")
    add(
        "--local-steps",
        type=int,
        default=1,
        metavar="H",
        help="each worker trains alone for H of the steps, and then the sum of its "
        "updates is exchanged; default: %(default)s",
    )
    add("--seeds", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--json", type=pathlib.Path, metavar="FILE", help="also write the rows here")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def _check_rounds(parser: argparse.ArgumentParser, steps: int, local: int) -> None:
    """Ends the program unless the steps are two or more whole rounds."""
    if local < 1:
        parser.error(f"--local-steps: got {local}, need 1 or more")
    if steps % local or steps < 2 * local:
        nearest = local * max(2, round(steps / local))
        parser.error(
            f"--local-steps: got {local}, and {steps} steps are not two or more rounds "
            f"of {local}; set --steps {nearest}"
        )


def _recipes(recipes: dict[str, Recipe], text: str) -> list[str]:
    if text == "all":
        return list(recipes)
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in recipes]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown recipe {unknown[0]!r}; there are {', '.join(recipes)}"
        )
    return names


def _bytes_per_step(exchange, params, workers: int, axis: str) -> tuple[float, float]:
    """The bytes of the cheapest step, and of the most expensive step."""
    moved = sparsejax.wire_bytes(exchange, params, workers=workers, axis_name=axis)
    return moved.least, moved.total


def _row(
    recipe: str,
    seed: int,
    target: float | None,
    received: float,
    dense: float,
    run: Run,
) -> Row:
    error = None
    if target is not None:
        error = float(np.abs(run.density[1:] / target - 1).max())
    return Row(
        recipe=recipe,
        seed=seed,
        test_accuracy=run.accuracy,
        density_target=target,
        density_mean=float(run.density.mean()),
        density_worst_error=error,
        bytes_per_step=int(received),
        dense_bytes_per_step=int(dense),
        ms_per_step=run.ms_per_step,
    )
