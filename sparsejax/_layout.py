"""A static map between a pytree of gradients and one flat float32 vector."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.vectors._rounding import holds_float32, round_to

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

# Coordinates are addressed by int32.
MAX_SIZE = 2**31 - 1


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Structure:
    """The paths and shapes of a tree: a pytree without leaves, kept in the state.

    It tells apart the tree that the state was made for and the one that `update` gets,
    although the state itself only holds flat vectors. Dtypes are not part of it:
    gradients may have another precision than the parameters.
    """

    leaves: tuple[tuple[str, tuple[int, ...]], ...]

    def check(self, given: Structure) -> None:
        """Raises ValueError with the first difference if `given` is another tree."""
        if given == self:
            return
        for mine, theirs in zip(self.leaves, given.leaves, strict=False):
            if mine != theirs:
                difference = f"{_describe(theirs)} where it had {_describe(mine)}"
                break
        else:
            difference = f"{len(given.leaves)} leaves where it had {len(self.leaves)}"
        raise ValueError(
            f"the gradients have another structure than the tree that `init` was "
            f"called with: {difference}. Call `tx.init` with a tree of the same "
            f"structure and shapes as the gradients."
        )


def bare(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """`path` without the `.value` of a flax nnx variable.

    `nnx.Optimizer` calls `init` with variables and `update` with what they hold.
    """
    boxed = path and getattr(path[-1], "name", None) == "value"
    return path[:-1] if boxed else path


def _describe(leaf: tuple[str, tuple[int, ...]]) -> str:
    path, shape = leaf
    return f"`{path or '(root)'}` of shape {shape}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each leaf lies in the vector. Static and hashable.

    Leaves keep the order of the tree within a dtype, and dtypes are kept together, so
    that the dtype of a coordinate follows from a few boundaries.

    Attributes:
      structure: paths and shapes in the order of the tree.
      dtypes: of each leaf, in the order of the tree.
      treedef: rebuilds the tree.
    """

    structure: Structure
    dtypes: tuple[np.dtype, ...]
    treedef: Any

    @classmethod
    def of(cls, tree: Any) -> Self:
        """The layout of a tree of arrays or of `jax.ShapeDtypeStruct`s.

        Raises:
          TypeError: if a leaf is not real floating point.
          ValueError: if there are 2^31 coordinates or more.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        paths = tuple(jax.tree_util.keystr(bare(path)) for path, _ in leaves)
        shapes = tuple(tuple(jnp.shape(leaf)) for _, leaf in leaves)
        dtypes = tuple(np.dtype(jnp.result_type(leaf)) for _, leaf in leaves)
        wrong = [
            f"`{path or '(root)'}` ({dtype})"
            for path, dtype in zip(paths, dtypes, strict=True)
            if not jnp.issubdtype(dtype, jnp.floating)
        ]
        if wrong:
            raise TypeError(
                f"gradients must be real floating point, but {', '.join(wrong)} "
                f"{'is' if len(wrong) == 1 else 'are'} not. Leave such leaves out with "
                f"`optax.masked`, or differentiate only the floating-point parameters."
            )
        layout = cls(Structure(tuple(zip(paths, shapes, strict=True))), dtypes, treedef)
        if layout.n > MAX_SIZE:
            raise ValueError(
                f"the tree has {layout.n} coordinates, and one transformation handles "
                f"at most {MAX_SIZE} (int32 indices). Split the tree with "
                f"`optax.partition`, one transformation for each group."
            )
        return layout

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for _, shape in self.structure.leaves)

    @functools.cached_property
    def n(self) -> int:
        return sum(self.sizes)

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """Leaf numbers in the order in which they lie in the vector."""
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
        """D: the vector can be taken as `n / D` rows that divide every leaf.

        A row of a leaf [V, ...] is what one index of its first axis selects. D is the
        greatest common divisor over the leaves, 1 where one has fewer than two axes.
        """
        rows = [
            math.prod(shape[1:])
            for (_, shape), size in zip(self.structure.leaves, self.sizes, strict=True)
            if size
        ]
        return math.gcd(*rows) or 1

    @property
    def exact(self) -> bool:
        """Whether every float32 value leaves as it is."""
        return all(holds_float32(dtype) for dtype in self.dtypes)

    def rows(self, tree: Any) -> list[Float[Array, "1 m"]]:
        """The leaves of `tree` as rows [1, m], in the order of the vector."""
        leaves = self.treedef.flatten_up_to(tree)
        return [leaves[i].reshape(1, -1) for i in self.order]

    def unflatten(self, vector: Float[Array, " n"]) -> Any:
        """The tree whose leaves lie in `vector` [n], each in its own dtype."""
        leaves = [
            jax.lax.slice(vector, (start,), (start + size,))
            .reshape(shape)
            .astype(dtype)
            for (_, shape), dtype, size, start in zip(
                self.structure.leaves,
                self.dtypes,
                self.sizes,
                (self.offsets[i] for i in range(len(self.sizes))),
                strict=True,
            )
        ]
        return self.treedef.unflatten(leaves)

    def round(
        self, indices: Int[Array, " k"], values: Float[Array, " k"]
    ) -> Float[Array, " k"]:
        """`values` [k] as they will leave, in the dtypes of their coordinates [k]."""
        if self.exact:
            return values
        rounded = values
        for end, dtype in reversed(self.runs):
            # Later runs were handled first, so each step overwrites what lies before
            # its end.
            rounded = jnp.where(indices < end, round_to(values, dtype), rounded)
        return rounded

    def round_all(self, vector: Float[Array, " n"]) -> Float[Array, " n"]:
        """The whole `vector` [n] as it will leave."""
        if self.exact:
            return vector
        starts = (0, *(end for end, _ in self.runs))
        return jnp.concatenate(
            [
                round_to(jax.lax.slice(vector, (start,), (end,)), dtype)
                for start, (end, dtype) in zip(starts, self.runs, strict=False)
            ]
        )
