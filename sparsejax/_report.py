"""Reports: exchanges make them, users find them in nested optimizer states."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.parts import Report
from sparsejax.placement._groups import ShardedState

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int


def zero_report(worker_count: int, details: Any = ()) -> Report:
    """The report of a step in which nothing happened."""
    return Report(
        demand=jnp.zeros((worker_count,), jnp.int32),
        sent=jnp.zeros((), jnp.int32),
        density=jnp.zeros((), jnp.float32),
        threshold=jnp.zeros((worker_count,), jnp.float32),
        dropped=jnp.zeros((worker_count,), jnp.bool_),
        details=details,
    )


def whole_report(n: int, dropped: Bool[Array, " w"], details: Any = ()) -> Report:
    """The report of a step in which every coordinate was delivered."""
    count = dropped.shape[0]
    return Report(
        demand=jnp.full((count,), n, jnp.int32),
        sent=jnp.asarray(n, jnp.int32),
        density=jnp.ones((), jnp.float32),
        threshold=jnp.zeros((count,), jnp.float32),
        dropped=dropped,
        details=details,
    )


def sparse_report(
    indices: Int[Array, " m"], n: int, facts: tuple[Array, Array, Array], details=()
) -> Report:
    """The report of a step that delivered `indices`.

    Args:
      indices: Int32[m], replicated, distinct; empty slots hold `n`.
      n: number of coordinates.
      facts: `(demand [w], threshold [w], dropped [w])` of all workers, replicated.
      details: the facts that only this exchange reports.
    """
    return counted_report(jnp.sum(indices < n, dtype=jnp.int32), n, facts, details)


def counted_report(
    sent: Int[Array, ""], n: int, facts: tuple[Array, Array, Array], details=()
) -> Report:
    """The report of a step that delivered `sent` distinct coordinates. Replicated."""
    demand, threshold, dropped = facts
    density = sent.astype(jnp.float32) / max(n, 1)
    return Report(demand, sent, density, threshold, dropped, details)


def reports(opt_state: Any) -> dict[str, Report]:
    """All reports in an optimizer state, by their path.

    Args:
      opt_state: any nesting of optax states; reports are also found where flax nnx, or
        a checkpoint restored without a target, has turned them into dicts.

    Returns:
      A dict from path (in the format of `jax.tree_util.keystr`) to `Report`; empty if
      the state has no report.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> tx = optax.chain(sparsejax.dense(), optax.sgd(0.1))
      >>> state = sparsejax.init(tx, jnp.zeros(3), jax.make_mesh((8,), ("data",)))
      >>> list(sparsejax.reports(state))
      ['[0].report']
    """
    found, _ = jax.tree_util.tree_flatten_with_path(
        opt_state,
        is_leaf=lambda node: (
            isinstance(node, ShardedState) or _report_of(node) is not None
        ),
    )
    made = {}
    for path, node in found:
        if isinstance(node, ShardedState):
            made[jax.tree_util.keystr(path)] = _of_all_shards(node)
        elif (report := _report_of(node)) is not None:
            made[jax.tree_util.keystr(path)] = _unboxed(report)
    return made


def _of_all_shards(state: ShardedState) -> Report:
    """One report of all groups and shards of the parameters.

    Counts are sums over shards, and a worker's threshold is the least of its shards.
    `details` has an entry for each group, with a leading axis for its shards.
    """
    parts = {name: reports(group) for name, group in state.groups.items()}
    each = {name: next(iter(found.values())) for name, found in parts.items()}
    facts = [r._replace(details=()) for r in each.values()]
    total = _total(facts, max(state.sharding.size(), 1))
    return total._replace(details={name: r.details for name, r in each.items()})


# Compiled as a whole: one operation at a time takes a second.
@functools.partial(jax.jit, static_argnums=1)
def _total(each: list[Report], n: int) -> Report:
    """One report of n coordinates, without details."""

    def per_worker(field, combine):
        rows = [getattr(r, field) for r in each]
        rows = [row.reshape(-1, row.shape[-1]) for row in rows]
        return combine(jnp.concatenate(rows), axis=0)

    sent = jnp.stack([jnp.sum(r.sent, dtype=jnp.int32) for r in each])
    sent = jnp.sum(sent, dtype=jnp.int32)
    return Report(
        demand=per_worker("demand", jnp.sum),
        sent=sent,
        density=sent.astype(jnp.float32) / n,
        threshold=per_worker("threshold", jnp.min),
        dropped=per_worker("dropped", jnp.any),
        details=(),
    )


def _report_of(node: Any) -> Report | None:
    """`node` as a `Report`, if it is one or a dict with its fields; otherwise None."""
    if isinstance(node, Report):
        return node
    fields = [name for name in Report._fields if name != "details"]
    if not isinstance(node, Mapping) or not set(fields) <= set(node):
        return None
    details = dict(node.get("details") or {})  # empty details have no entry
    record: Any = collections.namedtuple
    details = record("Details", sorted(details))(**details)
    return Report(**{name: node[name] for name in fields}, details=details)


def _unboxed(report: Report) -> Report:
    """The report with plain arrays: `nnx.Optimizer` wraps each array in a variable."""
    return jax.tree.map(
        lambda box: jax.tree.leaves(box)[0],
        report,
        is_leaf=lambda node: not isinstance(node, tuple),
    )


def log_row(report: Report) -> dict[str, float]:
    """Returns a flat row of plain floats for any logger: means, extremes and counts.

    Fetches the report to the host, and so waits for the step: do not call it in every
    step.

    Args:
      report: the `Report` of one transformation, outside of `jax.jit`.

    Returns:
      `sent` and `density` of the report; `demand`, the number of coordinates that
      qualified on all workers; `threshold_mean`, `threshold_min` and `threshold_max`
      over the workers with a finite threshold (0 if no worker has one); `dropped`, the
      number of workers that were left out; and every scalar of `report.details` as
      `details/<name>`.

    Raises:
      TypeError: if `report` is not a `Report`, but for example a whole optimizer state.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> tx = sparsejax.exdyna(density=0.01)
      >>> state = sparsejax.init(tx, jnp.zeros(500), jax.make_mesh((8,), ("data",)))
      >>> sparsejax.log_row(sparsejax.report(state))["density"]
      0.0
    """
    if not isinstance(report, Report):
        raise TypeError(
            f"log_row: got a {type(report).__name__}, expected a `Report`, such as "
            f"`sparsejax.report(opt_state)`."
        )
    report = jax.device_get(_unboxed(report))
    threshold = np.asarray(report.threshold, np.float64)
    threshold = threshold[np.isfinite(threshold)]
    threshold = threshold if threshold.size else np.zeros(1)
    row = {
        "sent": np.mean(report.sent),
        "density": np.mean(report.density),
        "demand": np.sum(report.demand, dtype=np.float64),
        "threshold_mean": threshold.mean(),
        "threshold_min": threshold.min(),
        "threshold_max": threshold.max(),
        "dropped": np.sum(report.dropped),
    }
    for path, value in jax.tree_util.tree_leaves_with_path(report.details):
        if np.size(value) == 1:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            row[f"details/{name}"] = np.ravel(value)[0]
    return {name: float(value) for name, value in row.items()}


def report(opt_state: Any) -> Report:
    """The only report in an optimizer state: the facts of the last step.

    Args:
      opt_state: any nesting of optax states with one sparsejax transformation.

    Returns:
      The `Report`, replicated; zeros before the first step.

    Raises:
      ValueError: if there is no report, or more than one.

    Example:
      >>> import jax, jax.numpy as jnp, optax, sparsejax
      >>> tx = optax.chain(sparsejax.exdyna(density=0.01), optax.sgd(0.1))
      >>> state = sparsejax.init(tx, jnp.zeros(500), jax.make_mesh((8,), ("data",)))
      >>> int(sparsejax.report(state).sent)
      0
    """
    found = reports(opt_state)
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise ValueError(
            "report: this state holds no sparsejax state. Pass the optimizer state of "
            "a transformation that contains a sparsejax recipe."
        )
    raise ValueError(
        f"report: this state holds {len(found)} sparsejax states "
        f"({', '.join(found)}). Use `sparsejax.reports(opt_state)`, which returns all "
        f"of them by path."
    )
