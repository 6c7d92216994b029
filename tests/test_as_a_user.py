"""Four models trained as the guides show; `dense` gives one device's numbers."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import sparsejax
from tests.harness import WORKERS, mesh_of
from tests.pages import ROOT, block

pytestmark = pytest.mark.newer_waits

ROWS = 2 * WORKERS


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _frozen_encoder():
    """An encoder that `optax.set_to_zero` freezes, and a head."""
    params = {"encoder": _normal(6, 5, seed=1), "head": _normal(5, 3, seed=2)}

    def loss(params, batch):
        x, y = batch
        hidden = jnp.tanh(x @ params["encoder"])
        return jnp.mean((hidden @ params["head"] - y) ** 2)

    def freeze(tx):
        parts = {"trained": tx, "frozen": optax.set_to_zero()}
        return optax.partition(parts, {"encoder": "frozen", "head": "trained"})

    return params, loss, (_normal(ROWS, 6), _normal(ROWS, 3)), {}, freeze


def _lstm_with_ctc():
    """Loops over time in the model and in its loss; both start from constants."""
    model = linen.RNN(linen.LSTMCell(4))
    x = _normal(ROWS, 5, 3)
    params = {"lstm": model.init(jax.random.key(0), x[:1]), "out": _normal(4, 4)}
    labels = jnp.tile(jnp.asarray([[1, 2]]), (ROWS, 1))

    def loss(params, batch):
        x, labels = batch
        logits = model.apply(params["lstm"], x) @ params["out"]
        zeros = [jnp.zeros((*labels.shape[:1], k)) for k in (5, 2)]
        return jnp.mean(optax.ctc_loss(logits, zeros[0], labels, zeros[1]))

    return params, loss, (x, labels), {}, lambda tx: tx


def _masked_language_model():
    """Predicts the masked tokens of short batches; some workers have no such token."""
    params = {"embed": _normal(7, 4, seed=1), "out": _normal(4, 7, seed=2)}
    rng = np.random.default_rng(3)
    tokens = jnp.asarray(rng.integers(1, 7, (ROWS, 5)))
    masked = jnp.asarray(rng.random((ROWS, 5)) < 0.3).at[:2].set(False)

    def loss(params, batch):
        tokens, masked = batch
        hidden = params["embed"][jnp.where(masked, 0, tokens)]
        hidden = hidden + hidden.mean(axis=1, keepdims=True)
        each = optax.softmax_cross_entropy_with_integer_labels(
            hidden @ params["out"], tokens
        )
        count = masked.sum()
        return (each * masked).sum() / jnp.maximum(count, 1), count

    return params, loss, (tokens, masked), {"weighted": True}, lambda tx: tx


MODELS = [_frozen_encoder, _lstm_with_ctc, _masked_language_model]


def _train(gradients, tx, params, batch):
    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = gradients(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for _ in range(3):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return jax.device_get(params), losses


def _same(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, wanted)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__.strip("_"))
def test_equals_one_device(model):
    params, loss, batch, options, around = model()

    def alone(params, batch):
        return jax.value_and_grad(loss, has_aux=bool(options))(params, batch)

    def one_device(params, batch):
        value, grads = alone(params, batch)
        return (value[0] if options else value), grads

    wanted = _train(one_device, around(optax.sgd(0.3)), params, batch)
    with jax.set_mesh(mesh_of()):
        gradients = sparsejax.value_and_grad(loss, **options)
        tx = around(optax.chain(sparsejax.dense(), optax.sgd(0.3)))
        _same(_train(gradients, tx, params, batch), wanted)


def _of_the_guide(**others):
    """The NNX model, its loss and its step, from the guide."""
    names = {"jax": jax, "jnp": jnp, "nnx": nnx, "sparsejax": sparsejax, **others}
    exec(block(ROOT / "docs" / "guides" / "flax.md", "class Reader"), names)
    return types.SimpleNamespace(**names)


def _nnx_alone(graphdef, params, rest, batch, key):
    """The step of the guide by hand: the mean over the workers' parts of the batch."""
    by_hand = types.SimpleNamespace(worker_key=lambda key: key)
    loss_of = _of_the_guide(sparsejax=by_hand).reader_loss
    parts = [x.reshape(WORKERS, -1, *x.shape[1:]) for x in batch]
    found = []
    for worker in range(WORKERS):
        part = tuple(x[worker] for x in parts)
        own = jax.random.fold_in(key, worker)
        found.append(
            jax.value_and_grad(loss_of(graphdef), has_aux=True)(params, part, rest, own)
        )
    return jax.tree.map(lambda *each: jnp.stack(each).mean(axis=0), *found)


def test_nnx_with_dropout_batch_norm_and_rnn():
    guide = _of_the_guide()
    batch, key = (_normal(ROWS, 3, 6), _normal(ROWS)), jax.random.key(7)
    with jax.set_mesh(mesh_of()):
        model = guide.Reader(6, nnx.Rngs(0, dropout=1))
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        params, rest = jax.tree.map(jnp.copy, (params, rest))
        tx = optax.chain(sparsejax.dense(), optax.sgd(0.3))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        keys = [jax.random.fold_in(key, i) for i in range(2)]
        losses = [float(guide.reader_step(model, optimizer, batch, k)) for k in keys]
        got = jax.device_get(nnx.state(model, (nnx.Param, nnx.BatchStat)))
    _check_nnx(got, losses, (graphdef, params, rest), batch, key)


def _check_nnx(got, losses, start, batch, key):
    graphdef, params, rest = start
    alone = jax.jit(functools.partial(_nnx_alone, graphdef))
    (other, _), _ = alone(params, rest, batch, key)
    assert abs(other - losses[0]) > 1e-3  # another key drops other units
    for i, loss in enumerate(losses):
        (wanted, statistics), grads = alone(
            params, rest, batch, jax.random.fold_in(key, i)
        )
        np.testing.assert_allclose(loss, wanted, atol=1e-6)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
        rest = nnx.merge_state(rest, statistics)
    _same(got, jax.device_get(nnx.merge_state(params, statistics)))
