"""`simulate`: runs many workers on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from sparsejax._checks import as_present, check_count, matching_axis, path_name
from sparsejax.placement._markers import map_per_worker, state_specs
from sparsejax.placement._rounds import Rounds, mean_loss

# Extra arguments that the compiled step accepts, such as a loss.
_TRACEABLE = (jax.Array, np.ndarray, np.generic, float)


class SimulatedTransformation(optax.GradientTransformationExtraArgs):
    """A transformation made by `simulate`.

    Attributes:
      simulated: the transformation of one worker.
    """

    simulated: optax.GradientTransformation


@overload
def simulate(tx: Rounds, *, workers: int, axis_name: str = ...) -> Rounds: ...


@overload
def simulate(
    tx: optax.GradientTransformation, *, workers: int, axis_name: str = ...
) -> optax.GradientTransformationExtraArgs: ...


def simulate(tx: Any, *, workers: int, axis_name: str = "data") -> Any:
    """Runs `tx` for `workers` workers on one device, under `jax.vmap`.

    Experiments and tests get the numbers of a mesh without one. They agree up to
    rounding, since a compiler may sum in another order: updates of `marsit` differ by
    2e-7.

    Args:
      tx: a transformation that holds sparsejax ones, possibly chained with others; or
        a `sparsejax.Rounds`.
      workers: number of workers, at least 1.
      axis_name: the axis over which `tx` exchanges; a single name.

    Returns:
      A transformation whose gradients have a leading axis [w], and so has `present=`;
      parameters and returned updates have no such axis. The state has the layout of the
      global state: [w, ...] for per-worker parts, no worker axis for the rest.

      For a `sparsejax.Rounds`, a `Rounds` whose batches have a leading worker axis,
      [w, H, b, ...]; losses are the mean over the workers, and `aux` is [w, H, ...].

    Raises:
      NameError: from `init`, if `tx` exchanges over another axis than `axis_name`.
      TypeError: if `workers` is not an int, or `axis_name` is not a single name.
      ValueError: if `workers` is less than 1, if gradients lack the leading axis [w],
        or if an output that should be equal on all workers is not provably so.

    Example:
      >>> import jax.numpy as jnp, sparsejax
      >>> tx = sparsejax.simulate(sparsejax.micro(density=0.5), workers=2)
      >>> params = {"w": jnp.zeros(4)}
      >>> grads = {"w": jnp.array([[4.0, 1, 0, 0], [2.0, 0, 1, 6]])}
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> print(updates["w"])
      [3. 0. 0. 3.]
    """
    workers = check_count("workers", workers)
    if not isinstance(axis_name, str):
        raise TypeError(
            f"axis_name: got {axis_name!r}, expected a single name, such as 'data', "
            f"for the simulated workers. Make `tx` with the same name."
        )
    mapped = {"axis_name": axis_name, "axis_size": workers}

    def row(state: Any) -> Any:
        """A worker's view [1, ...] as one row [...] of the global state."""
        return map_per_worker(lambda leaf: leaf[0], state)

    def axes(state: Any) -> Any:
        return jax.tree.map(
            lambda spec: None if spec == P() else 0, state_specs(state, axis_name)
        )

    @matching_axis(axis_name, "`simulate`")
    def init(params):
        def local(_):
            return row(tx.init(params))

        rows = jax.eval_shape(jax.vmap(local, in_axes=None, **mapped), 0.0)
        # One worker's shapes: `state_specs` would mistake a leading axis for the axis
        # of an ensemble.
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows
        )
        # out_axes=None fails if a value is not provably equal on all workers.
        return jax.vmap(local, in_axes=None, out_axes=axes(shapes), **mapped)(0.0)

    if isinstance(tx, Rounds):

        def round_of(params, state, batches, *per_step, present=None, **shared):
            _check_leading_axis(batches, workers, "batches")
            if present is not None:
                present = as_present(present, (workers,))

            def local(batches, state, present):
                view = map_per_worker(lambda leaf: leaf[None], state)
                new, state, *rest = tx.step(
                    params, view, batches, *per_step, present=present, **shared
                )
                return new, row(state), rest

            where = axes(state)
            new, state, (losses, *aux) = jax.vmap(
                local, in_axes=(0, where, 0), out_axes=(None, where, 0), **mapped
            )(batches, state, present)
            return new, state, mean_loss(losses, present), *aux

        return tx._replace(init=init, step=_off_mesh(jax.jit(round_of)))

    tx = optax.with_extra_args_support(tx)

    def step(updates, state, params, extra_args):
        given = {k: v for k, v in extra_args.items() if k == "present"}
        shared = {k: v for k, v in extra_args.items() if k != "present"}

        def local(updates, state, given):
            view = map_per_worker(lambda leaf: leaf[None], state)
            new, state = tx.update(updates, view, params, **given, **shared)
            return new, row(state)

        where = axes(state)
        return jax.vmap(local, in_axes=(0, where, 0), out_axes=(None, where), **mapped)(
            updates, state, given
        )

    # Compiles the whole step: running operation by operation takes seconds.
    step = _off_mesh(step)
    compiled = _off_mesh(jax.jit(step))

    def update(updates, state, params=None, **extra_args):
        _check_leading_axis(updates, workers, "the gradient")
        if extra_args.get("present") is not None:
            present = as_present(extra_args["present"], (workers,))
            extra_args = extra_args | {"present": present}
        # Others are functions, or numbers that Python code may branch on.
        if all(isinstance(x, _TRACEABLE) for x in jax.tree.leaves(extra_args)):
            return compiled(updates, state, params, extra_args)
        return step(updates, state, params, extra_args)

    made = SimulatedTransformation(init, update)
    made.simulated = tx
    return made


def _off_mesh(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` as if no mesh were set: on explicit axes a scatter under `vmap` raises."""

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return fun(*args, **kwargs)

    return wrapped


def _check_leading_axis(gradients: Any, workers: int, name: str) -> None:
    """Raises ValueError unless every leaf has the shape [workers, ...]."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        if jnp.shape(leaf)[:1] != (workers,):
            raise ValueError(
                f"update: {name} `{path_name(path)}` has the shape "
                f"{jnp.shape(leaf)}, but the first axis should have the size of the "
                f"{workers} simulated workers. Stack the workers' values, "
                f"`jnp.stack(one_for_each_worker)`. `sparsejax.predict` and loops with "
                f"a mesh take the transformation itself, without `simulate`."
            )
