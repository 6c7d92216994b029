"""`predict`: seconds from the bytes and messages of the traced step."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsejax

LINK = {"bandwidth": 1e9, "latency": 1e-3}
N = 100_000
# A byte takes one second and a message a thousand, so sums are readable.
SLOW = {"bandwidth": 8.0, "latency": 1e3}
COLLECTIVES = {
    "all-reduce": lambda x, axis: jax.lax.psum(x, axis),
    "all-gather": lambda x, axis: jax.lax.all_gather(x, axis),
    "reduce-scatter": lambda x, axis: jax.lax.psum_scatter(x, axis, tiled=True),
    "all-to-all": lambda x, axis: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
    "permute": lambda x, axis: jax.lax.ppermute(
        x, axis, [(i, i) for i in range(jax.lax.axis_size(axis))]
    ),
}


def struct(n):
    return jax.ShapeDtypeStruct((n,), jnp.float32)


def moving(collective, axis="data"):
    """A transformation that runs one collective and ignores the result."""

    def update(gradients, state, params):
        collective(gradients, axis)
        return params, state

    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.parametrize(
    ("kind", "workers", "n", "seconds"),
    [
        ("all-reduce", 8, 100, 6 * 1000 + 2 * 400),  # tree
        ("all-reduce", 8, 10**6, 14 * 1000 + 7 * 10**6),  # ring
        ("all-reduce", 5, 100, 6 * 1000 + 2 * 400),
        ("all-reduce", 2, 100, 2 * 1000 + 400),
        ("all-reduce", 1024, 1000, 20 * 1000 + 2 * 4000),
        ("all-gather", 8, 100, 3 * 1000 + 7 * 400),
        ("all-gather", 5, 100, 3 * 1000 + 4 * 400),
        ("all-gather", 1024, 1, 10 * 1000 + 1023 * 4),
        ("reduce-scatter", 8, 800, 3 * 1000 + 7 * 400),
        ("reduce-scatter", 5, 500, 3 * 1000 + 4 * 400),
        ("all-to-all", 8, 80, 3 * 1000 + 3 * 160),  # Bruck's
        ("all-to-all", 8, 800_000, 7 * 1000 + 7 * 400_000),  # direct
        ("all-to-all", 1024, 1024, 10 * 1000 + 5 * 4096),
        ("permute", 8, 100, 1000 + 400),
    ],
)
def test_by_hand(kind, workers, n, seconds):
    tx = moving(COLLECTIVES[kind])
    found = sparsejax.predict(tx, struct(n), workers=workers, **SLOW)
    assert found.seconds == found.least == pytest.approx(seconds)
    moved = sparsejax.wire_bytes(tx, struct(n), workers=workers)
    assert (found.bytes, found.least_bytes) == (moved.total, moved.least)


@pytest.mark.parametrize("kind", COLLECTIVES)
@pytest.mark.parametrize("n", [24, 24_000, 2_400_000])
def test_more_workers_take_longer(kind, n):
    tx = moving(COLLECTIVES[kind])
    seconds = [
        sparsejax.predict(tx, struct(n), workers=workers, **SLOW).seconds
        for workers in (1, 2, 3, 4, 6, 8, 12, 24)
    ]
    assert seconds[0] == 0 < seconds[1]
    assert all(a <= b for a, b in itertools.pairwise(seconds))


def test_many_workers_do_not_wait_for_a_ring():
    """With 1024 workers a ring needs 2046 messages for a few KB, and a tree 20."""
    tx = moving(COLLECTIVES["all-reduce"])
    found = sparsejax.predict(tx, struct(1000), workers=1024, **LINK)
    assert 20e-3 < found.seconds < 21e-3


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_dense_is_one_ring(workers):
    found = sparsejax.predict(
        sparsejax.dense(), struct(10 * N), workers=workers, **LINK
    )
    received = 2 * (workers - 1) / workers * 4 * (10 * N + workers)
    assert found.bytes == pytest.approx(received)
    messages = 2 * (workers - 1)
    assert found.seconds == pytest.approx(8 * received / 1e9 + 1e-3 * messages)
    assert found.least == found.seconds


def test_exdyna_is_a_gather_and_a_tree():
    tx = sparsejax.exdyna(0.01)
    found = sparsejax.predict(tx, struct(N), workers=8, **LINK)
    moved = sparsejax.wire_bytes(tx, struct(N), workers=8)
    gathered, summed = moved.by_kind["all-gather"], moved.by_kind["all-reduce"]
    assert found.bytes == moved.total == gathered + summed
    # The sum of S bytes counts 7/4 S, and a tree receives 2 S.
    received = gathered + 8 / 7 * summed
    assert found.seconds == pytest.approx(8e-9 * received + 1e-3 * (3 + 6))


def test_density_is_the_transformations():
    few, many = (
        sparsejax.predict(sparsejax.topk(density), struct(N), workers=8, **LINK)
        for density in (0.01, 0.1)
    )
    assert few.bytes < many.bytes
    assert few.seconds < many.seconds


def test_branches_apart():
    """Most steps of marsit send one bit per coordinate."""
    found = sparsejax.predict(sparsejax.marsit(100), struct(N), workers=8, **LINK)
    assert found.least_bytes < 0.1 * found.bytes
    assert found.least < found.seconds


def test_hops_of_marsits_ring_count_one_by_one():
    """There are w - 1 messages of one segment each, and an all-gather."""
    slow, fast = (
        sparsejax.predict(
            sparsejax.marsit(None), struct(N), workers=8, bandwidth=1e9, latency=latency
        ).least
        for latency in (1e-3, 0.0)
    )
    assert slow - fast == pytest.approx(7e-3 + 3e-3)


def test_leaves_of_one_sum_travel_together():
    tx = moving(COLLECTIVES["all-reduce"])
    tree = {"a": struct(100), "b": struct(300)}
    together = sparsejax.predict(tx, tree, workers=8, **SLOW)
    assert together == sparsejax.predict(tx, struct(400), workers=8, **SLOW)
    apart = moving(
        lambda tree, axis: [jax.lax.psum(jnp.sin(x), axis) for x in tree.values()]
    )
    parts = [sparsejax.predict(tx, tree[x], workers=8, **SLOW).seconds for x in tree]
    found = sparsejax.predict(apart, tree, workers=8, **SLOW).seconds
    assert found == pytest.approx(sum(parts))
    assert found > together.seconds


def test_loops_count_every_turn():
    def thrice(x, axis):
        def body(carry, _):
            return carry, jax.lax.psum(x, axis)

        return jax.lax.scan(body, 0, length=3)

    once = sparsejax.predict(
        moving(COLLECTIVES["all-reduce"]), struct(100), workers=8, **SLOW
    )
    found = sparsejax.predict(moving(thrice), struct(100), workers=8, **SLOW)
    assert found.seconds == pytest.approx(3 * once.seconds)
    assert found.bytes == pytest.approx(3 * once.bytes)


def test_axes():
    """A collective over one of two axes counts the workers of that axis."""
    names = ("host", "local")

    def found(axis, workers, axis_name):
        tx = moving(COLLECTIVES["all-gather"], axis)
        return sparsejax.predict(
            tx, struct(100), workers=workers, axis_name=axis_name, **SLOW
        )

    assert found(names, (4, 2), names) == found("data", 8, "data")
    assert found("host", (4, 2), names) == found("data", 4, "data")


def test_shapes_say_as_much_as_arrays():
    tx, zeros = sparsejax.micro(0.1), {"a": jnp.zeros((3, 50)), "b": jnp.zeros(9)}
    shapes = jax.eval_shape(lambda: zeros)
    expected = sparsejax.predict(tx, zeros, workers=4, **LINK)
    assert sparsejax.predict(tx, shapes, workers=4, **LINK) == expected


def test_links_share_a_trace():
    """Tracing takes most of the time of a prediction."""
    traces = []

    def collective(x, axis):
        traces.append(axis)
        return jax.lax.psum(x, axis)

    tx = moving(collective)
    for workers, count in ((2, 1), (4, 2), (2, 2)):
        for bandwidth in (1e9, 1e10):
            link = {"bandwidth": bandwidth, "latency": 1e-3}
            found = sparsejax.predict(tx, struct(50), workers=workers, **link)
            assert found.bytes == 2 * (workers - 1) / workers * 200
            assert len(traces) == count


def test_methods_of_objects_without_a_hash_are_traced():
    @dataclasses.dataclass  # with __eq__, and so without __hash__
    class Halves:
        factor: float = 0.5

        def init(self, params):
            return optax.EmptyState()

        def update(self, updates, state, params=None):
            return jax.lax.pmean(self.factor * updates, "data"), state

    made = Halves()
    tx = optax.GradientTransformation(made.init, made.update)
    found = sparsejax.predict(tx, struct(50), workers=2, **LINK)
    assert found.bytes == 200


def test_computing_is_added():
    tx = sparsejax.exdyna(0.01)
    alone = sparsejax.predict(tx, struct(N), workers=4, **LINK)
    both = sparsejax.predict(tx, struct(N), workers=4, **LINK, compute=0.5)
    assert both.seconds == pytest.approx(alone.seconds + 0.5)
    assert both.bytes == alone.bytes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"workers": 0}, ValueError, "workers: got 0"),
        ({"workers": (2, 4)}, ValueError, "workers: got .*each axis"),
        ({"workers": 2.0}, TypeError, "workers: got 2.0"),
        ({"bandwidth": 0}, ValueError, "bandwidth: got 0"),
        ({"bandwidth": "1gbit"}, TypeError, "bandwidth: got '1gbit'"),
        ({"latency": -1}, ValueError, "latency: got -1"),
        ({"latency": None}, TypeError, "latency: got None"),
        ({"compute": float("nan")}, ValueError, "compute: got nan"),
        # A hint at `inject_hyperparams` would end otherwise.
        (
            {"bandwidth": jnp.float32(1e9)},
            TypeError,
            r"numpy.*`bandwidth\.item\(\)`\.$",
        ),
        ({"workers": jnp.int32(2)}, TypeError, r"numpy.*`workers\.item\(\)`\.$"),
        (
            {"params": "float32"},
            TypeError,
            r"params: got 'float32' at `\(root\)`.*Shape",
        ),
        ({"params": {"a": np.float32}}, TypeError, r"at `\['a'\]`, expected a pytree"),
        ({"params": [jax.nn.relu]}, TypeError, r"at `\[0\]`, expected a pytree"),
        ({"axis_name": "host"}, NameError, "'host'.* the axis 'data'.*='data'` to"),
        (
            {"axis_name": ("a", "b"), "workers": (2, 2)},
            NameError,
            r"got \('a', 'b'\), .* the axis 'data'.*='data'` to `predict`",
        ),
        (
            {"axis_name": ("a", "a"), "workers": (2, 2)},
            ValueError,
            r"axis_name: got \('a', 'a'\), expected each mesh axis once",
        ),
    ],
)
def test_wrong_arguments(change, error, message):
    arguments = {"params": struct(10), "workers": 2, **LINK, **change}
    with pytest.raises(error, match=message):
        sparsejax.predict(sparsejax.exdyna(0.5), **arguments)


def test_other_axes_than_the_transformations():
    def predicted(tx):
        return sparsejax.predict(tx, struct(10), workers=2, **LINK)

    both = sparsejax.dense(axis_name=("host", "local"))
    with pytest.raises(NameError, match=r"=\('host', 'local'\)` to `predict`"):
        predicted(both)

    def misspelt(x, axis):
        raise NameError("name 'undefined' is not defined")

    with pytest.raises(NameError, match="name 'undefined' is not defined"):
        predicted(moving(misspelt))


def test_nothing_is_sent_without_an_exchange():
    found = sparsejax.predict(
        optax.sgd(0.1), struct(10), workers=8, **LINK, compute=0.5
    )
    assert found == sparsejax.planning._predict.Prediction(0.5, 0.5, 0, 0)


def test_simulated_workers_send_nothing():
    """Their sums are not collectives, so the time would be 0."""
    tx = sparsejax.simulate(sparsejax.dense(), workers=4)
    params = jax.ShapeDtypeStruct((4, 10), jnp.float32)
    with pytest.raises(TypeError, match=r"simulate.* Pass the transformation that"):
        sparsejax.predict(tx, params, workers=4, **LINK)
    chained = optax.chain(tx, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"first axis.*predict.*without `simulate`"):
        sparsejax.predict(chained, struct(10), workers=4, **LINK)
