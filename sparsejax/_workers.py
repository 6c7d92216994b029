"""The named mesh axis over which gradients are exchanged.

The only file that communicates, the only one that reads which axes a value varies over,
and the only one that branches on traced values.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Set
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

AxisName = str | tuple[str, ...]

# Whether each worker is in a step of its own, between two exchanges.
_ALONE: contextvars.ContextVar[bool] = contextvars.ContextVar("alone", default=False)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Refuses sums and gathers over the workers in this context."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which `x` differs, according to its type.

    Empty where types do not contain them: outside `shard_map`, with `check_vma=False`,
    and under `vmap`.
    """
    # `jax.typeof` of a struct fails on meshes with automatic axes.
    if isinstance(x, jax.ShapeDtypeStruct):
        return frozenset(getattr(x.manual_axis_type, "varying", ()))
    return frozenset(jax.typeof(x).mat.varying)


def vary_like(x: Any, reference: Any) -> Any:
    """Types every leaf of `x` as varying over at least the axes of `reference`.

    Loop carries and branches of a conditional need equal types on both sides; an array
    of constants starts out as varying over nothing.
    """
    return _cast_to_varying(x, varying_axes(reference))


def settle_axes(tree: Any, known: frozenset[str]) -> Any:
    """Types every leaf as equal along mesh axes of size 1, except the `known` axes.

    Nothing differs along such an axis, but a specification may name it, so that one
    configuration serves all meshes.
    """

    def settle(leaf):
        more = sorted(varying_axes(leaf) - known)
        axes = tuple(axis for axis in more if jax.lax.axis_size(axis) == 1)
        return jax.lax.psum(leaf, axes) if axes else leaf

    return jax.tree.map(settle, tree)


def _cast_to_varying(tree: Any, axes: frozenset[str]) -> Any:
    def cast(leaf):
        missing = axes - varying_axes(leaf)
        # pcast refuses axes over which the value varies already.
        return (
            jax.lax.pcast(leaf, tuple(sorted(missing)), to="varying")
            if (missing)
            else leaf
        )

    return jax.tree.map(cast, tree)


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers along a named axis, or along a tuple of axes, major first.

    Works the same inside `jax.shard_map` and, for `simulate`, inside `jax.vmap`.

    Args:
      axis_name: a mesh axis, or a tuple of them.
    """

    axis_name: AxisName

    def __post_init__(self):
        names = self.axes
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"axis_name: got {self.axis_name!r}, expected the name of a mesh axis, "
                f"such as 'data', or a tuple of names, ('host', 'local')."
            )
        if len(set(names)) < len(names):
            raise ValueError(f"axis_name: got {names}, expected each mesh axis once.")

    @property
    def axes(self) -> tuple[str, ...]:
        name = self.axis_name
        return name if isinstance(name, tuple) else (name,)

    # -- facts ------------------------------------------------------------------------

    def bound(self) -> bool:
        """Whether the axis is bound here: inside `shard_map` or a named `vmap`."""
        try:
            jax.lax.axis_size(self.axis_name)
        except NameError:
            return False
        return True

    def require_bound(self, caller: str) -> None:
        if not self.bound():
            raise NameError(
                f"{caller}: the axis {self.axis_name!r} is not bound here. Gradients "
                f"are exchanged over a mesh axis, so call it inside `jax.shard_map` "
                f"over a mesh with that axis, pass the `axis_name=` of your mesh, or "
                f"use `sparsejax.simulate` on one device."
            )

    def mesh_count(self) -> int | None:
        """How many workers the mesh that is set has; None if it lacks an axis."""
        sizes = mesh_axis_sizes()
        known = set(self.axes) <= set(sizes)
        return math.prod(sizes[a] for a in self.axes) if known else None

    def known_count(self) -> int:
        """How many workers there are: static, in both views."""
        return self.count() if self.bound() else self.mesh_count() or 1

    def require_mesh(self, caller: str) -> None:
        """Raises NameError unless a mesh with the axis is set."""
        if self.mesh_count() is None:
            sizes = mesh_axis_sizes()
            found = f"has the axes {tuple(sizes)}" if sizes else "is not set"
            if caller == "init":
                raise NameError(
                    f"init: the axis {self.axis_name!r} is not bound here, and the "
                    f"mesh {found}, so the number of workers is unknown. Set a mesh, "
                    f"`jax.set_mesh(jax.make_mesh((jax.device_count(),), "
                    f"({self.axes[0]!r},)))`, or pass one, `sparsejax.init(tx, params, "
                    f"mesh)`. For a `jax.pmap` loop, make the state with "
                    f"`sparsejax.init(tx, params, workers=jax.device_count(), "
                    f"axis_name={self.axis_name!r})`, pass it as "
                    f"`TrainState(step=0, ..., opt_state=...)`, and replicate it. Or "
                    f"call `tx.init` inside `jax.shard_map`, or use "
                    f"`sparsejax.simulate` on one device. If the workers' axis has "
                    f"another name, pass it to both sides: `axis_name=` of the recipe, "
                    f"and of `simulate`, `wire_bytes` and the like."
                )
            raise NameError(
                f"{caller}: the axis {self.axis_name!r} is not bound here, and the "
                f"mesh {found}. Set one that has it before the step is called, "
                f"`jax.set_mesh(jax.make_mesh((jax.device_count(),), "
                f"({self.axes[0]!r},)))`; pass the `axis_name=` of your mesh; call it "
                f"inside `jax.shard_map`; or use `sparsejax.simulate` on one device."
            )

    def explicit_spec(self, x: Any) -> Any:
        """The `PartitionSpec` in the type of `x`; None on automatic axes."""
        sharding = getattr(jax.typeof(x), "sharding", None)
        if sharding is None:
            return None
        mesh = sharding.mesh
        if mesh.empty:  # An array that was made before the mesh was set.
            mesh = jax.sharding.get_abstract_mesh()
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        explicit = all(types.get(a) == AxisType.Explicit for a in self.axes)
        return sharding.spec if explicit else None

    def spread(self, x: Any) -> Any:
        """`x` [w, ...]; on explicit axes its first axis is sharded over the workers."""
        spec = self.explicit_spec(x)
        if spec is None or set(self.axes) <= sharded_axes(x):
            return x
        return jax.sharding.reshard(x, P(self.axes, *spec[1:]))

    def count(self) -> int:
        """How many workers there are: static."""
        return jax.lax.axis_size(self.axis_name)

    def index(self) -> Int[Array, ""]:
        """This worker's index, Int32[], per worker."""
        return jax.lax.axis_index(self.axis_name)

    def typed(self) -> bool:
        """Whether types show here which values vary over the axis.

        With `check_vma=False` and under `vmap` they do not: everything is typed
        replicated.
        """
        return set(self.axes) <= varying_axes(self.index())

    def is_local(self, x: Any) -> bool:
        """Whether `x` is typed as differing between workers. Valid if `typed()`."""
        return set(self.axes) <= varying_axes(x)

    def localize(self, tree: Any) -> Any:
        """The same values, typed as per worker. Idempotent."""
        return _cast_to_varying(
            tree, frozenset(self.axes) if self.typed() else frozenset()
        )

    def eval_bound(self, fun: Callable[[], Any], worker_count: int) -> None:
        """Traces `fun`, which may name the axis, wherever the axis is not bound."""
        mapped: Callable[..., Any] = lambda _: fun()  # noqa: E731
        if not self.bound():
            sizes = (worker_count, *(1 for _ in self.axes[1:]))
            for name, size in zip(self.axes, sizes, strict=True):
                mapped = jax.vmap(mapped, in_axes=None, axis_name=name, axis_size=size)
        jax.eval_shape(mapped, 0.0)

    # -- collectives ------------------------------------------------------------------

    def _require_exchange(self) -> None:
        if _ALONE.get():
            raise ValueError(
                "rounds: the inner optimizer exchanges in every local step. Put such a "
                "transformation into `outer`; to clip a worker's own gradient in each "
                "step, use `optax.clip_by_global_norm`."
            )

    def gather(self, x: Any) -> Any:
        """Every worker's `x` along a new leading axis: [w, ...], replicated."""
        self._require_exchange()
        x = self.localize(x)
        if self.typed():
            return jax.lax.all_gather(x, self.axis_name, to="invarying")
        return jax.lax.all_gather(x, self.axis_name)

    def sum(self, tree: Any) -> Any:
        """The sum over workers, replicated."""
        self._require_exchange()
        return jax.lax.psum(self.localize(tree), self.axis_name)

    def mean(self, tree: Any) -> Any:
        """The mean over workers, replicated."""
        self._require_exchange()
        return jax.lax.pmean(self.localize(tree), self.axis_name)

    def any(self, flag: Bool[Array, ""]) -> Bool[Array, ""]:
        """Whether `flag` holds on any worker, replicated."""
        return self.sum(flag.astype(jnp.int32)) > 0

    def all_to_all(self, x: Any) -> Any:
        """Row `i` of `x` [w, ...] goes to worker `i`, row `j` comes from worker `j`."""
        return jax.lax.all_to_all(
            self.localize(x), self.axis_name, split_axis=0, concat_axis=0
        )

    def shift(self, x: Any, by: int = 1) -> Any:
        """Sends `x` to the worker `by` further along the ring. Per worker."""
        count = self.count()
        return self.permute(x, [(i, (i + by) % count) for i in range(count)])

    def permute(self, x: Any, pairs: list[tuple[int, int]]) -> Any:
        """Sends `x` along `(from, to)` pairs, a static permutation. Per worker."""
        return jax.lax.ppermute(self.localize(x), self.axis_name, pairs)

    # -- control flow -----------------------------------------------------------------

    def cond(
        self,
        predicate: Bool[Array, ""],
        if_true: Callable[..., Any],
        if_false: Callable[..., Any],
        *operands: Any,
    ) -> Any:
        """`jax.lax.cond` on a predicate that all workers agree on.

        Raises:
          ValueError: if the predicate is typed per worker. Workers that take different
            branches deadlock in a collective, and `shard_map` would type the results
            as replicated although they are not.
        """
        if varying_axes(predicate) & set(self.axes):
            raise ValueError(
                f"the predicate differs between the workers of axis "
                f"{self.axis_name!r}; agree on it first, for example with "
                f"`workers.any(predicate)`."
            )

        # A result of one branch may vary over an axis, such as the shards of a model,
        # over which a constant of the other branch does not vary.
        results = jax.eval_shape(lambda *x: (if_true(*x), if_false(*x)), *operands)
        axes = jax.tree.map(lambda a, b: varying_axes(a) | varying_axes(b), *results)

        def same_types(branch):
            return lambda *x: jax.tree.map(_cast_to_varying, branch(*x), axes)

        return jax.lax.cond(
            predicate, same_types(if_true), same_types(if_false), *operands
        )


def sharded_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which an array is sharded, as far as that is known.

    The type shows explicit axes; a concrete array outside `jax.jit` shows all axes.
    For traced values, automatic axes are unknown.
    """
    concrete = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    sharding = x.sharding if concrete else getattr(jax.typeof(x), "sharding", None)
    return frozenset(spec_axes(getattr(sharding, "spec", None) or ()))


def spec_axes(spec: Any) -> list[str]:
    """The mesh axes that a `PartitionSpec`, or part of one, names, in its order."""
    nested = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return [name for names in nested for name in names if isinstance(name, str)]


def without_axes(spec: Any, dropped: Set[str]) -> P:
    """A `PartitionSpec`, or the end of one, without some of the axes that it names."""

    def kept(entry):
        names = tuple(name for name in spec_axes([entry]) if name not in dropped)
        return names[0] if len(names) == 1 else names or None

    return P(*map(kept, spec))


def mesh_axis_sizes() -> dict[str, int]:
    """The axes of the mesh set by `jax.set_mesh`, and their sizes."""
    return dict(jax.sharding.get_abstract_mesh().shape)
