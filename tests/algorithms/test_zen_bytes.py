"""The bytes and the form of Zen's messages."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import pytest

import sparsejax
from sparsejax.exchanges.sums import _owners
from sparsejax.exchanges.sums._sizes import sizes_of
from sparsejax.vectors import _bits
from tests.harness import mesh_of, trainer


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(4003,), (405, 6)], ids=["coordinates", "rows"])
def test_bytes_equal_the_formula(workers, shape):
    """(w-1)/w of the lists to w owners, and of w owners' messages with the facts."""
    max_density, units = 0.02, shape[0]
    width = math.prod(shape[1:])
    slots = math.ceil(max_density * units)
    tx = sparsejax.zen(max_density)
    params = jnp.zeros(shape)
    made = trainer(tx, params, mesh=mesh_of(workers))
    gradients = made.shard(jnp.zeros((workers, *shape)))
    moved = sparsejax.compiled_wire_bytes(
        made.step.lower(made.params, made.state, gradients).compile()
    )
    # By hand: at these sizes an index has 2 bytes.
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
    # If something does not fit, the dense mean adds to the bytes.
    dense = 2 * (workers - 1) / workers * 4 * units * width
    branches = [size for branch, size in moved.by_branch.items() if branch]
    assert branches == [pytest.approx(dense)]


def test_pull_form_follows_bytes():
    """Lists below 1/32 (or 1/16) of the units, bitmaps above, all sums near 1."""
    owners = _owners.permutation()
    form = functools.partial(sizes_of, owners, 2_000_000, width=1, worker_count=8)

    def at(density):
        slots = math.ceil(density * 2_000_000)
        return form(slots=slots, max_density=None, densification=1.0).form

    assert [at(d) for d in (0.001, 0.02, 0.05, 0.5, 0.99)] == [
        "indices", "indices", "bitmap", "bitmap", "dense",
    ]  # fmt: skip
