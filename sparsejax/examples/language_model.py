"""Trains a small sharded language model, whose replicas exchange sparsely.

    python -m sparsejax.examples.language_model --recipe dense,exdyna

The model reads Python's help texts (`pydoc_data.topics`) and guesses each next word.
On eight devices, each of two replicas holds it in four shards: the mesh is ("replica",
"fsdp", "model"), parameters are sharded over the last two, and the gradient is
exchanged over the first. The step is plain `jax.jit`.

The table shows for each recipe: the fraction of right guesses in held-out texts; the
fraction of the gradient that was exchanged; the bytes that each device receives from
the other replica per step; and the median time of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import sparsejax
from sparsejax.examples import _command
from sparsejax.examples._classification import classification
from sparsejax.examples._training import Placement, Recipe, Task
from sparsejax.examples.text import read

_AXIS = "replica"
_LEARNING_RATE = 3e-3
_WARM_UP_SHARE = 0.1
# Every eighth text is held out.
_HELD_OUT = 8
_TESTED = 128

RECIPES = {
    "dense": Recipe(lambda _: sparsejax.dense(axis_name=_AXIS), everything=True),
    "exdyna": Recipe(functools.partial(sparsejax.exdyna, axis_name=_AXIS)),
}


class Size(NamedTuple):
    """The sizes of the model and of its batches."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 32
    batch: int = 32


_BLOCK = {
    "before": P(),
    "qkv": P("fsdp", None, "model", None),
    "out": P("model", None, "fsdp"),
    "between": P(),
    "up": P("fsdp", "model"),
    "down": P("model", "fsdp"),
}


def specs(size: Size):
    """How the parameters are sharded over "fsdp" and "model"."""
    blocks = [_BLOCK] * size.layers
    return {"embedding": P(None, ("fsdp", "model")), "blocks": blocks, "last": P()}


def init(seed: int, words: int, size: Size):
    """Parameters, on the host."""
    rng = np.random.default_rng(seed)
    d, h = size.width, size.heads

    def draw(*shape, inputs):
        return (rng.normal(size=shape) * inputs**-0.5).astype(np.float32)

    def block():
        return {
            "before": np.ones(d, np.float32),
            "qkv": draw(d, 3, h, d // h, inputs=d),
            "out": draw(h, d // h, d, inputs=d),
            "between": np.ones(d, np.float32),
            "up": draw(d, 4 * d, inputs=d),
            "down": draw(4 * d, d, inputs=4 * d),
        }

    return {
        "embedding": draw(words, d, inputs=d),
        "blocks": [block() for _ in range(size.layers)],
        "last": np.ones(d, np.float32),
    }


def logits(params, tokens):
    """Tokens Int32[b, t] -> logits [b, t, words] of each next token."""
    x = jnp.take(params["embedding"], tokens, axis=0)
    for block in params["blocks"]:
        x = x + _attend(_normed(x, block["before"]), block)
        hidden = jax.nn.gelu(_normed(x, block["between"]) @ block["up"])
        x = x + hidden @ block["down"]
    return _normed(x, params["last"]) @ params["embedding"].T


def _normed(x, scale):
    mean = jnp.mean(x**2, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6) * scale[None, None]


def _attend(x, block):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", x, block["qkv"]), 2, 0)
    # Each head lowers the scores of distant words by its own slope.
    t, heads = x.shape[1], q.shape[2]
    distance = jnp.arange(t)[:, None] - jnp.arange(t)[None]
    slopes = 2.0 ** -jnp.arange(1, heads + 1)
    bias = -slopes[:, None, None] * distance[None]
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5 + bias[None]
    weights = jax.nn.softmax(jnp.where(distance[None, None] >= 0, scores, -1e9))
    return jnp.einsum("bhts,bshk,hkd->btd", weights, v, block["out"])


def make_task(size: Size = Size()) -> Task:  # noqa: B008 (a constant)
    """The help texts in windows, split once."""
    texts, words = read()
    words = -8 * (-words // 8)  # Shards of the embedding have equal sizes.

    def windows(texts):
        text = np.concatenate(texts)
        text = np.lib.stride_tricks.sliding_window_view(text, size.context + 1)
        return text[:, :-1], text[:, 1:]

    train = windows([t for i, t in enumerate(texts) if i % _HELD_OUT])
    held = windows(texts[::_HELD_OUT])
    every = len(held[0]) // _TESTED
    test = tuple(part[::every].copy() for part in held)

    def batches(seed: int, count: int) -> Iterator[tuple[np.ndarray, ...]]:
        rng = np.random.default_rng(seed)
        while True:
            rows = rng.integers(len(train[0]), size=count)
            yield tuple(part[rows] for part in train)

    def optimizer(steps: int) -> optax.GradientTransformation:
        rate = optax.warmup_cosine_decay_schedule(
            0.0, _LEARNING_RATE, max(1, int(_WARM_UP_SHARE * steps)), steps
        )
        # After the recipe both get the averaged gradient of the whole model.
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))

    return classification(
        "language model",
        init=lambda seed: init(seed, words, size),
        logits=logits,
        batches=batches,
        test=test,
        batch_size=size.batch,
        optimizer=optimizer,
    )._replace(
        placement=Placement(
            (_AXIS, "fsdp", "model"), specs(size), _AXIS, P((_AXIS, "fsdp"))
        )
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Trains and prints one table; `argv` defaults to the process's arguments."""
    _command.main(
        make_task,
        __doc__ or "",
        steps=200,
        argv=argv,
        recipes=RECIPES,
        default="dense,exdyna",
    )


if __name__ == "__main__":
    main()
