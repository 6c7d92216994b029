"""Trains a small language model and exchanges its embedding with Zen.

    python -m sparsejax.examples.text --recipe dense,zen,zen+exdyna --seeds 2

The model guesses the next word of Python's help texts (`pydoc_data.topics`) from the
four words before. Two thirds of its parameters are the embedding, where the gradient of
a worker is non-zero only in the rows of words in its batch. Without an accelerator,
eight virtual CPU devices are the workers. With several processes, start each with
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set.

The table shows for each recipe: the fraction of right guesses in held-out texts; the
fraction of the gradient that was exchanged; the bytes that each worker receives per
step; and the median time of a step. "zen" sends the embedding's rows exactly and the
rest densely; "zen+exdyna" sends the rest with ExDyna, at the given density.

    python -m sparsejax.examples.text --local-steps 30 --recipe dense,exdyna,sparseloco

trains in rounds: each worker takes 30 steps of Adam alone, and the sum of its updates
goes through the recipe. All numbers are still per step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pydoc_data import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparsejax
from sparsejax.examples import _command
from sparsejax.examples._classification import classification
from sparsejax.examples._training import Recipe, Task

_CONTEXT = 4
_EMBEDDING = 128
_HIDDEN = 64
_BATCH_SIZE = 128
_LEARNING_RATE = 3e-3
# Every eighth text is held out.
_HELD_OUT = 8
# With eight workers, the batch of a worker has at most 16 x 4 words; the vocabulary has
# about four thousand.
_MAX_DENSITY = 0.02

_EMBEDDING_ONLY = {"embedding": "sparse", "hidden": "rest", "out": "rest"}


def _with_zen(rest: optax.GradientTransformation) -> optax.GradientTransformation:
    zen = sparsejax.zen(_MAX_DENSITY)
    return optax.partition({"sparse": zen, "rest": rest}, _EMBEDDING_ONLY)


RECIPES = {
    "dense": Recipe(lambda density: sparsejax.dense(), everything=True),
    "exdyna": Recipe(sparsejax.exdyna),
    "sparseloco": Recipe(sparsejax.sparseloco),
    "zen": Recipe(lambda density: _with_zen(sparsejax.dense()), lossless=True),
    "zen+exdyna": Recipe(
        lambda density: _with_zen(sparsejax.exdyna(density)), lossless=True
    ),
}


def read() -> tuple[list[np.ndarray], int]:
    """All texts as word numbers, in the order of their names, and the word count."""
    texts = [topics.topics[name] for name in sorted(topics.topics)]
    words = [re.findall(r"[a-z_]+|[0-9]+|[^\sa-z0-9_]", t.lower()) for t in texts]
    numbers: dict[str, int] = {}
    coded = [
        np.array([numbers.setdefault(w, len(numbers)) for w in text], np.int32)
        for text in words
    ]
    return coded, len(numbers)


def _windows(texts: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Contexts [m, 4] and the words [m] that follow them."""
    runs = [
        np.lib.stride_tricks.sliding_window_view(text, _CONTEXT + 1)
        for text in texts
        if len(text) > _CONTEXT
    ]
    both = np.concatenate(runs)
    return both[:, :-1].copy(), both[:, -1].copy()


def logits(params, contexts):
    """Contexts Int32[b, 4] -> logits [b, words]."""
    x = jnp.take(params["embedding"], contexts, axis=0).reshape(len(contexts), -1)
    x = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
    return x @ params["out"]["kernel"] + params["out"]["bias"][None]


def make_task() -> Task:
    """The help texts, split once: seeds change the parameters and the batches."""
    texts, words = read()
    train = _windows([t for i, t in enumerate(texts) if i % _HELD_OUT])
    test = _windows(texts[::_HELD_OUT])

    def init(seed: int):
        rng = np.random.default_rng(seed)

        def draw(*shape, scale):
            return (rng.normal(size=shape) * scale).astype(np.float32)

        inputs = _CONTEXT * _EMBEDDING
        return {
            "embedding": draw(words, _EMBEDDING, scale=0.1),
            "hidden": {
                "kernel": draw(inputs, _HIDDEN, scale=inputs**-0.5),
                "bias": np.zeros(_HIDDEN, np.float32),
            },
            "out": {
                "kernel": draw(_HIDDEN, words, scale=_HIDDEN**-0.5),
                "bias": np.zeros(words, np.float32),
            },
        }

    def batches(seed: int, size: int) -> Iterator[tuple[np.ndarray, ...]]:
        rng = np.random.default_rng(seed)
        while True:
            rows = rng.integers(len(train[0]), size=size)
            yield tuple(part[rows] for part in train)

    def optimizer(steps: int) -> optax.GradientTransformation:
        return optax.adam(optax.cosine_decay_schedule(_LEARNING_RATE, steps))

    return classification(
        "text",
        init=init,
        logits=logits,
        batches=batches,
        test=test,
        batch_size=_BATCH_SIZE,
        optimizer=optimizer,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints one table; `argv` defaults to the process's arguments."""
    _command.main(
        make_task,
        __doc__ or "",
        steps=400,
        argv=argv,
        recipes=RECIPES,
        default="dense,zen,zen+exdyna",
    )


if __name__ == "__main__":
    main()
