"""Single bits, merged hop by hop around a ring or a torus, are unbiased."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from sparsejax._workers import Workers
from sparsejax.exchanges.signs import _merge, _ring
from sparsejax.vectors import _bits

# -- the merge -------------------------------------------------------------------------


def test_expectation_of_the_merge_by_enumeration(monkeypatch):
    """All 2^16 values of a random number, all weights of rings, tori and trees."""
    numbers = np.arange(2**16)
    planes = jnp.stack(
        [_bits.pack(jnp.asarray(numbers >> i & 1 == 1)) for i in range(16)]
    )
    monkeypatch.setattr(_merge, "threefry_2x32", lambda key, counts: planes.ravel())
    ring = [(m - 1, 1) for m in range(2, 65)]
    torus = [(i * c, c) for c in range(2, 9) for i in range(1, 8)]
    tree = [(a, b) for a in range(1, 17) for b in range(1, a + 1)]
    weights = np.array(ring + torus + tree, np.int32)
    constant = {
        0: jnp.zeros(2**11, jnp.uint32),
        1: jnp.full(2**11, 2**32 - 1, jnp.uint32),
    }

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, None, 0, 0))
    def set_bits(received, local, a, b):
        merged = _merge.merge(received, local, a, b, _merge.new_key(0))
        return jnp.sum(_bits.popcount(merged))

    a, b = weights.T
    for v in (0, 1):
        for s in (0, 1):
            mean = np.asarray(set_bits(constant[v], constant[s], a, b)) / 2**16
            expected = (a * v + b * s) / (a + b)
            if v == s:
                np.testing.assert_array_equal(mean, expected)
            else:
                assert np.abs(mean - expected).max() <= 2**-17


def test_random_bits_have_their_probability():
    words = 2**14
    draw = jax.jit(_merge.bernoulli, static_argnums=2)
    for i, p in enumerate((0.0, 1 / 3, 0.5, 1 / 8, 0.999)):
        bits = draw(_merge.new_key(i), jnp.float32(p), words)
        mean = float(jnp.sum(_bits.popcount(bits))) / (32 * words)
        assert abs(mean - p) <= 4 * np.sqrt(p * (1 - p) / (32 * words))
        by_lane = np.asarray(_bits.unpack(bits, 32 * words)).reshape(words, 32)
        error = np.abs(by_lane.mean(axis=0) - p)
        assert error.max() <= 4.5 * np.sqrt(p * (1 - p) / words)


# -- the ring and the torus ------------------------------------------------------------

SHAPES = {"ring2": (2,), "ring3": (3,), "ring8": (8,), "torus2x4": (2, 4)}
RUNS, COORDINATES = 768, 1500
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def constant_half(received, local, received_weight, local_weight, key):
    del received_weight, local_weight
    return _merge.merge(received, local, 1, 1, key)


def slightly_wrong(received, local, received_weight, local_weight, key):
    """The local bit is kept with a probability that is 5 % too small."""
    return _merge.merge(received, local, 105 * received_weight, 100 * local_weight, key)


@functools.cache
def draw(shape, merge=_merge.merge):
    """(flags [w, n], results [RUNS, n]) of random signs, RUNS times."""
    axes = ("rows", "columns")[-len(shape) :]
    workers = Workers(axes)
    rng = np.random.default_rng(3)
    flags = rng.random((int(np.prod(shape)), COORDINATES)) < rng.random(COORDINATES)
    packed = jnp.stack([_bits.pack(jnp.asarray(row)) for row in flags])

    def local(words, key):
        facts = workers.index().astype(jnp.uint32)[None]
        words, facts = _ring.random_signs(words, facts, workers, key, merge)
        return _bits.unpack(words, COORDINATES), facts

    keys = jax.vmap(_merge.fold_in, in_axes=(None, 0))(
        _merge.new_key(0), jnp.arange(RUNS)
    )
    if len(shape) == 1:
        ring = jax.vmap(local, in_axes=(0, None), out_axes=None, axis_name=axes[0])
        results, facts = jax.jit(jax.vmap(ring, in_axes=(None, 0)))(packed, keys)
    else:  # jax cannot gather over two axes of vmap
        mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
        torus = jax.shard_map(
            lambda words, keys: jax.vmap(local, in_axes=(None, 0))(words[0], keys),
            mesh=mesh,
            in_specs=(P(axes), P()),
            out_specs=P(),
        )
        results, facts = jax.jit(torus)(packed, keys)
    # Facts arrive in the order of the workers, whatever the route of the segments.
    np.testing.assert_array_equal(facts[0, :, 0], np.arange(len(flags)))
    return flags, np.asarray(results)


def z_scores(flags, results):
    """The deviation of workers' weights from 1/w, in standard deviations [segments, w].

    Solves `E[result_j] = sum_r weight_r flag_rj` by least squares in each segment, and
    not over all segments: each worker is the first to add its bits to one segment and
    the last to add them to another.
    """
    w = len(flags)
    length = 32 * -(-_words(flags) // w)
    scores = []
    for first in range(0, COORDINATES, length):
        f = flags[:, first : first + length]
        p = f.mean(axis=0)
        deviation = results[:, first : first + length].mean(axis=0) - p
        gain = np.linalg.pinv(f.T - 0.5)
        variance = gain**2 @ (p * (1 - p) / len(results))
        scores.append(gain @ deviation / np.sqrt(variance))
    assert np.shape(scores) == (w, w)
    return np.abs(scores)


def _words(flags):
    return -(-flags.shape[1] // 32)


@every_shape
def test_every_worker_has_the_same_weight(shape):
    assert z_scores(*draw(shape)).max() < 4


@pytest.mark.parametrize("shape", [(3,), (8,), (2, 4)], ids=["3", "8", "2x4"])
def test_the_test_rejects_one_half_at_each_hop(shape):
    assert z_scores(*draw(shape, constant_half)).max() > 20


def test_the_test_rejects_small_errors():
    for shape in SHAPES.values():
        assert z_scores(*draw(shape, slightly_wrong)).max() > 4


@every_shape
def test_the_test_rejects_a_majority_vote(shape):
    flags, _ = draw(shape)
    vote = 2 * flags.sum(axis=0) > len(flags)
    results = np.repeat(vote[None], RUNS, axis=0)
    error = results.mean(axis=0) - flags.mean(axis=0)
    # The error is positive as often as negative, so only single coordinates show it.
    assert chi_square(error, flags) > 100
    assert abs(chi_square(draw(shape)[1].mean(axis=0) - flags.mean(axis=0), flags)) < 4


def chi_square(error, flags):
    """Excess of the squared errors of mixed coordinates, in standard deviations."""
    p = flags.mean(axis=0)
    mixed = (p > 0) & (p < 1)
    z = error[mixed] / np.sqrt(p[mixed] * (1 - p[mixed]) / RUNS)
    # A mean of RUNS bits has nearly the fourth moment of a normal number.
    return (np.sum(z**2) - mixed.sum()) / np.sqrt(2 * mixed.sum())


@every_shape
def test_bits_are_independent(shape):
    """Bits are independent within words, of other words and segments, and of runs."""
    flags, results = draw(shape)
    p = flags.mean(axis=0)
    mixed = (p > 0) & (p < 1)
    z = np.where(mixed, results - p, 0) / np.sqrt(np.where(mixed, p * (1 - p), 1))
    for lag in (1, 2, 7, 31, 32, 33, 64, 192, 384, COORDINATES // 2):
        product = z[:, lag:] * z[:, :-lag]
        pairs = (mixed[lag:] & mixed[:-lag]).sum() * RUNS
        assert abs(product.sum()) / np.sqrt(pairs) < 4
    product = z[1:] * z[:-1]
    assert abs(product.sum()) / np.sqrt(mixed.sum() * (RUNS - 1)) < 4
    # and over runs the variance equals the variance of a random worker's sign
    assert np.mean(z[:, mixed] ** 2) == pytest.approx(1, abs=0.02)


@every_shape
def test_unanimous_bits_never_change(shape):
    flags, results = draw(shape)
    for value in (False, True):
        same = (flags == value).all(axis=0)
        assert same.any()
        assert (results[:, same] == value).all()
