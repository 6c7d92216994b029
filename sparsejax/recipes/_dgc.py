"""Deep Gradient Compression."""

from __future__ import annotations

import math
from typing import Any

import optax

from sparsejax import memories, sparsifiers
from sparsejax._checks import check_number, check_optional_count
from sparsejax._transform import sparsify
from sparsejax._views import over_rows
from sparsejax._workers import AxisName, Workers
from sparsejax.parts import Exchange
from sparsejax.recipes._default_exchange import exchange_or_pairs
from sparsejax.recipes._ladder import ladder

# As published, the densities of the warm-up are 25 %, 6.25 %, 1.56 %, ...
_FIRST_DENSITY, _FACTOR = 0.25, 0.25


def dgc(
    density: float = 0.01,
    momentum: float = 0.9,
    *,
    warmup_steps: int = 0,
    clip_norm: float | None = None,
    axis_name: AxisName = "data",
    exchange: Exchange | None = None,
    value_bits: Any = None,
    capacity: int | None = None,
    nonfinite: str = "drop",
) -> optax.GradientTransformationExtraArgs:
    """Each worker sends its largest accumulated velocities.

        velocity_r = momentum velocity_r + gradient_r
        acc_r = residual_r + velocity_r
        update = (1/w) sum_r acc_r[S_r],  S_r = {|acc_r| >= t_r},

    and residual and velocity are cleared at `S_r`. The threshold `t_r` is the density's
    quantile in a sample of `|acc_r|`: 1 % of the coordinates, or 100 / density of them
    if that is more. **Use plain SGD after `dgc`**: this recipe already applies
    momentum, which makes steps up to 1/(1 - momentum) times as long.

    Args:
      density: fraction of the coordinates that each worker sends, in (0, 1].
      momentum: in [0, 1).
      warmup_steps: the number of steps at each of the densities 25 %, 6.25 %, ... above
        `density`; each density is a branch of the program. The first densities save
        little or nothing: with `pairs`, 25 % moves 0.14 w times the bytes of `dense`,
        but never more than `dense`, and 6.25 % moves 0.037 w times as many.
      clip_norm: each worker first clips its gradient to the norm `clip_norm / sqrt(w)`.
      axis_name: see `sparsejax.sparsify`.
      exchange: see `sparsejax.topk`.
      value_bits: see `sparsejax.exchanges.pairs`.
      capacity: slots per worker after warm-up; by default `max(1, floor(density n))`.
      nonfinite: see `sparsejax.sparsify`.

    Returns:
      An optax transformation, with a residual and a velocity [n] per worker.

    Departs from the paper: the sample has 100 / density coordinates where 1 % is fewer.
    There is no second selection if the sample gives too low a threshold; coordinates of
    evenly strided rank fill the message.

    Example:
      >>> import optax, sparsejax
      >>> tx = optax.chain(sparsejax.dgc(0.001, momentum=0.9), optax.sgd(0.01))

    References:
      Lin, Han, Mao, Wang and Dally, "Deep Gradient Compression: Reducing the
      Communication Bandwidth for Distributed Training", ICLR 2018 (arXiv 1712.01887).
    """
    delivers = exchange_or_pairs(exchange, value_bits)
    memory = memories.momentum_correction(momentum)
    steps = check_optional_count("warmup_steps", warmup_steps, 0) or 0

    def at(density, capacity):
        return sparsify(
            sparsifiers.sampled(density, capacity=capacity),
            exchange=delivers,
            memory=memory,
            axis_name=axis_name,
            nonfinite=nonfinite,
        )

    tx, start = at(density, capacity), _FIRST_DENSITY
    rungs = []
    while steps and start > density:
        rungs.append(at(start, None))
        start *= _FACTOR
    workers = Workers(axis_name)
    if rungs:
        tx = ladder([*rungs, tx], steps, workers)
    if clip_norm is None:
        return tx
    meaning = "a positive number, or None for no clipping"
    norm = check_number("clip_norm", clip_norm, lambda x: 0 < x < math.inf, meaning)
    return optax.chain(_clip_locally(norm, workers), tx)


def _clip_locally(norm, workers):
    """Clips each worker's gradient to its share of a bound on the norm of their sum.

    The share is right for uncorrelated gradients.
    """

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        clip = optax.clip_by_global_norm(norm / workers.known_count() ** 0.5)
        return clip.update(updates, state)

    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), over_rows(update, workers)
    )
