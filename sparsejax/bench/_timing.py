"""Times several candidates fairly: medians of interleaved runs, started together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

# Rounds until thresholds have settled. From an empty residual they grow by several per
# cent per step, which is not the usual state in training.
SETTLED = 12


def interleaved_medians(
    candidates: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    warm_up: int = 3,
    prepare: Callable[[str, int], None] | None = None,
) -> dict[str, float]:
    """Median milliseconds of each candidate.

    Each round runs every candidate once, so a slow phase of the machine affects all
    candidates alike: ratios are more reliable than times. Rounds begin with each
    candidate in turn.

    Args:
      candidates: name -> function; the timing waits for the function's result.
      repeats: the number of timed rounds.
      warm_up: the number of untimed rounds before these.
      prepare: called with name and round before each run, untimed.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for turn in range(warm_up + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if prepare:
                prepare(name, turn)
            meet()
            start = time.perf_counter()
            jax.block_until_ready(candidates[name]())
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(ms[warm_up:]) for name, ms in samples.items()}


def meet() -> None:
    """Waits until all processes have called this function."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("sparsejax.bench")
