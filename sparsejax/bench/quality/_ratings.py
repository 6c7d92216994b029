"""`ratings`: neural collaborative filtering on MovieLens 100k."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sparsejax.bench.quality._data import data_file
from sparsejax.bench.quality._task import TEST, VALIDATION, Task

_NEGATIVES = 4  # in training, for each film that the user has seen
_CANDIDATES = 99  # in testing
_HITS_AMONG = 10


class Size(NamedTuple):
    """The sizes of the model, and of a worker's batch."""

    width: int = 32
    hidden: tuple[int, int] = (64, 32)
    seen: int = 64  # pairs of a user and a film per step, without negatives


def load() -> np.ndarray:
    """Users, films and times Int64[100,000, 3], from the package recbole."""
    return parse(
        data_file(
            "ratings", "recbole", "recbole", "dataset_example/ml-100k/ml-100k.inter"
        )
    )


def parse(file: pathlib.Path) -> np.ndarray:
    """The columns user, film and time, separated by tabs, below one header."""
    rows = np.loadtxt(file, skiprows=1, delimiter="\t", usecols=(0, 1, 3), ndmin=2)
    return rows.astype(np.int64)


def init(seed: int, users: int, films: int, size: Size) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    first, second = size.hidden

    def draw(*shape, scale):
        return (rng.normal(size=shape) * scale).astype("f4")

    # One table for the product and the network: half of each row for each of them.
    return {
        "users": draw(users, 2 * size.width, scale=0.1),
        "films": draw(films, 2 * size.width, scale=0.1),
        "hidden1": draw(2 * size.width, first, scale=size.width**-0.5),
        "bias1": np.zeros(first, "f4"),
        "hidden2": draw(first, second, scale=(2 / first) ** 0.5),
        "bias2": np.zeros(second, "f4"),
        "out": draw(size.width + second, scale=(size.width + second) ** -0.5),
    }


def scores(params, users, films):
    """Users and films Int32[...] -> logits [...] of having been seen."""
    shape, half = films.shape, params["users"].shape[1] // 2
    user = jnp.take(params["users"], users.reshape(-1), axis=0)
    film = jnp.take(params["films"], films.reshape(-1), axis=0)
    x = jnp.concatenate([user[:, half:], film[:, half:]], axis=-1)
    x = jax.nn.relu(x @ params["hidden1"] + params["bias1"][None])
    x = jax.nn.relu(x @ params["hidden2"] + params["bias2"][None])
    x = jnp.concatenate([user[:, :half] * film[:, :half], x], axis=-1)
    return (x @ params["out"]).reshape(shape)


def make_task(seen: np.ndarray, size: Size = Size()) -> Task:  # noqa: B008
    """The task with a fixed split: the last film of each user is for the test.

    The film before it is for validation.
    """
    rng = np.random.default_rng(0)
    user, film = (np.unique(c, return_inverse=True)[1] for c in seen[:, :2].T)
    users, films = int(user.max()) + 1, int(film.max()) + 1
    known = np.zeros((users, films), bool)
    known[user, film] = True
    order = np.lexsort((film, seen[:, 2], user))
    user, film = user[order].astype(np.int32), film[order].astype(np.int32)
    last = np.append(np.flatnonzero(np.diff(user)), len(user) - 1)
    train = np.delete(np.arange(len(user)), np.concatenate([last, last - 1]))

    def candidates(rows):
        """The held-out film of each user, then films that the user has not seen."""
        others = [
            rng.choice(np.flatnonzero(~known[u]), _CANDIDATES, replace=False)
            for u in user[rows]
        ]
        shown = np.concatenate([film[rows][:, None], np.stack(others)], axis=1)
        return np.broadcast_to(user[rows][:, None], shown.shape), shown.astype("i4")

    def loss(params, batch):
        logits = scores(params, batch["user"], batch["film"])
        return optax.sigmoid_binary_cross_entropy(logits, batch["seen"]).mean()

    def batches(seed, steps, workers):
        rng = np.random.default_rng(seed)
        rows = train[rng.integers(len(train), size=(steps, workers, size.seen))]
        shape = (*rows.shape, 1 + _NEGATIVES)
        shown = rng.integers(films, size=shape, dtype=np.int32)
        shown[..., 0] = film[rows]
        target = np.zeros(shape, "f4")
        target[..., 0] = 1.0
        who = np.broadcast_to(user[rows][..., None], shape)
        return {"user": who, "film": shown, "seen": target}

    def hit_rate(params, split):
        found = scores(params, *split)
        above = jnp.sum(found[:, 1:] >= found[:, :1], axis=1)
        return jnp.mean(above < _HITS_AMONG)

    return Task(
        name="ratings",
        metric="HR@10",
        higher=True,
        tolerance=0.01,
        relative=False,
        init=lambda seed: init(seed, users, films, size),
        loss=loss,
        batches=batches,
        quality=hit_rate,
        splits={VALIDATION: candidates(last - 1), TEST: candidates(last)},
        direction=lambda momentum: optax.scale_by_adam(b1=momentum),
        warm_up=0.1,
        rates=(0.01, 0.03, 0.06),
        local_rates=(0.01, 0.03, 0.06),
        sparse=("users", "films"),
    )
