"""A ring, or a torus of rings, whose messages have one bit per coordinate."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax._workers import Workers
from sparsejax.exchanges.signs import _merge

if TYPE_CHECKING:
    from jaxtyping import Array, UInt32


def random_signs(
    words: UInt32[Array, " words"],
    facts: UInt32[Array, " facts"],
    workers: Workers,
    key: UInt32[Array, " 2"],
    merge=_merge.merge,
) -> tuple[UInt32[Array, " words"], UInt32[Array, "w facts"]]:
    """For every coordinate, the sign of a random worker, equal on all workers.

    The expectation of each bit of the result is the mean of the workers' bits. In a
    ring of w workers, each segment of the words visits all workers in w - 1 hops, and
    each worker merges its own bits into the segment. An all-gather collects the
    finished segments. Over a tuple of axes, segments that are finished along the last
    axis continue along the previous one: a torus of R x C workers needs R + C - 2 hops.

    Args:
      words: UInt32[words], per worker: packed signs.
      facts: UInt32[facts], per worker, sent in the all-gather.
      workers: all workers; one axis, or several.
      key: UInt32[2], replicated, fresh in every step.
      merge: makes one word of two, see `_merge.merge`.

    Returns:
      (UInt32[words], UInt32[w, facts]), replicated.
    """
    rings = [Workers(axis) for axis in workers.axes]
    sizes = [ring.count() for ring in rings]
    length = max(1, -(-words.size // math.prod(sizes)))
    own_key = _merge.fold_in(key, workers.index())
    padded = jnp.pad(words, (0, length * math.prod(sizes) - words.size))
    mine, share = workers.localize(padded), 1
    for axis, ring in reversed(list(enumerate(rings))):
        segments = mine.reshape(sizes[axis], -1)
        ring_key = _merge.fold_in(own_key, axis)
        mine = _reduce_scatter(segments, share, ring, ring_key, merge)
        share *= sizes[axis]

    gathered = workers.gather(jnp.concatenate([mine, workers.localize(facts)]))
    # The last axis was split first, so it is the major one in the words.
    pieces = gathered[:, :length].reshape(*sizes, length)
    pieces = pieces.transpose(*reversed(range(len(sizes))), len(sizes))
    return pieces.reshape(-1)[: words.size], gathered[:, length:]


def _reduce_scatter(segments, share, ring, key, merge):
    """Merges `segments` [c, s] over the ring; worker `r` gets segment `r`.

    Every local bit stands for `share` workers.
    """
    count, rank = ring.count(), ring.index()

    def hop(h, travelling):
        received = ring.shift(travelling)
        local = segments[(rank - h - 1) % count]
        return merge(received, local, h * share, share, _merge.fold_in(key, h))

    # A loop, so the program does not grow with the number of workers.
    return jax.lax.fori_loop(1, count, hop, segments[(rank - 1) % count])
