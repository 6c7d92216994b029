"""Zen and the exchanges behind it: the exact sum of sparse gradients."""

from __future__ import annotations

import functools
import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import sparsejax
from sparsejax import _bits, _owners, exchanges, memories, sparsifiers
from sparsejax._base import Payload, Sparsifier
from sparsejax._layout import Layout
from sparsejax.exchanges._hashed_owners import sizes_of
from tests.harness import WORKERS, mesh_of, run, trainer

# Not divisible by the number of workers, and more units than bits in a few words.
N, V, D = 1003, 205, 6
COORDINATES = jnp.zeros((N,))
TABLE = {"table": jnp.zeros((V, D))}


def lossless(exchange, capacity=1.0, rows=True):
    return sparsejax.sparsify(
        sparsifiers.nonzero(capacity, rows=rows),
        exchange=exchange,
        memory=memories.none(),
    )


METHODS = {
    "permutation": lambda **sizes: lossless(exchanges.hashed_owners(**sizes)),
    "hierarchical_hash": lambda **sizes: lossless(
        exchanges.hashed_owners(owners="hierarchical_hash", **sizes)
    ),
    "recursive_doubling": lambda **sizes: lossless(
        exchanges.recursive_doubling(**sizes)
    ),
}
every_method = pytest.mark.parametrize("method", METHODS)


@functools.cache
def compiled(method, shape, workers=WORKERS):
    """`gradients [w, *shape] -> (updates, report)`, compiled once for all supports."""
    tx = sparsejax.dense() if method == "dense" else METHODS[method]()
    params = jnp.zeros(shape)
    made = trainer(tx, params, mesh=mesh_of(workers))

    def mean(gradients):
        _, state, updates = made.advance(*made.start(), gradients)
        shards = [np.asarray(s.data) for s in updates.addressable_shards]
        assert len(shards) == workers
        for other in shards[1:]:
            assert shards[0].tobytes() == other.tobytes()
        return shards[0], jax.device_get(sparsejax.report(state))

    return mean


def supports(units, workers, rng):
    """Named Bool[w, units]: where each worker's gradient is not zero."""
    ids = np.arange(units)
    ranks = np.arange(workers)[:, None]
    ends = (ids == 0) | (ids == units - 1)
    return {
        "contiguous": ids * workers // units == ranks,
        "strided": ids % workers == ranks,
        "one block": np.broadcast_to(ids < units // 4, (workers, units)),
        "random": rng.random((workers, units)) < 0.07,
        "skewed": rng.random((workers, units)) < 0.3 * (ids < units // 8),
        "empty": np.zeros((workers, units), bool),
        "full": np.ones((workers, units), bool),
        "ends": np.broadcast_to(ends, (workers, units)),
        "one worker": np.broadcast_to(ranks == workers - 1, (workers, units)),
    }


def integers(support, rng, shape):
    """Integer-valued gradients [w, *shape] with rows of zeros where not supported."""
    values = rng.integers(-50, 50, size=(len(support), *shape)).astype(np.float32)
    mask = support.reshape(support.shape + (1,) * (len(shape) - 1))
    return jnp.asarray(np.where(mask, values, 0))


@every_method
@pytest.mark.parametrize("shape", [(N,), (V, D)], ids=["coordinates", "rows"])
def test_equals_dense_bit_for_bit(method, shape):
    rng = np.random.default_rng(0)
    for name, support in supports(shape[0], WORKERS, rng).items():
        drawn = integers(support, rng, shape)
        mine, report = compiled(method, shape)(drawn)
        theirs, _ = compiled("dense", shape)(drawn)
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
        # Only a full support may ask for more than was planned for.
        if name != "full":
            assert not report.details.overflow, name
            rows = (np.asarray(theirs).reshape(shape[0], -1) != 0).any(axis=1).sum()
            assert report.sent == rows * math.prod(shape[1:])
            units = (drawn.reshape(WORKERS, shape[0], -1) != 0).any(axis=2).sum(axis=1)
            np.testing.assert_array_equal(report.demand, units * math.prod(shape[1:]))


@every_method
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_number_of_workers(method, workers):
    rng = np.random.default_rng(1)
    for name, support in supports(N, workers, rng).items():
        drawn = integers(support, rng, (N,))
        mine, _ = compiled(method, (N,), workers)(drawn)
        theirs, _ = compiled("dense", (N,), workers)(drawn)
        np.testing.assert_array_equal(mine, theirs, err_msg=name)


@every_method
def test_floats_to_rounding(method):
    rng = np.random.default_rng(2)
    drawn = rng.normal(size=(WORKERS, N)) * (rng.random((WORKERS, N)) < 0.1)
    drawn = drawn.astype(np.float32)
    mine, report = compiled(method, (N,))(jnp.asarray(drawn))
    mean = drawn.astype(np.float64).mean(axis=0)
    scale = np.abs(drawn).mean(axis=0)
    assert (np.abs(mine - mean) <= 4e-7 * scale).all()
    assert not report.details.overflow


@every_method
def test_sums_that_cancel_are_not_sent(method):
    rng = np.random.default_rng(3)
    support = np.broadcast_to(rng.random(N) < 0.1, (WORKERS, N))
    drawn = np.array(integers(support, rng, (N,)))
    drawn[1::2] = -drawn[::2]
    drawn[:, 0] = [3.0, *[0] * (WORKERS - 1)]
    mine, report = compiled(method, (N,))(jnp.asarray(drawn))
    assert report.sent == 1
    assert mine[0] == 3 / WORKERS
    assert not mine[1:].any()


@every_method
def test_nan_is_not_zero(method):
    """At the level of the exchange: `sparsify` decides before about such gradients."""
    exchange = {
        "permutation": exchanges.hashed_owners(),
        "hierarchical_hash": exchanges.hashed_owners(owners="hierarchical_hash"),
        "recursive_doubling": exchanges.recursive_doubling(),
    }[method]
    layout = Layout.of(COORDINATES)
    workers = sparsejax._transform.Workers("data")
    chooser = sparsifiers.nonzero(0.5)

    def mean(vector):
        step = jnp.zeros((), jnp.int32)
        payload, _ = chooser.select(vector, (), step, workers, layout)
        payload = payload._replace(dropped=jnp.zeros((), jnp.bool_))
        return exchange.apply(vector, payload, (), step, workers, layout)[0].mean

    drawn = np.zeros((4, N), np.float32)
    drawn[2, [0, 17, N - 1]] = [np.nan, 5, np.inf]
    drawn[3, N - 1] = -np.inf
    found = jax.jit(jax.vmap(mean, axis_name="data", out_axes=None))(drawn)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(found)), [0, N - 1])
    assert found[17] == 5 / 4
    assert np.count_nonzero(found) == 3


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("units", [1, 5, 1000, 1003])
def test_permutation_is_a_bijection(workers, units):
    owners = _owners.permutation()
    size = owners.size(units, workers)
    owner, place = np.divmod(np.arange(workers * size, dtype=np.int32), size)
    index = owners.unit(jnp.asarray(owner), jnp.asarray(place), workers, 5)
    assert sorted(np.asarray(index)) == list(range(workers * size))
    np.testing.assert_array_equal(owners.place(index, workers), place)


@pytest.mark.parametrize("name", sorted(_owners.MAPS))
def test_workers_meet_at_one_owner(name):
    """Whoever sends a unit sends it to the same owner, and all of them arrive."""
    owners = _owners.MAPS[name]()
    rng = np.random.default_rng(4)
    split = jax.jit(lambda indices: owners.split(indices, N, WORKERS, 400, 9))
    home = {}
    for _ in range(4):
        chosen = np.sort(rng.choice(N, 300, replace=False)).astype(np.int32)
        padded = jnp.asarray(np.append(chosen, np.full(100, N, np.int32)))
        lists = split(padded)
        arrived = []
        for owner, slots in enumerate(np.asarray(lists.slots)):
            for index in np.asarray(padded)[slots[slots < 400]]:
                assert home.setdefault(index, owner) == owner
                arrived.append(index)
        assert sorted(arrived) == list(chosen)
        assert not lists.failed
        assert lists.counts.sum() == 300


@pytest.mark.parametrize("name", sorted(_owners.MAPS))
@pytest.mark.parametrize("kind", ["contiguous", "strided", "random"])
def test_balance_is_within_the_bound(name, kind):
    """Wang et al.: with probability 1 - 1/w the bounds hold; here for 20 keys of 20."""
    n, m = 40_000, 2000
    owners = _owners.MAPS[name]()
    rng = np.random.default_rng(5)
    chosen = {
        "contiguous": np.arange(m) + 1234,
        "strided": np.arange(m) * 16,
        "random": np.sort(rng.choice(n, m, replace=False)),
    }[kind].astype(np.int32)
    split = jax.jit(lambda key: owners.split(jnp.asarray(chosen), n, WORKERS, m, key))
    largest = [int(split(key).counts.max()) for key in range(20)]
    bound = m / WORKERS * (1 + math.sqrt(6 * WORKERS * math.log(WORKERS) / m))
    assert max(largest) <= bound
    contiguous = np.bincount(chosen * WORKERS // n, minlength=WORKERS)
    if kind == "contiguous":
        assert contiguous.max() / contiguous.mean() == pytest.approx(WORKERS, rel=0.3)


def test_table_places_read_back():
    """At a load of one half, tables lose a few to the serial area and nothing else."""
    owners = _owners.hierarchical_hash()
    k = 4000
    chosen = jnp.arange(k, dtype=jnp.int32) * 3
    lists = jax.jit(lambda c: owners.split(c, 3 * k, WORKERS, k, 0))(chosen)
    slots = np.asarray(lists.slots)
    assert sorted(slots[slots < k]) == list(range(k))
    assert not lists.failed


@pytest.mark.parametrize(("k", "workers"), [(3, 8), (30, 4), (30, 8), (300, 8)])
def test_short_tables_have_room_for_chance(k, workers):
    """Their loads vary most; 82 % of these steps failed for want of two places."""
    owners = _owners.hierarchical_hash()
    rng = np.random.default_rng(7)
    chosen = [np.sort(rng.choice(20 * k, k, replace=False)) for _ in range(400)]
    split = jax.vmap(lambda i, key: owners.split(i, 20 * k, workers, k, key).failed)
    failed = jax.jit(split)(np.stack(chosen).astype(np.int32), np.arange(400))
    assert not failed.any()


@every_method
def test_overflow_gives_the_dense_mean(method):
    small = {"capacity": 0.02}
    tx = METHODS[method](**small)
    made = trainer(tx, COORDINATES)
    rng = np.random.default_rng(6)
    params, state = made.start()
    for density, overflows in [(0.005, False), (0.2, True), (0.01, False)]:
        drawn = integers(rng.random((WORKERS, N)) < density, rng, (N,))
        params, state, updates = made.advance(params, state, drawn)
        theirs, _ = compiled("dense", (N,))(drawn)
        np.testing.assert_array_equal(updates, theirs)
        report = sparsejax.report(state)
        assert report.details.overflow == overflows
        assert report.details.density_after == pytest.approx(
            np.mean(theirs != 0), rel=1e-6
        )
        assert (report.sent == N) == overflows


def test_one_worker_beyond_its_capacity_makes_the_step_dense():
    tx = sparsejax.simulate(sparsejax.zen(0.05), workers=4)
    drawn = np.zeros((4, N), np.float32)
    drawn[3, : N // 2] = 1
    updates, state = tx.update(jnp.asarray(drawn), tx.init(COORDINATES))
    np.testing.assert_array_equal(updates, drawn.sum(axis=0) / 4)
    assert sparsejax.report(state).details.overflow
    assert sparsejax.report(state).demand[3] == N // 2


def top_k(k):
    """A small overlapping sparsifier: the k largest magnitudes of each worker."""

    def select(vector, state, step, workers, layout):
        _, found = jax.lax.top_k(jnp.abs(vector), k)
        indices = jnp.sort(found)
        return Payload(indices, vector[indices], jnp.asarray(k), jnp.zeros(())), state

    return Sparsifier(
        lambda layout, count: (), select, lambda state, *_: state, "overlapping"
    )


def _topk_stream(dtype):
    def stream(t):
        rng = np.random.default_rng([7, t])
        return jnp.asarray(rng.laplace(size=(WORKERS, N)), dtype)

    return stream


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("exchange", "k", "overflows"),
    [
        (exchanges.hashed_owners(), 30, False),
        (exchanges.hashed_owners(), 700, False),
        (exchanges.hashed_owners(densification=1.0), 30, True),
        (exchanges.recursive_doubling(), 30, False),
        (exchanges.recursive_doubling(capacity=0.01), 30, True),
    ],
    ids=["hashed", "hashed dense", "hashed overflow", "doubling", "doubling overflow"],
)
def test_error_feedback_conserves_mass(exchange, k, overflows, dtype):
    """And what does not fit only costs bytes: the same coordinates are delivered."""
    tx = sparsejax.sparsify(
        top_k(k), exchange=exchange, memory=memories.error_feedback()
    )
    given = received = scale = np.zeros(N)
    kept = np.zeros((WORKERS, N), np.float32)
    params = jnp.zeros((N,), dtype)
    for drawn, updates, state in run(tx, 30, params=params, stream=_topk_stream(dtype)):
        drawn = np.asarray(drawn, np.float64)
        given = given + drawn.mean(axis=0)
        scale = scale + np.abs(drawn).mean(axis=0)
        received = received + np.asarray(updates, np.float64)
        report = sparsejax.report(state)
        assert report.details.overflow == overflows
        union = np.argsort(-np.abs(kept + drawn.astype(np.float32)))[:, :k]
        assert report.sent == len(np.unique(union))
        kept = np.asarray(state.memory.per_worker)
    error = np.abs(received + kept.mean(axis=0) - given) / scale
    assert error.max() < 1e-6


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(4003,), (405, 6)], ids=["coordinates", "rows"])
def test_bytes_equal_the_formula(workers, shape):
    """(w-1)/w of: lists for w owners, and messages of w owners with the facts."""
    capacity, units = 0.02, shape[0]
    width = math.prod(shape[1:])
    slots = math.ceil(capacity * units)
    tx = sparsejax.zen(capacity)
    params = jnp.zeros(shape)
    made = trainer(tx, params, mesh=mesh_of(workers))
    gradients = made.shard(jnp.zeros((workers, *shape)))
    moved = sparsejax.compiled_wire_bytes(
        made.step.lower(made.params, made.state, gradients).compile()
    )
    # By hand: at these sizes indices take 2 bytes.
    log = workers * math.log(workers)
    push = math.ceil((1 + math.sqrt(9 * log / slots)) * slots / workers)
    density = slots / units
    total = math.ceil(slots * (1 - (1 - density) ** workers) / density)
    pull = math.ceil((1 + math.sqrt(6 * log / total)) * total / workers)
    owned = -(-units // workers)
    push, pull = min(push, slots), min(pull, owned, push * workers)
    bitmap = 4 * math.ceil(owned / _bits.WORD)
    assert 2 * pull != bitmap
    facts = 24
    expected = {
        "all-to-all": (workers - 1) * push * (2 + 4 * width),
        "all-gather": (workers - 1)
        * (facts + pull * 4 * width + min(2 * pull, bitmap)),
    }
    usual = dict.fromkeys(expected, 0.0)
    for kind, size, branch, _ in moved.collectives:
        if not branch:
            usual[kind] += size
    assert usual == pytest.approx(expected)
    # Where something does not fit, the dense mean comes on top.
    dense = 2 * (workers - 1) / workers * 4 * units * width
    branches = [size for branch, size in moved.by_branch.items() if branch]
    assert branches == [pytest.approx(dense)]


def test_pull_form_follows_bytes():
    """Lists below 1/32 of the places (or 1/16), bitmaps above, all sums near 1."""
    owners = _owners.permutation()
    form = functools.partial(sizes_of, owners, 2_000_000, width=1, worker_count=8)

    def at(density):
        slots = math.ceil(density * 2_000_000)
        return form(slots=slots, capacity=None, densification=1.0).form

    assert [at(d) for d in (0.001, 0.02, 0.05, 0.5, 0.99)] == [
        "indices", "indices", "bitmap", "bitmap", "dense",
    ]  # fmt: skip


FORMS = {
    # Of a few units that all workers share, then of ever denser random supports.
    "indices": ((N,), 0.005, 1.0, 4 / N),
    "bitmap": ((N,), 0.1, None, 0.05),
    "bitmap of rows": ((V, D), 0.05, None, 0.02),
    "dense": ((N,), 1.0, None, 0.5),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_the_pull_is_exact(name):
    shape, capacity, densification, density = FORMS[name]
    units = shape[0]
    sizes = sizes_of(
        _owners.permutation(),
        units,
        math.ceil(capacity * units),
        math.prod(shape[1:]),
        WORKERS,
        None,
        densification,
    )
    assert sizes.form == name.split()[0]
    tx = sparsejax.zen(capacity, densification=densification)
    tx = sparsejax.simulate(tx, workers=WORKERS)
    state = tx.init(jnp.zeros(shape))
    rng = np.random.default_rng(8)
    for _ in range(5):
        support = rng.random((WORKERS, units)) < density
        if densification == 1.0:
            support[:] = False
            support[:, [0, 17, 500, units - 1]] = True
        drawn = integers(support, rng, shape)
        updates, state = tx.update(drawn, state)
        theirs = _simulated("dense", shape, WORKERS)(drawn)
        np.testing.assert_array_equal(updates, theirs)
        assert not sparsejax.report(state).details.overflow


def test_nonzero_chooses_rows():
    layout = Layout.of({"a": jnp.zeros((5, 6)), "b": jnp.zeros((2, 4))})
    assert layout.row_size == 2
    vector = jnp.zeros(38).at[jnp.array([1, 7, 37])].set(jnp.array([3.0, jnp.nan, -1]))
    chooser = sparsifiers.nonzero(0.2)
    payload, _ = chooser.select(vector, (), 0, None, layout)
    np.testing.assert_array_equal(payload.indices, [0, 3, 18, 19])
    np.testing.assert_array_equal(
        payload.values, [[0, 3], [0, np.nan], [0, -1], [0, 0]]
    )
    assert payload.demand == 3
    assert payload.complete
    small, _ = sparsifiers.nonzero(0.1).select(vector, (), 0, None, layout)
    assert small.demand == 3
    assert not small.complete
    single, _ = sparsifiers.nonzero(0.1, rows=False).select(vector, (), 0, None, layout)
    np.testing.assert_array_equal(single.indices, [1, 7, 37, 38])


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ([(5, 6)], 6),
        ([(5, 6), (3, 4, 2)], 2),
        ([(5, 6), (7,)], 1),
        ([(5, 6), ()], 1),
        ([(5, 6), (0, 5)], 6),
        ([], 1),
        ([(0,)], 1),
    ],
)
def test_rows_divide_every_leaf(shapes, size):
    assert Layout.of([jnp.zeros(shape) for shape in shapes]).row_size == size


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(st.data())
def test_any_support(data):
    """Under `simulate`, compiled once: random supports, values, and cancellations."""
    shape = (67,)
    masks = data.draw(
        st.lists(
            st.lists(st.integers(-2, 2), min_size=67, max_size=67),
            min_size=5,
            max_size=5,
        )
    )
    drawn = jnp.asarray(masks, jnp.float32)
    for method in METHODS:
        mine = _simulated(method, shape, 5)(drawn)
        np.testing.assert_array_equal(mine, _simulated("dense", shape, 5)(drawn))


@functools.cache
def _simulated(method, shape, workers):
    tx = sparsejax.dense() if method == "dense" else METHODS[method]()
    tx = sparsejax.simulate(tx, workers=workers)
    state = tx.init(jnp.zeros(shape))
    return jax.jit(lambda gradients: tx.update(gradients, state)[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0.0}, "capacity: got 0.0"),
        ({"capacity": 1.5}, "capacity: got 1.5"),
        ({"densification": 0.5}, "densification: got 0.5"),
        ({"owners": "contiguous"}, "owners: got 'contiguous'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        sparsejax.zen(**arguments)
    with pytest.raises(ValueError, match=message):
        exchanges.hashed_owners(**arguments)
