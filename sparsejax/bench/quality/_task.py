"""The record of a task: a model, its data, and its usual training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import optax

if TYPE_CHECKING:
    from jaxtyping import Array, Float

Params = Any
Batch = Any

VALIDATION, TEST = "validation", "test"


class Task(NamedTuple):
    """A task on which methods are compared.

    Attributes:
      name: the name on the command line.
      metric: the measure of quality.
      higher: whether a higher value is better.
      tolerance: a difference to dense that does not matter, in units of the metric, or
        as a fraction of dense's value if `relative`.
      relative: see `tolerance`.
      init: seed -> parameters, numpy arrays.
      loss: (parameters, batch [b, ...]) -> Float[], the mean over the batch.
      batches: (seed, steps, workers) -> numpy arrays [steps, w, b, ...].
      quality: (parameters, split) -> Float[].
      splits: the data of VALIDATION and of TEST, with equal shapes.
      direction: momentum -> the optimizer without its learning rate.
      warm_up: fraction of the steps over which the rate rises from 0. Then it
        falls back to 0 along a cosine.
      rates: the grid of learning rates.
      local_rates: the grid for AdamW on each worker, in rounds of local steps.
      sparse: the names of the parameters whose gradients are mostly rows of zeros.
    """

    name: str
    metric: str
    higher: bool
    tolerance: float
    relative: bool
    init: Callable[[int], Params]
    loss: Callable[[Params, Batch], Float[Array, ""]]
    batches: Callable[[int, int, int], Batch]
    quality: Callable[[Params, Any], Float[Array, ""]]
    splits: Mapping[str, Any]
    direction: Callable[[float], optax.GradientTransformation]
    warm_up: float
    rates: tuple[float, ...]
    local_rates: tuple[float, ...]
    sparse: tuple[str, ...] = ()

    def schedule(self, rate: Float[Array, ""] | float, steps: int) -> optax.Schedule:
        """The learning rate of each step; its peak may be traced."""
        shape = optax.warmup_cosine_decay_schedule(
            0.0, 1.0, max(1, int(self.warm_up * steps)), steps
        )
        return lambda count: rate * shape(count)
