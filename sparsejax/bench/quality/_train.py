"""Trains a task with a method: all workers on one device, one compilation per row."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax
from sparsejax.bench.quality._methods import Method
from sparsejax.bench.quality._task import TEST, Task
from sparsejax.examples._training import exchanged

# The reported quantile of the wall times: other programs slow most steps down.
_QUANTILE = 0.05
# Measurements of the quality in a run.
_MEASURED = 10


class Run(NamedTuple):
    """The results of a training run.

    Attributes:
      quality: the quality after the last step.
      curve: pairs of steps and quality.
      loss: means of the training loss over the steps between two points of `curve`.
      density: Float[exchanges], achieved in each exchange.
      overflow: fraction of the exchanges that were dense because something did not fit.
      ms_per_step: the 5 % quantile of the wall time of a step of all workers.
    """

    quality: float
    curve: list[tuple[int, float]]
    loss: list[float]
    density: np.ndarray
    overflow: float
    ms_per_step: float


class Trainer:
    """Compiles the step of one method once, and runs it for any rate and seed."""

    def __init__(self, task: Task, method: Method, steps: int, workers: int):
        self.task, self.method = task, method
        self.steps, self.workers = steps, workers
        self.params = task.init(0)
        self.exchange = method.exchange(task.sparse, list(self.params))
        self._step = jax.jit(self._update, donate_argnums=(1, 2))
        self._quality = jax.jit(task.quality)

    def run(
        self,
        seed: int,
        rate: float,
        split: str = TEST,
        on_step: Callable[[int], None] = lambda steps: None,
    ) -> Run:
        """Trains from the initial parameters of `seed`, with its batches."""
        params = jax.tree.map(jnp.asarray, self.task.init(seed))
        state = self._training(0.0).init(params)
        each = max(1, self.method.rounds)
        batches = self.task.batches(seed, self.steps, self.workers)
        curve, logged, seconds = [], [], []
        every = max(each, self.steps // _MEASURED)
        for i in range(0, self.steps, each):
            batch = jax.tree.map(lambda x, i=i: x[i : i + each], batches)
            start = time.perf_counter()
            params, state, metrics = self._step(rate, params, state, batch)
            jax.block_until_ready(params)
            seconds.append((time.perf_counter() - start) / each)
            logged.append(metrics)
            done = i + each
            if done % every == 0 or done == self.steps:
                quality = self._quality(params, self.task.splits[split])
                curve.append((done, float(quality)))
            on_step(each)
        loss, density, overflow = map(
            np.array, zip(*jax.device_get(logged), strict=True)
        )
        parts = np.array_split(loss.reshape(-1), len(curve))
        return Run(
            curve[-1][1],
            curve,
            [float(part.mean()) for part in parts],
            density,
            float(overflow.mean()),
            1e3 * float(np.quantile(seconds[1:] or seconds, _QUANTILE)),
        )

    def _training(self, rate):
        """The transformation of the gradients, or rounds that include local steps."""
        method, exchange = self.method, self.exchange
        schedule = self.task.schedule(rate, self.steps)
        if method.rounds:
            inner, outer = optax.adamw(schedule), optax.chain(exchange, method.outer)
            training = sparsejax.rounds(
                self.task.loss, inner, outer, steps=method.rounds
            )
            return sparsejax.simulate(training, workers=self.workers)
        direction = self.task.direction(method.momentum)
        scale = optax.scale_by_learning_rate(schedule)
        if method.before:
            exchange = optax.chain(sparsejax.per_worker(direction), scale, exchange)
            return sparsejax.simulate(exchange, workers=self.workers)
        exchange = sparsejax.simulate(exchange, workers=self.workers)
        return optax.chain(exchange, direction, scale)

    def _update(self, rate, params, state, batch):
        """One exchange: (rate, params, state, batch [steps, w, b, ...]) -> ..."""
        training = self._training(rate)
        if self.method.rounds:
            batch = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batch)
            params, state, loss = training.step(params, state, batch)
            return params, state, (loss, *exchanged(state, params))
        first = jax.tree.map(lambda x: x[0], batch)
        gradient = jax.value_and_grad(self.task.loss)
        loss, grads = jax.vmap(gradient, (None, 0))(params, first)
        updates, state = training.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, (jnp.mean(loss)[None], *exchanged(state, params))
