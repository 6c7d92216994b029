"""Random coordinates, the same on all workers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._checks import check_seed
from sparsejax.parts import Choice, Sparsifier
from sparsejax.sparsifiers._everything import or_everything
from sparsejax.sparsifiers._target import Schedule, Target
from sparsejax.vectors._codec import bitmap
from sparsejax.vectors._mixing import mixed

if TYPE_CHECKING:
    from jaxtyping import Array, Int, UInt32

# Four rounds of a Feistel network with random functions are indistinguishable from a
# random permutation (Luby and Rackoff). The functions here are hashes, hence two more.
_ROUNDS = 6


def random_k(
    density: float | Schedule, *, seed: int = 0, max_density: float | None = None
) -> Sparsifier:
    """Selects `k = max(1, floor(density n))` coordinates without replacement.

    All workers draw the same coordinates from `(seed, step)`, so no index is sent.

    Args:
      density: fraction of the coordinates to select, in (0, 1], or a schedule: a
        function from Int32[], the step, to Float[].
      seed: the seed of the draws.
      max_density: the largest density of a schedule, which fixes all sizes; larger
        values of the schedule are clipped. Needed with a schedule only.

    Raises:
      TypeError: if an argument is not a number, or `density` is traced.
      ValueError: if an argument is out of its range; for a schedule without
        `max_density`, or `max_density` without a schedule.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.random_k(0.01),
      ...     exchange=exchanges.union(),
      ...     memory=memories.error_feedback(),
      ... )
    """
    target, seed = Target.of(density, max_density), check_seed(seed)

    def select(vector, state, step):
        del vector
        key = jax.random.fold_in(jax.random.key(seed), step.index)
        keys = jax.random.bits(key, (_ROUNDS,), jnp.uint32)
        live = target.now(step.index, step.n)
        indices = sample(keys, step.n, target.most(step.n), live)
        return Choice(indices, jnp.asarray(live, jnp.int32), jnp.float32(0)), state

    return or_everything(Sparsifier(select, "agreed"), target.is_everything)


def sample(
    keys: UInt32[Array, " rounds"], n: int, k: int, live: Int[Array, ""] | int
) -> Int[Array, " k"]:
    """Int32[k]: `live <= k` distinct numbers below `n`, ascending, then slots with `n`.

    The numbers are the images of `0 .. k-1` under a keyed permutation, so no array of
    size n is shuffled. The permutation is a Feistel network on the two digits of a
    number in a grid of `a` times `b`, hardly larger than `n`. Images outside `[0, n)`
    are permuted again.

    References:
      Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)

    def permute(x):
        left, right = x // b, x % b
        for i in range(0, _ROUNDS, 2):
            left = (left + mixed(right, keys[i]) % a) % a
            right = (right + mixed(left, keys[i + 1]) % b) % b
        return left * b + right

    def again(x):
        return jnp.where(x < n, x, permute(x))

    order = jnp.arange(k, dtype=jnp.uint32)
    drawn = permute(order)
    if _xla.on_cpu():
        drawn = jax.lax.while_loop(lambda x: jnp.any(x >= n), again, drawn)
    else:  # An accelerator would wait for the host in each turn of the loop.
        for _ in range(_turns(a * b, n)):
            drawn = again(drawn)
        drawn = jnp.minimum(drawn, n)
    drawn = jnp.where(order < live, drawn, n).astype(jnp.int32)
    if _xla.on_cpu():
        return jnp.sort(drawn)
    # A bitmap brings distinct numbers into order, without the many passes of a sort.
    code = bitmap(k, n)
    return code.decode(code.encode(drawn))


def _turns(cells: int, n: int) -> int:
    """Turns after which an image still lies outside with a probability below 1e-12.

    Its slot then stays empty. A share of about `1 / sqrt(n)` of the cells is outside.
    """
    outside = (cells - n) / cells
    return math.ceil(-12 / math.log10(outside)) if outside else 0
