"""A static map between a pytree of gradients and one flat vector."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.vectors._leaf_scales import LEAVES
from sparsejax.vectors._rounding import holds_float32, round_to

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int, Int8

# Coordinates are addressed by int32.
MAX_SIZE = 2**31 - 1


Leaves = tuple[tuple[str, tuple[int, ...]], ...]


@jax.tree_util.register_static
class Structure(NamedTuple):
    """The tree and the method of a state: a pytree without leaves, stored in the state.

    The vectors of a state are flat, so they do not distinguish trees of the same size.
    Dtypes are not stored: gradients may have another precision than the parameters. The
    fields are strings, which any serialiser can write.

    Attributes:
      leaves: the path and the shape of each leaf of the tree, as a Python literal.
      method: the kind of method that made the state.
    """

    leaves: str
    method: str

    @classmethod
    def of(cls, leaves: Leaves, method: str) -> Self:
        """The structure of a tree with these paths and shapes, for a method."""
        return cls(repr(leaves), method)

    def check(self, given: Structure) -> None:
        """Raises ValueError with the first difference if `given` is different."""
        if given == self:
            return
        if given.method != self.method:
            raise ValueError(
                f"update: this state was made by another method, {self.method}, and "
                f"this one is {given.method}. Restore the state of this "
                f"transformation, or make one with its `init`."
            )
        had, got = (ast.literal_eval(s.leaves) for s in (self, given))
        for mine, theirs in zip(had, got, strict=False):
            if mine != theirs:
                difference = (
                    f"{_describe(theirs)} instead of shape {mine[1]}"
                    if theirs[0] == mine[0]
                    else f"{_describe(theirs)} instead of {_describe(mine)}"
                )
                break
        else:
            difference = f"{len(got)} leaves instead of {len(had)}"
        raise ValueError(
            f"the gradients have another structure than the tree that `init` got: "
            f"{difference}. Call `tx.init` with a tree of the same structure and "
            f"shapes as the gradients."
        )


def bare(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """`path` without the `.value` of a flax nnx variable.

    `nnx.Optimizer` calls `init` with variables, and `update` with the arrays in them.
    """
    boxed = path and getattr(path[-1], "name", None) == "value"
    return path[:-1] if boxed else path


# The remedy for each kind of leaf that is not real floating point.
_REMEDIES = {
    "complex": (
        "Wrap the recipe: `optax.contrib.split_real_and_imaginary(sparsejax.exdyna("
        "...))`, inside `jax.shard_map` or `sparsejax.simulate`."
    ),
    "key": (
        "Take the parameters alone, such as `nnx.state(model, nnx.Param)`, and pass "
        "random keys to the loss as an argument of their own."
    ),
    "object": (
        "Take the arrays alone: `params, static = eqx.partition(model, "
        "eqx.is_inexact_array)`, and `eqx.combine(params, static)` in the loss."
    ),
    "other": (
        "Split the tree, and rejoin the parts in the loss: `floats = jax.tree.map("
        "lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, params)` "
        "has the leaves for `init` and the gradient."
    ),
}


def check_leaves(tree: Any) -> None:
    """Raises TypeError, with the line to write, unless all leaves are real floats."""
    wrong: dict[str, list[str]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        kind, name = _kind(leaf)
        if kind != "float":
            where = jax.tree_util.keystr(bare(path)) or "(root)"
            wrong.setdefault(kind, []).append(f"`{where}` ({name})")
    if wrong:
        named = [name for names in wrong.values() for name in names]
        raise TypeError(
            f"parameters and gradients must be real floating point, but "
            f"{', '.join(named)} {'is' if len(named) == 1 else 'are'} not. "
            f"{' '.join(_REMEDIES[kind] for kind in wrong)}"
        )


def _kind(leaf: Any) -> tuple[str, str]:
    """The kind of a leaf, "float" or a key of `_REMEDIES`, and a name for its type."""
    numeric = hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)
    if not numeric:
        return "object", getattr(leaf, "__name__", type(leaf).__name__)
    dtype: Any = getattr(leaf, "dtype", type(leaf))
    kinds = {
        "float": jnp.floating,
        "complex": jnp.complexfloating,
        "key": jax.dtypes.prng_key,
    }
    for kind, parent in kinds.items():
        if jnp.issubdtype(dtype, parent):
            return kind, str(dtype)
    return "other", str(dtype)


def _describe(leaf: tuple[str, tuple[int, ...]]) -> str:
    path, shape = leaf
    return f"`{path or '(root)'}` of shape {shape}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The place of each leaf in the vector. Static and hashable.

    Leaves of one dtype are adjacent, in the order of the tree, so a few boundaries give
    the dtype of each coordinate.

    Attributes:
      leaves: paths and shapes in the order of the tree.
      dtypes: the dtype of each leaf, in the order of the tree.
      treedef: rebuilds the tree.
    """

    leaves: Leaves
    dtypes: tuple[np.dtype, ...]
    treedef: Any

    @classmethod
    def of(cls, tree: Any) -> Self:
        """The layout of a tree of arrays or of `jax.ShapeDtypeStruct`s.

        Raises:
          TypeError: if a leaf is not real floating point.
          ValueError: if the tree has 2^31 coordinates or more.
        """
        check_leaves(tree)
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        paths = tuple(jax.tree_util.keystr(bare(path)) for path, _ in leaves)
        shapes = tuple(tuple(jnp.shape(leaf)) for _, leaf in leaves)
        dtypes = tuple(np.dtype(jnp.result_type(leaf)) for _, leaf in leaves)
        layout = cls(tuple(zip(paths, shapes, strict=True)), dtypes, treedef)
        if layout.n > MAX_SIZE:
            raise ValueError(
                f"the tree has {layout.n} coordinates, and one transformation handles "
                f"at most {MAX_SIZE} (int32 indices). Split the tree with "
                f"`optax.partition`, one transformation for each group."
            )
        return layout

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for _, shape in self.leaves)

    @functools.cached_property
    def n(self) -> int:
        return sum(self.sizes)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Leaf numbers, in the order of the leaves in the vector."""
        first = {dtype: i for i, dtype in reversed(list(enumerate(self.dtypes)))}
        return tuple(
            sorted(range(len(self.dtypes)), key=lambda i: first[self.dtypes[i]])
        )

    @functools.cached_property
    def offsets(self) -> dict[int, int]:
        """First coordinate of each leaf, by leaf number."""
        offsets, position = {}, 0
        for i in self.order:
            offsets[i] = position
            position += self.sizes[i]
        return offsets

    @functools.cached_property
    def runs(self) -> tuple[tuple[int, np.dtype], ...]:
        """`(end, dtype)` of each stretch of one dtype, ascending."""
        runs: list[tuple[int, np.dtype]] = []
        for i in self.order:
            end = self.offsets[i] + self.sizes[i]
            if runs and runs[-1][1] == self.dtypes[i]:
                runs.pop()
            runs.append((end, self.dtypes[i]))
        return tuple(runs)

    @functools.cached_property
    def row_size(self) -> int:
        """D: the vector consists of `n / D` rows, and every leaf of whole rows.

        One index of the first axis of a leaf [V, ...] selects a row of the leaf. D is
        the greatest common divisor of the sizes of these rows, 1 if a leaf has fewer
        than two axes.
        """
        rows = [
            math.prod(shape[1:])
            for (_, shape), size in zip(self.leaves, self.sizes, strict=True)
            if size
        ]
        return math.gcd(*rows) or 1

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the vector: float64 if a leaf is float64, else float32."""
        wide = np.dtype(np.float64)
        return wide if wide in self.dtypes else np.dtype(np.float32)

    @property
    def exact(self) -> bool:
        """Whether the gradient's dtypes hold every float32 value."""
        return all(holds_float32(dtype) for dtype in self.dtypes)

    def rows(self, tree: Any) -> list[Float[Array, "1 m"]]:
        """The leaves of `tree` as rows [1, m], in the order of the vector."""
        leaves = self.treedef.flatten_up_to(tree)
        return [leaves[i].reshape(1, -1) for i in self.order]

    def unflatten(self, vector: Float[Array, " n"]) -> Any:
        """The tree of the leaves in `vector` [n], each in its own dtype."""
        leaves = [
            jax.lax.slice(vector, (start,), (start + size,))
            .reshape(shape)
            .astype(dtype)
            for (_, shape), dtype, size, start in zip(
                self.leaves,
                self.dtypes,
                self.sizes,
                (self.offsets[i] for i in range(len(self.sizes))),
                strict=True,
            )
        ]
        return self.treedef.unflatten(leaves)

    @property
    def leaf_count(self) -> int:
        """The number of leaves that have coordinates."""
        return sum(size > 0 for size in self.sizes)

    def leaf_turns(
        self, indices: Int[Array, " k"] | None = None
    ) -> Int8[Array, " k"] | None:
        """The leaf of each coordinate, modulo `LEAVES`: neighbouring leaves differ.

        Args:
          indices: Int32[k], coordinates; by default all of them.

        Returns:
          Int8[k], or None with fewer than two leaves.
        """
        if self.leaf_count < 2:
            return None
        sizes = [size for i in self.order if (size := self.sizes[i])]
        if indices is None:
            parts = [
                jnp.full((size,), leaf % LEAVES, jnp.int8)
                for leaf, size in enumerate(sizes)
            ]
            return jnp.concatenate(parts)
        ends = jnp.asarray(np.cumsum(sizes), jnp.int32)
        leaf = jnp.searchsorted(ends, indices, side="right", method="scan_unrolled")
        return (leaf % LEAVES).astype(jnp.int8)

    def round(
        self, indices: Int[Array, " k"], values: Float[Array, " k"]
    ) -> Float[Array, " k"]:
        """Rounds `values` [k] to the dtypes of their coordinates `indices` [k]."""
        if self.exact:
            return values
        rounded = values
        for end, dtype in reversed(self.runs):
            # Runs come last to first: each overwrites the values before its end.
            rounded = jnp.where(indices < end, round_to(values, dtype), rounded)
        return rounded

    def round_all(self, vector: Float[Array, " n"]) -> Float[Array, " n"]:
        """Rounds each coordinate of `vector` [n] to its dtype."""
        if self.exact:
            return vector
        starts = (0, *(end for end, _ in self.runs))
        return jnp.concatenate(
            [
                round_to(jax.lax.slice(vector, (start,), (end,)), dtype)
                for start, (end, dtype) in zip(starts, self.runs, strict=False)
            ]
        )
