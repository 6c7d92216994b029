"""Delivers every worker's values at the coordinates that one worker chose."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsejax._checks import check_value_bits
from sparsejax._report import sparse_report
from sparsejax.exchanges._delayed_union import delayed_union
from sparsejax.exchanges._dense import or_whole
from sparsejax.exchanges._indices import facts_of
from sparsejax.exchanges._units import Units
from sparsejax.exchanges._values import FULL, deliver_at, fill_shares
from sparsejax.parts import Delivery, Exchange
from sparsejax.vectors import _codec, _reach

if TYPE_CHECKING:
    from jaxtyping import Array, Float, UInt, UInt32

# "disjoint" is missing: parts rotate with the leader, so the leaders would not visit
# all parts, and some coordinates would never be delivered.
_ACCEPTED = frozenset({"overlapping", "agreed", "everything"})


class LeaderDetails(NamedTuple):
    """`Report.details` of `leader`. Replicated.

    Attributes:
      rounding: see `UnionDetails`.
    """

    rounding: Float[Array, ""]


def leader(value_bits: Any = None) -> Exchange:
    """Worker `step mod w` chooses the coordinates, and all average their values there.

    Each step sends two messages, whose size does not depend on the number of workers:
    the leader's indices, in the shortest code, with the small facts of the report; and
    the mean of `k` values.

    Every worker selects, since a branch that only one worker takes cannot contain a
    collective; the choices of the others are not sent.

    Args:
      value_bits: see `union`.

    Returns:
      An exchange for all choices except disjoint ones, of coordinates or rows.

    Raises:
      ValueError: for another `value_bits`.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.topk(0.01),
      ...     exchange=exchanges.leader(),
      ...     memory=memories.error_feedback(),
      ... )
    """
    widths = check_value_bits(value_bits)

    def apply(vector, choice, state, step):
        units, count, mine = Units.of(choice, step.n), step.w, step.rank
        facts, nowhere = facts_of(choice, step), jnp.zeros((), jnp.int32)
        code = _reach.encode_indices(
            choice.indices, nowhere, units.number, units.number
        )
        code = jnp.where(mine == step.index % count, code, jnp.zeros_like(code))
        words = _codec.pack(facts)
        table = jnp.zeros((count, words.size), words.dtype).at[mine].set(words)
        # All workers but the leader add zeros. Words have 32 bits, since not every
        # backend adds narrower words.
        told = step.workers.sum(_widen(_codec.pack((code, table))))
        told = jax.lax.bitcast_convert_type(told, _codec.WORD).reshape(1, -1)
        code, table = _codec.unpack(told, (code, table))
        facts = _codec.unpack(table[0], facts)
        indices = _reach.decode_indices(
            code, nowhere[None], units.number, units.number, choice.indices.shape[0]
        )
        indices = fill_shares(units.coordinates(indices[0]), step, widths)
        update, left, rounding = deliver_at(vector, indices, step, widths)
        report = sparse_report(indices, step.n, facts, LeaderDetails(rounding))
        return Delivery(update, indices, left, report), state

    def exact(layout, worker_count):
        del layout, worker_count
        return LeaderDetails(jnp.zeros((), jnp.float32))

    later = functools.partial(delayed_union, name="leader", leading=True)
    return Exchange(
        or_whole(apply, exact, widths),
        _ACCEPTED,
        "leader",
        details=exact,
        later=later if widths == FULL else None,
    )


def _widen(words: UInt[Array, " m"]) -> UInt32[Array, " half"]:
    """Packs words of 16 bits [m] into words of 32 bits [ceil(m / 2)]."""
    pairs = jnp.pad(words, (0, -words.size % 2)).reshape(-1, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.uint32)
