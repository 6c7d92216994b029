"""Timing several candidates fairly: interleaved, from a common start, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

# From an empty residual thresholds grow by some percent a step, which is not how a
# training step usually finds them: rounds until they have settled.
SETTLED = 12


def interleaved_medians(
    candidates: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    warm_up: int = 3,
    prepare: Callable[[str, int], None] | None = None,
) -> dict[str, float]:
    """Median milliseconds of each candidate.

    All are run once per round, so that what slows the machine down slows all of them
    down alike: their ratios mean more than their times.

    Args:
      candidates: name -> function; what it returns is waited for.
      repeats: rounds that count.
      warm_up: rounds before them.
      prepare: called with name and round before each run, untimed.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warm_up + repeats):
        for name, run in candidates.items():
            if prepare:
                prepare(name, turn)
            meet()
            start = time.perf_counter()
            jax.block_until_ready(run())
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(ms[warm_up:]) for name, ms in samples.items()}


def meet() -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("sparsejax.bench")
