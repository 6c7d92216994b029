"""Bytes on the wire, counted from the collectives of the traced program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from sparsejax._checks import check_count
from sparsejax._workers import AxisName, Workers, spec_axes

# Names of jax's primitives, by what they do. The "invariant" ones are what a checked
# shard_map traces to.
_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
    "psum_scatter": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
}


class Collective(NamedTuple):
    """One collective of a step.

    Attributes:
      kind: "all-reduce", "all-gather", "all-to-all", "permute" or "reduce-scatter".
      bytes: received per worker and step.
      branch: where it stands: "" for always, or the conditionals around it, such as
        "cond0[1]" for the branch taken where the first predicate is true.
      times: how often it happens in a step, in a loop; `bytes` are of all of them. 0
        for one that travels with the one before, from the same `psum` of a tree.
    """

    kind: str
    bytes: float
    branch: str
    times: int = 1


class WireBytes(NamedTuple):
    """What a worker receives in a step.

    Attributes:
      total: bytes per worker and step; of each conditional the costliest branch.
      least: the same with the cheapest branch of each.
      by_kind: the bytes of `total` by kind of collective, all branches added.
      by_branch: bytes by branch: "" for what every step moves.
      collectives: one by one.
    """

    total: float
    least: float
    by_kind: dict[str, float]
    by_branch: dict[str, float]
    collectives: tuple[Collective, ...]


def received_bytes(kind: str, size: float, count: int) -> float:
    """Bytes that one of `count` workers receives in a bandwidth-optimal algorithm.

    Args:
      kind: as in `Collective`.
      size: bytes of one worker's operand; of the *result* for an all-gather.
      count: number of workers.
    """
    share = (count - 1) / count
    return {
        "all-reduce": 2 * share * size,
        "all-gather": share * size,
        "all-to-all": share * size,
        "reduce-scatter": share * size,
        "permute": float(size) if count > 1 else 0.0,
    }[kind]


def wire_bytes(
    tx: optax.GradientTransformation,
    params: Any,
    *,
    workers: int | tuple[int, ...],
    axis_name: AxisName = "data",
) -> WireBytes:
    """Bytes that each worker receives per step, from the traced update.

    All message sizes are static, so nothing has to run, and any number of workers can
    be asked for on any machine.

    Parameters that are sharded over other axes than the workers' are taken shard by
    shard, as `per_shard` takes them; bytes are then those of each device.

    Args:
      tx: a transformation that holds sparsejax ones.
      params: pytree of arrays or `jax.ShapeDtypeStruct`s, shaped as the gradients. For
        `per_shard` their shardings have to tell the axis of the shards: placed
        parameters, or structs with `sharding=`.
      workers: number of workers; one number per axis if `axis_name` is a tuple.
      axis_name: the mesh axis of the workers, or a tuple of axes.

    Returns:
      The bytes, in all and by collective and branch. An all-reduce of S bytes counts
      2 (w-1)/w S, an all-gather and an all-to-all (w-1)/w S, a permute S.

    Raises:
      TypeError: if a number of workers is not an int.
      ValueError: if one is less than 1, or their number is not that of the axes.

    Example:
      >>> import jax.numpy as jnp, sparsejax
      >>> params = {"w": jnp.zeros(10_000)}
      >>> dense = sparsejax.wire_bytes(sparsejax.dense(), params, workers=4)
      >>> sparse = sparsejax.wire_bytes(sparsejax.micro(0.01), params, workers=4)
      >>> print(f"{100 * sparse.total / dense.total:.1f} % of dense")
      1.2 % of dense
    """
    axes = Workers(axis_name).axes
    sizes = workers if isinstance(workers, tuple) else (workers,)
    sizes = tuple(check_count("workers", size) for size in sizes)
    if len(sizes) != len(axes):
        raise ValueError(
            f"workers: got {workers}, expected one number for each axis of {axes}."
        )
    known = dict(zip(axes, sizes, strict=True))
    specs = jax.tree.map(lambda p: _shard_spec(p, axes), params)
    for leaf, spec in zip(jax.tree.leaves(params), jax.tree.leaves(specs), strict=True):
        known |= {name: leaf.sharding.mesh.shape[name] for name in spec_axes(spec)}
    mesh = AbstractMesh(
        tuple(known.values()), tuple(known), axis_types=(AxisType.Auto,) * len(known)
    )

    def step(gradients, params):
        local = jax.tree.map(lambda g: g[0], gradients)
        updates, _ = tx.update(local, tx.init(params), params)
        return updates

    def shaped(*leading):
        return jax.tree.map(
            lambda p: jax.ShapeDtypeStruct(
                (*leading, *jnp.shape(p)), jnp.result_type(p)
            ),
            params,
        )

    by_worker = jax.tree.map(lambda spec: P(axis_name, *spec), specs)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(by_worker, specs), out_specs=specs
    )
    # The mesh that is set has no part in it.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        jaxpr = jax.make_jaxpr(mapped)(shaped(math.prod(sizes)), shaped())
    return count_jaxpr(jaxpr.jaxpr, known)


def _shard_spec(leaf: Any, worker_axes: tuple[str, ...]) -> P:
    """How a parameter is sharded, but for the workers' axes."""
    spec = getattr(getattr(leaf, "sharding", None), "spec", None) or ()
    others = ([n for n in spec_axes([entry]) if n not in worker_axes] for entry in spec)
    return P(*(tuple(names) or None for names in others))


def count_jaxpr(jaxpr: Any, axis_sizes: dict[str, int]) -> WireBytes:
    """The collectives of `jaxpr`, and of all that it calls, summed up."""
    return summarise(tuple(_walk(jaxpr, axis_sizes, "", 1)))


def summarise(collectives: tuple[Collective, ...]) -> WireBytes:
    """The sums over collectives."""
    by_kind: dict[str, float] = {}
    by_branch: dict[str, float] = {"": 0.0}
    for kind, size, branch, _ in collectives:
        by_kind[kind] = by_kind.get(kind, 0.0) + size
        by_branch[branch] = by_branch.get(branch, 0.0) + size
    total, least = (_choose(collectives, "", pick) for pick in (max, min))
    return WireBytes(total, least, by_kind, by_branch, collectives)


def _walk(
    jaxpr: Any, sizes: dict[str, int], branch: str, times: int
) -> Iterator[Collective]:
    conditionals, before = 0, None
    for eqn in jaxpr.eqns:
        kind = _KINDS.get(eqn.primitive.name)
        together = kind == before == "all-reduce"
        before = kind
        if kind:
            found = _collective(kind, eqn, sizes, branch, times)
            yield found._replace(times=0) if together else found
        elif eqn.primitive.name == "cond":
            for i, closed in enumerate(eqn.params["branches"]):
                inside = f"{branch}cond{conditionals}[{i}]"
                yield from _walk(closed.jaxpr, sizes, inside, times)
            conditionals += 1
        else:
            repeats = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from _walk(inner, sizes, branch, times * repeats)


def _collective(kind, eqn, sizes, branch, times) -> Collective:
    names = eqn.params.get("axes", eqn.params.get("axis_name"))
    names = names if isinstance(names, tuple) else (names,)
    count = math.prod(sizes.get(name, 1) for name in names)
    measured = eqn.outvars if kind == "all-gather" else eqn.invars
    size = sum(v.aval.size * v.aval.dtype.itemsize for v in measured)
    return Collective(kind, times * received_bytes(kind, size, count), branch, times)


def _choose(
    collectives: tuple[Collective, ...],
    prefix: str,
    pick: Callable[[list[float]], float],
) -> float:
    """Bytes below `prefix`, with the branch of each conditional that `pick` picks."""
    here = sum(c.bytes for c in collectives if c.branch == prefix)
    deeper: dict[str, set[str]] = {}
    for c in collectives:
        if c.branch.startswith(prefix) and c.branch != prefix:
            label = c.branch[len(prefix) :].split("]")[0] + "]"
            deeper.setdefault(label.split("[")[0], set()).add(prefix + label)
    for labels in deeper.values():
        sizes = [_choose(collectives, label, pick) for label in labels]
        # A branch without collectives has no label.
        here += pick(sizes if len(sizes) > 1 else [0.0, *sizes])
    return here
