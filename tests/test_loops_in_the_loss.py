"""Loops and branches in the loss that start from constants: types refuse them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import sparsejax
from tests.jit_training import (
    EXPLICIT,
    SHAPES,
    draw,
    jit_loop,
    manual_loop,
    setting,
)

RATE = 0.3
TX = optax.chain(sparsejax.dense(), optax.sgd(RATE))
CELLS = linen.RNN(linen.SimpleCell(8))


def _fori_loop(hidden, bias, own):
    del bias
    start = own(jnp.zeros(hidden.shape))
    return jax.lax.fori_loop(0, 3, lambda i, sums: jnp.sin(sums + hidden), start)


def _scan(hidden, bias, own):
    def body(carry, column):
        carry = jnp.tanh(carry + column)
        return carry, carry

    del bias
    return jax.lax.scan(body, own(jnp.zeros(hidden.shape[:1])), hidden.T)[1].T


def _while_loop(hidden, bias, own):
    """Newton's square roots, until all have converged."""
    squares = jax.lax.stop_gradient(1 + jnp.square(hidden))

    def unsettled(roots):
        return (jnp.abs(roots * roots - squares) > 1e-5 * squares).any()

    def improve(roots):
        return (roots + squares / roots) / 2

    del bias
    start = own(jnp.ones(hidden.shape))
    return hidden / jax.lax.while_loop(unsettled, improve, start)


def _cond(hidden, bias, own):
    """The branch that is taken returns a constant."""

    def constant(hidden):
        return own(jnp.full(hidden.shape, 2.0))

    return hidden + jax.lax.cond(bias[0] < 9, constant, jnp.sin, hidden)


def _custom_vjp(hidden, bias, own):
    @jax.custom_vjp
    def blocked(hidden):
        return jnp.sin(hidden)

    def backward(shape, _):
        return (own(jnp.zeros(shape)),)

    del bias
    blocked.defvjp(lambda hidden: (jnp.sin(hidden), hidden.shape), backward)
    return hidden + blocked(hidden)


def _flax_rnn(hidden, bias, own):
    del bias, own  # flax makes the initial carry
    steps = hidden.reshape(-1, 4, 2)
    variables = CELLS.init(jax.random.key(0), jnp.zeros((1, 4, 2)))
    return CELLS.apply(variables, steps)[:, -1]


def _loss(loop, params, batch, own=lambda constant: constant):
    hidden = loop(batch["x"] @ params["w"] + params["b"][None], params["b"], own)
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


LOOPS = [_fori_loop, _scan, _while_loop, _cond, _custom_vjp, _flax_rnn]


@pytest.mark.sampled
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__.strip("_"))
def test_equals_one_device(loop):
    at = setting("one", EXPLICIT)
    loss = functools.partial(_loss, loop)
    params, batch = draw(SHAPES), at.drawn(0)
    grads = jax.device_get(jax.jit(jax.grad(loss))(params, batch))
    assert np.abs(grads["w"]).max() > 1e-2
    for made in (jit_loop(TX, at, loss), manual_loop(TX, at, loss, check_vma=False)):
        trained = jax.device_get(made.train(1)[0])
        for name, grad in grads.items():
            wanted = params[name] - RATE * grad
            np.testing.assert_allclose(trained[name], wanted, atol=1e-6)


@pytest.mark.parametrize("loop", LOOPS[:-1], ids=lambda loop: loop.__name__.strip("_"))
def test_types_take_constants_of_this_worker(loop):
    """With `check_vma=True`, and `localize` as in the guide."""
    at = setting("one", EXPLICIT)

    def trace(**options):
        loss = functools.partial(_loss, loop, **options)
        made = manual_loop(TX, at, loss, check_vma=True)
        jax.eval_shape(made.step, made.params, made.state, at.batch(0))

    trace(own=sparsejax.localize)
    with pytest.raises((TypeError, ValueError), match="type"):
        trace()
