"""`predict`: the time of an exchange on links of a given speed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import optax

from sparsejax._checks import check_number
from sparsejax._workers import AxisName
from sparsejax.planning._arguments import refuse_arrays
from sparsejax.planning._collectives import (
    Operation,
    add_up,
    received,
    received_bytes,
    summarise,
)
from sparsejax.planning._traced import trace

if TYPE_CHECKING:
    from sparsejax.placement._rounds import Rounds


class Prediction(NamedTuple):
    """Seconds and bytes that `predict` expects for a step.

    Attributes:
      seconds: seconds of the exchange, with the most expensive branch of each
        conditional.
      least: seconds with the cheapest branch of each conditional: a step without
        overflow, or a one-bit step of `marsit`.
      bytes: the bytes that each worker receives, as `wire_bytes(...).total`.
      least_bytes: the bytes that each worker receives, as `wire_bytes(...).least`.
    """

    seconds: float
    least: float
    bytes: float
    least_bytes: float


def predict(
    tx: optax.GradientTransformation | Rounds,
    params: Any,
    *,
    workers: int | tuple[int, ...],
    bandwidth: float,
    latency: float,
    compute: float = 0.0,
    axis_name: AxisName = "data",
) -> Prediction:
    """Seconds that an exchange takes, from the collectives of the traced step.

    The collectives run one after the other. Each takes `messages latency + bytes /
    bandwidth`, by the fastest of the algorithms that libraries choose from. With w
    workers, r = ceil(log2 w), and an operand (for an all-gather, a result) of S bytes:

    | collective | algorithm | messages | bytes |
    |---|---|---|---|
    | all-reduce | ring | 2 (w-1) | 2 (w-1)/w S |
    | | tree | 2 r | 2 S |
    | all-gather | recursive doubling | r | (w-1)/w S |
    | reduce-scatter | recursive halving | r | (w-1)/w S |
    | all-to-all | direct | w-1 | (w-1)/w S |
    | | Bruck's | r | r/2 S |
    | permute | direct | 1 | S |

    A ring gathers and scatters the same bytes in w-1 messages, so a library with rings
    only is slower than predicted. The trace does not reveal how long workers compute:
    measure that time once, on one machine without a link, and pass it as `compute`.

    Args:
      tx: a transformation that holds sparsejax ones; or a `sparsejax.Rounds`, whose
        exchange is spread over its local steps. One without collectives, such as
        `optax.sgd`, receives no bytes and takes `compute` seconds.
      params: pytree of arrays or `jax.ShapeDtypeStruct`s, as for `wire_bytes`.
      workers: number of workers; one number per axis if `axis_name` is a tuple.
      bandwidth: bits per second that each worker receives: 1e9 for 1 Gbit/s.
      latency: seconds per message.
      compute: seconds of computation of a worker in an exchange.
      axis_name: the mesh axis of the workers, or a tuple of axes.

    Returns:
      A `Prediction`. Its bytes agree with `wire_bytes`; a tree and Bruck's algorithm
      receive more.

    Raises:
      NameError: if `tx` exchanges over another axis than `axis_name`.
      TypeError: if `tx` is not a transformation, or is a simulated one; if `params` is
        a number or has leaves without a shape; if a number of workers is not an int, or
        another argument is not a Python or numpy number.
      ValueError: if a number of workers is less than 1; if `workers` and `axis_name`
        differ in length, or `axis_name` contains an axis twice; if `bandwidth` is not
        positive, or `latency` or `compute` negative or not finite.

    Example:
      >>> import jax, jax.numpy as jnp, sparsejax
      >>> params = jax.ShapeDtypeStruct((10**7,), jnp.float32)
      >>> link = dict(workers=8, bandwidth=1e9, latency=1e-4)
      >>> dense = sparsejax.predict(sparsejax.dense(), params, **link)
      >>> sparse = sparsejax.predict(sparsejax.exdyna(0.01), params, **link)
      >>> print(f"{dense.seconds / sparse.seconds:.0f} times as fast")
      68 times as fast

    References:
      Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations
      in MPICH", International Journal of High Performance Computing Applications 2005.
      Bruck et al., "Efficient Algorithms for All-to-All Communications in Multiport
      Message-Passing Systems", IEEE Transactions on Parallel and Distributed Systems
      1997.
    """
    refuse_arrays(bandwidth=bandwidth, latency=latency, compute=compute)
    meaning = "bits per second, more than 0"
    bandwidth = check_number("bandwidth", bandwidth, lambda x: x > 0, meaning)
    latency, compute = (
        check_number(name, value, lambda x: 0 <= x < math.inf, "seconds, 0 or more")
        for name, value in (("latency", latency), ("compute", compute))
    )
    operations = trace(tx, params, workers, axis_name)
    seconds = [
        (operation.branch, operation.times * _seconds(operation, bandwidth, latency))
        for operation in _merged(operations)
    ]
    moved = summarise(map(received, operations))
    compute /= getattr(tx, "steps", 1)
    return Prediction(
        compute + add_up(seconds, max),
        compute + add_up(seconds, min),
        moved.total,
        moved.least,
    )


def _merged(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Joins operations that share their messages into one."""
    current = None
    for operation in operations:
        if current and operation.joined:
            current = current._replace(size=current.size + operation.size)
            continue
        if current:
            yield current
        current = operation
    if current:
        yield current


def _seconds(operation: Operation, bandwidth: float, latency: float) -> float:
    """Seconds of one run of `operation`, by its fastest algorithm."""
    kind, size, workers = operation[:3]
    return min(
        messages * latency + 8 * moved / bandwidth
        for messages, moved in _algorithms(kind, size, workers)
    )


def _algorithms(kind: str, size: float, workers: int) -> list[tuple[int, float]]:
    """`(messages, bytes)` of each algorithm for a collective."""
    rounds = (workers - 1).bit_length()  # ceil(log2(workers))
    fewest = received_bytes(kind, size, workers)
    return {
        "all-reduce": [(2 * (workers - 1), fewest), (2 * rounds, 2 * size)],
        "all-gather": [(rounds, fewest)],
        "reduce-scatter": [(rounds, fewest)],
        "all-to-all": [(workers - 1, fewest), (rounds, rounds * size / 2)],
        "permute": [(min(1, workers - 1), fewest)],
    }[kind]
