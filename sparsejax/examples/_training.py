"""Trains a task with a recipe: the data-parallel loop that the examples share."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import sparsejax
from sparsejax.recipes._table import TABLE

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float

Params = Any
Batch = Any

# The first steps compile and fill caches; they are not timed.
_WARM_UP = 5


class Recipe(NamedTuple):
    """A way to exchange gradients.

    Attributes:
      build: density -> transformation.
      everything: whether the recipe sends the whole gradient, whatever the density.
      lossless: whether the recipe sends exactly the non-zeros, at least of some leaves.
      period: steps from one of the most expensive steps to the next; all other steps
        are the cheapest ones.
    """

    build: Callable[[float], optax.GradientTransformation]
    everything: bool = False
    lossless: bool = False
    period: int = 1

    def target(self, density: float) -> float | None:
        """The density that a run with `density` should achieve; None if lossless."""
        if self.lossless:
            return None
        return 1.0 if self.everything else density


RECIPES: dict[str, Recipe] = {
    name: Recipe(row.build, everything=row.density is None, period=row.period)
    for name, row in TABLE.items()
    if not row.lossless  # A dense gradient has no zeros to leave out.
}


class Placement(NamedTuple):
    """How a task is placed on the devices.

    Attributes:
      axes: axes of the mesh. All but the first have two devices if there are enough.
      specs: a tree of `PartitionSpec`s like the parameters, or one for all.
      axis_name: the axis of the workers.
      batch: how the first axis of a batch is sharded.
    """

    axes: tuple[str, ...] = ("data",)
    specs: Any = PartitionSpec()
    axis_name: str = "data"
    batch: PartitionSpec = PartitionSpec("data")


class Task(NamedTuple):
    """A model, its data and its loss.

    Attributes:
      name: the name in the table.
      init: seed -> params.
      loss: (params, batch) -> Float[], the mean over the examples in the batch.
      batches: (seed, size) -> endless iterator of batches, pytrees of numpy arrays
        [size, ...]. Equal on all processes.
      batch_size: examples per step, of all workers together; rounded to a multiple of
        the number of workers.
      accuracy: params -> test accuracy in [0, 1].
      optimizer: steps -> the transformation after the exchange.
      placement: the axes of the mesh, and how arrays are sharded over them.
    """

    name: str
    init: Callable[[int], Params]
    loss: Callable[[Params, Batch], Float[Array, ""]]
    batches: Callable[[int, int], Iterator[Batch]]
    batch_size: int
    accuracy: Callable[[Params], float]
    optimizer: Callable[[int], optax.GradientTransformation]
    placement: Placement = Placement()


class Run(NamedTuple):
    """The results of a training run.

    Attributes:
      accuracy: test accuracy after the last step.
      loss: Float[steps].
      density: Float[exchanges], achieved in each exchange.
      overflow: fraction of the exchanges that were dense because something did not fit.
      ms_per_step: median wall time of a step after warm-up, from the call until the new
        parameters are computed, without the time to load the batch. In rounds the
        time of a round, divided by its steps.
    """

    accuracy: float
    loss: np.ndarray
    density: np.ndarray
    overflow: float
    ms_per_step: float


class Metrics(NamedTuple):
    """The numbers that a step or a round logs, replicated.

    Attributes:
      loss: Float[], mean over the global batch; in a round Float[H], one per step.
      density: Float[], fraction of the coordinates that were exchanged, or that each
        worker sent if `density` is per worker.
      overflow: Bool[], whether something did not fit into its message.
    """

    loss: Float[Array, ""] | Float[Array, "H"]
    density: Float[Array, ""]
    overflow: Bool[Array, ""]


class Trainer:
    """Compiles the step of one recipe once and runs it for any number of seeds.

    With `local_steps` above 1 it compiles a round: each worker takes that many steps
    of the task's optimizer alone, and the recipe exchanges their sum.
    """

    tx: optax.GradientTransformation | sparsejax.Rounds

    def __init__(
        self,
        task: Task,
        exchange: optax.GradientTransformation,
        mesh: jax.sharding.Mesh,
        steps: int,
        local_steps: int = 1,
    ):
        self.task, self.mesh, self.steps = task, mesh, steps
        self.local_steps = local_steps
        optimizer, axis = task.optimizer(steps), task.placement.axis_name
        if local_steps == 1:
            self.tx = optax.chain(exchange, optimizer)
            self._step = _make_step(self.tx, task.loss, axis)
            batch = task.placement.batch
        else:
            outer = optax.chain(exchange, optax.sgd(1.0))
            self.tx = sparsejax.rounds(
                task.loss, optimizer, outer, steps=local_steps, axis_name=axis
            )
            self._step = _make_round(self.tx)
            batch = PartitionSpec(None, *task.placement.batch)
        self._per_worker = NamedSharding(mesh, batch)

    def run(self, seed: int, on_step: Callable[[Metrics], None]) -> Run:
        """Trains from the initial parameters of `seed`."""
        size = max(1, self.task.batch_size // self.mesh.size) * self.mesh.size
        batches = self.task.batches(seed, size)
        params, opt_state = self._init(seed)
        logged, seconds = [], []
        for _ in range(self.steps // self.local_steps):
            batch = jax.tree.map(self._place, self._next(batches))
            start = time.perf_counter()
            with jax.set_mesh(self.mesh):
                params, opt_state, metrics = self._step(params, opt_state, batch)
            # Needed for the timing. Besides, with several steps in flight and more
            # virtual devices than cores, threads could wait for each other forever.
            jax.block_until_ready((params, metrics))
            seconds.append(time.perf_counter() - start)
            logged.append(metrics)
            on_step(metrics)
        timed = seconds[min(_WARM_UP, len(seconds) - 1) :]
        metrics = jax.tree.map(lambda *x: np.asarray(x), *jax.device_get(logged))
        return Run(
            self._accuracy(params),
            metrics.loss.reshape(-1),
            metrics.density,
            float(metrics.overflow.mean()),
            1e3 * statistics.median(timed) / self.local_steps,
        )

    def _accuracy(self, params: Params) -> float:
        if self.task.placement.specs == PartitionSpec():
            # Every device has the parameters, so one device can test.
            params = jax.tree.map(lambda p: p.addressable_data(0), params)
        return self.task.accuracy(params)

    def _init(self, seed: int) -> tuple[Params, optax.OptState]:
        params = place(self.task.init(seed), self.task.placement, self.mesh)
        return params, sparsejax.init(self.tx, params, self.mesh)

    def _next(self, batches: Iterator[Batch]) -> Batch:
        """The batch of a step, or the stacked batches of a round, [H, size, ...]."""
        if self.local_steps == 1:
            return next(batches)
        several = itertools.islice(batches, self.local_steps)
        return jax.tree.map(lambda *rows: np.stack(rows), *several)

    def _place(self, rows: np.ndarray) -> Array:
        examples = 0 if self.local_steps == 1 else 1  # the axis of the examples
        parts = np.split(rows, jax.process_count(), axis=examples)
        return jax.make_array_from_process_local_data(
            self._per_worker, parts[jax.process_index()], rows.shape
        )


def place(params: Params, placement: Placement, mesh: jax.sharding.Mesh) -> Params:
    """The parameters on the devices of the mesh."""
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        placement.specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return jax.device_put(params, shardings)


def _make_step(
    tx: optax.GradientTransformation,
    loss: Callable[[Params, Batch], Float[Array, ""]],
    axis_name: str,
) -> Callable[..., Any]:
    """The step of all workers: (params, opt_state, batch) -> (..., Metrics)."""

    # Donation lets the residual be updated in place.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        value, grads = sparsejax.value_and_grad(loss, axis_name=axis_name)(
            params, batch
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, Metrics(value, *exchanged(opt_state, params))

    return step


def _make_round(training: sparsejax.Rounds) -> Callable[..., Any]:
    """A round of all workers, like `_make_step`; batches are [H, w b, ...]."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batches):
        params, state, losses = training.step(params, state, batches)
        return params, state, Metrics(losses, *exchanged(state, params))

    return step


def exchanged(opt_state, params):
    """The density over all of `params`, and whether anything overflowed."""
    reports = sparsejax.reports(opt_state).values()
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
    sent = sum(_sent(report) for report in reports)
    flags = [getattr(report.details, "overflow", False) for report in reports]
    return sent / size, jnp.any(jnp.stack([jnp.asarray(flag) for flag in flags]))


def _sent(report: sparsejax.Report) -> Float[Array, ""]:
    """The number of coordinates sent, by each worker if `density` is per worker."""
    if hasattr(report.details, "chosen"):
        return jnp.mean(report.details.chosen.astype(jnp.float32))
    return report.sent.astype(jnp.float32)
