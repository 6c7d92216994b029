"""Trains a small CNN to read handwritten digits, once per recipe.

    python -m sparsejax.examples.digits --recipe dense,exdyna,micro --seeds 5

The data are the 1,797 scans of 8 x 8 pixels that come with scikit-learn. Without an
accelerator, eight virtual CPU devices are the workers. With several processes, start
each with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set.

The table shows for each recipe: the accuracy on 500 held-out scans; the mean fraction
of the gradient that was exchanged, and its distance from the target in the worst step
after the first; the bytes that each worker receives per step; and the median time of a
step. Virtual devices share one memory and a few cores, so sending less saves little
time there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import optax
from flax import nnx
from sklearn import datasets, model_selection

from sparsejax.examples import _command
from sparsejax.examples._classification import classification
from sparsejax.examples._training import Task

_LEARNING_RATE = 0.2
_BATCH_SIZE = 128
_TEST_SIZE = 500


class CNN(nnx.Module):
    """Two convolutions, two dense layers: 38,282 parameters."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, kernel_size=(3, 3), rngs=rngs)
        self.hidden = nnx.Linear(4 * 4 * 32, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images):
        """Images [b, 8, 8, 1] -> logits [b, 10]."""
        x = nnx.relu(self.conv1(images))
        x = nnx.relu(self.conv2(x))
        x = nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.out(x)


def make_task() -> Task:
    """The digits, split once: seeds change the parameters and the order of batches."""
    digits = datasets.load_digits()
    train, test = zip(
        *[
            model_selection.train_test_split(
                part, test_size=_TEST_SIZE, stratify=digits.target, random_state=0
            )
            for part in (
                (digits.images[..., None] / 16).astype(np.float32),
                digits.target.astype(np.int32),
            )
        ],
        strict=True,
    )
    graph = nnx.graphdef(CNN(nnx.Rngs(0)))

    def init(seed: int) -> nnx.State:
        return nnx.state(CNN(nnx.Rngs(seed)), nnx.Param)

    def logits(params, images):
        return nnx.merge(graph, params)(images)

    def batches(seed: int, size: int) -> Iterator[tuple[np.ndarray, ...]]:
        rng = np.random.default_rng(seed)
        while True:
            order = rng.permutation(len(train[0]))
            for start in range(0, len(order) - size + 1, size):
                rows = order[start : start + size]
                yield tuple(part[rows] for part in train)

    def optimizer(steps: int) -> optax.GradientTransformation:
        return optax.sgd(optax.cosine_decay_schedule(_LEARNING_RATE, steps))

    return classification(
        "digits",
        init=init,
        logits=logits,
        batches=batches,
        test=test,
        batch_size=_BATCH_SIZE,
        optimizer=optimizer,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints one table; `argv` defaults to the process's arguments."""
    _command.main(make_task, __doc__ or "", steps=600, argv=argv)


if __name__ == "__main__":
    main()
