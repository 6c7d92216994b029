"""Facts of a report that agree with each other, whatever the method."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsejax.testing._values import coordinates, require, sparsify_states


def require_true_reports(state: Any) -> None:
    """Raises AssertionError with the first field of a report that cannot be true.

    Args:
      state: a state on the host, with the reports of its last step.
    """
    for node in sparsify_states(state):
        report, n = node.report, coordinates(node)
        sent, density = np.asarray(report.sent), np.asarray(report.density)
        demand, threshold = np.asarray(report.demand), np.asarray(report.threshold)
        require(
            np.all((sent >= 0) & (sent <= n)),
            "`report.sent` counts distinct coordinates",
            f"it is {sent}, and n is {n}",
            "count each delivered coordinate once, and no empty slot",
        )
        # With n = 0 the density may be any number.
        require(
            n == 0 or np.allclose(density, sent / n, rtol=1e-6, atol=0),
            "`report.density` is `sent / n`",
            f"it is {density}, sent is {sent}, and n is {n}",
            "compute it as `sent.astype(jnp.float32) / max(step.n, 1)`",
        )
        require(
            np.all(demand >= 0),
            "`report.demand` counts coordinates",
            f"it is {demand.tolist()}",
            "pass on `Choice.demand` of each worker, the number that qualified",
        )
        require(
            not np.any(np.isnan(threshold)),
            "`report.threshold` is a number",
            f"it is {threshold.tolist()}",
            "a rule divides by a norm or count that is 0; 0 stands for no threshold",
        )
