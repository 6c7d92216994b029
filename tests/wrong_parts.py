"""Methods with a part that is wrong on purpose, and the failure that names it."""

from __future__ import annotations

import pytest

import sparsejax
from sparsejax import exchanges, memories, sparsifiers


def method(select=None, deliver=None, memory=None, **fields):
    """Top-k through pairs, with a changed choice, delivery, memory or field."""
    sparsifier, exchange = sparsifiers.chunked_topk(20, 2), exchanges.pairs()
    if "adapt" in fields:  # Chunks have no state, and compile faster.
        sparsifier = sparsifiers.topk(0.1)

    def changed_select(vector, state, step):
        choice, state = sparsifier.select(vector, state, step)
        return select(choice, vector), state

    def changed_apply(vector, choice, state, step):
        delivery, state = exchange.apply(vector, choice, state, step)
        return deliver(delivery, vector), state

    if select:
        fields["select"] = changed_select
    return sparsejax.sparsify(
        sparsifier._replace(**fields),
        exchange=exchange._replace(apply=changed_apply) if deliver else exchange,
        memory=memory or memories.error_feedback(),
    )


def dense(memory=None, deliver=lambda delivery: delivery, **fields):
    """Averages whole vectors, which compiles fastest, with changed parts."""
    exchange = exchanges.dense()

    def apply(*args):
        delivery, state = exchange.apply(*args)
        return deliver(delivery), state

    return sparsejax.sparsify(
        sparsifiers.everything()._replace(**fields),
        exchange=exchange._replace(apply=apply),
        memory=memory or memories.error_feedback(),
    )


def memory_with(**fields):
    return memories.error_feedback()._replace(**fields)


def settled(vector, delivery):
    """The gradient that waits, of a correct memory."""
    return memories.error_feedback().settle(vector, delivery, None)


def fails(check, tx, message, **options):
    with pytest.raises(AssertionError, match=message) as caught:
        check(tx, workers=2, **options)
    text = str(caught.value)
    assert text.endswith(".")
    assert "\n" not in text
