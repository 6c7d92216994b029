"""The k largest coordinates of each chunk of the vector, without a search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from sparsejax import _xla
from sparsejax._checks import check_count
from sparsejax.parts import Choice, Sparsifier
from sparsejax.sparsifiers._everything import or_everything

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int


def chunked_topk(chunk: int = 4096, k: int = 64) -> Sparsifier:
    """Selects the k largest magnitudes of each chunk of consecutive coordinates.

    There is no threshold over the whole vector, no search and no state: one call of
    `jax.lax.top_k` over chunks. A last chunk of only `size` coordinates selects
    `max(1, floor(k size / chunk))` of them. Zeros and NaN are never selected: a chunk
    with fewer non-zeros leaves slots empty.

    Each part of the vector sends the same share, so where magnitudes differ along the
    vector, small ones of one chunk are sent while larger ones of another wait.

    Args:
      chunk: the number of coordinates of a chunk.
      k: coordinates to select from each chunk, at most `chunk`.

    Raises:
      TypeError: if an argument is not an integer.
      ValueError: if an argument is less than 1, or `k` is more than `chunk`.

    Example:
      >>> import sparsejax
      >>> from sparsejax import exchanges, memories, sparsifiers
      >>> tx = sparsejax.sparsify(
      ...     sparsifiers.chunked_topk(chunk=4096, k=64),
      ...     exchange=exchanges.pairs(),
      ...     memory=memories.error_feedback(),
      ... )
    """
    chunk, k = check_count("chunk", chunk), check_count("k", k)
    if k > chunk:
        raise ValueError(
            f"k: got {k}, expected at most chunk={chunk}: k coordinates are selected "
            f"from each chunk. Raise chunk, or lower k."
        )

    def select(vector, state, step):
        indices = largest_of_chunks(vector, chunk, k)
        demand = jnp.sum(indices < step.n, dtype=jnp.int32)
        return Choice(indices, demand, jnp.zeros((), jnp.float32)), state

    made = Sparsifier(select, "overlapping")
    return or_everything(made, lambda n: _slots(n, chunk, k) >= n)


def largest_of_chunks(
    vector: Float[Array, " n"], chunk: int, k: int
) -> Int[Array, " slots"]:
    """The coordinates of the `k` largest magnitudes of each chunk. Per worker.

    Returns:
      Int32[slots], ascending; empty slots hold `n`.
    """
    n = vector.size
    slots = _slots(n, chunk, k)
    chunk = min(chunk, n)  # without padding to a chunk that is larger than the vector
    chunks, k = -(-n // chunk), min(k, chunk)
    # NaN is not above 0 either. Padding is 0, and is never selected for that reason.
    sizes = jnp.where(jnp.abs(vector) > 0, jnp.abs(vector), 0)
    sizes = jnp.pad(sizes, (0, chunks * chunk - n)).reshape(chunks, chunk)
    # On accelerators the stable call would be a sort of all coordinates.
    options = {"is_stable": False} if _xla.top_k_may_be_unstable() else {}
    found, offsets = jax.lax.top_k(sizes, k, **options)
    starts = chunk * jnp.arange(chunks, dtype=jnp.int32)
    # `top_k` descends, so the last chunk keeps its largest.
    share = slots - (chunks - 1) * k
    quota = jnp.where(jnp.arange(chunks) < chunks - 1, k, share)
    kept = (found > 0) & (jnp.arange(k)[None] < quota[:, None])
    indices = jnp.where(kept, offsets.astype(jnp.int32) + starts[:, None], n)
    # A sort over all chunks, so that empty slots come last. Only slots are sorted,
    # which takes a small part of the time of `top_k`.
    return jnp.sort(indices.reshape(-1), stable=False)[:slots]


def _slots(n: int, chunk: int, k: int) -> int:
    """Slots for `n` coordinates: `k` for each chunk, and the share of a partial one."""
    chunks, rest = divmod(n, chunk)
    return chunks * k + (max(1, k * rest // chunk) if rest else 0)
