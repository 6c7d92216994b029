"""Classification tasks: loss and accuracy from logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparsejax.examples._training import Batch, Params, Task


def classification(
    name: str,
    *,
    init: Callable[[int], Params],
    logits: Callable[[Params, Any], jax.Array],
    batches: Callable[[int, int], Iterator[Batch]],
    test: tuple[Any, Any],
    batch_size: int,
    optimizer: Callable[[int], optax.GradientTransformation],
) -> Task:
    """A task whose batches are pairs `(inputs [b, ...], labels Int32[b])`.

    Args:
      name, init, batches, batch_size, optimizer: as in `Task`.
      logits: (params, inputs [b, ...]) -> Float32[b, classes].
      test: held-out `(inputs, labels)`.
    """

    def loss(params, batch):
        inputs, labels = batch
        return optax.softmax_cross_entropy_with_integer_labels(
            logits(params, inputs), labels
        ).mean()

    @jax.jit
    def accuracy(params):
        inputs, labels = test
        return jnp.mean(jnp.argmax(logits(params, inputs), axis=-1) == labels)

    return Task(
        name=name,
        init=init,
        loss=loss,
        batches=batches,
        batch_size=batch_size,
        accuracy=lambda params: float(accuracy(params)),
        optimizer=optimizer,
    )
