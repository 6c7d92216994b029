"""Labels that separate leaves worth sparsifying from small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from sparsejax._checks import check_number


def small_leaves(
    min_size: int = 4096, *, sparse: str = "sparse", dense: str = "dense"
) -> Callable[[Any], Any]:
    """Labels for `optax.partition`: biases, norms and scalars are exchanged densely.

    A leaf is small if it has fewer than `min_size` elements or at most one axis.
    Small leaves are a tiny part of the bytes, and often the most sensitive part of a
    model.

    Args:
      min_size: the smallest number of elements of a large leaf.
      sparse: the label of large leaves.
      dense: the label of small leaves.

    Returns:
      A function from a pytree of parameters to a pytree of labels.

    Raises:
      TypeError: if `min_size` is not a number, but for example the parameters.
      ValueError: if `min_size` is negative, or both labels are the same.

    Example:
      >>> import jax.numpy as jnp, optax, sparsejax
      >>> params = {"kernel": jnp.zeros((100, 100)), "bias": jnp.zeros(100)}
      >>> sparsejax.small_leaves(min_size=1000)(params)
      {'bias': 'dense', 'kernel': 'sparse'}
      >>> tx = optax.chain(
      ...     optax.partition(
      ...         {"sparse": sparsejax.exdyna(0.01), "dense": sparsejax.dense()},
      ...         sparsejax.small_leaves(min_size=1000),
      ...     ),
      ...     optax.sgd(0.1),
      ... )
    """
    check_number(
        "min_size",
        min_size,
        lambda size: size >= 0,
        "a number of elements, 0 or more (pass parameters to the returned function: "
        "`small_leaves()(params)`)",
    )
    if sparse == dense:
        raise ValueError(
            f"sparse, dense: got {sparse!r} for both, expected two different labels."
        )

    def label(leaf):
        small = np.ndim(leaf) <= 1 or np.size(leaf) < min_size
        return dense if small else sparse

    return lambda params: jax.tree.map(label, params)
