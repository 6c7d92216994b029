"""`select`: the selection primitives against one read pass over the same data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from sparsejax.bench._timing import interleaved_medians
from sparsejax.vectors._counting import count_in
from sparsejax.vectors._selection import compact, select_in

if TYPE_CHECKING:
    from jaxtyping import Array, Float

# Runs of a candidate per program: this measures the device and not the dispatch.
_INNER = 10


def measure(n: int, density: float, repeats: int) -> list[dict[str, Any]]:
    """One row per primitive: device milliseconds, and ratios to the read pass."""
    k = max(1, int(density * n))
    x = jax.random.laplace(jax.random.key(0), (n,), jnp.float32)
    threshold = -jnp.log(jnp.float32(density))  # Laplace: P(|x| > t) = exp(-t)
    whole = {"start": 0, "size": n, "quota": k, "span": n, "capacity": k}
    eighth = {**whole, "size": n // 8, "quota": max(1, k // 8)}

    def ladder(t, count):
        return t * jnp.linspace(0.9, 1.1, count, dtype=jnp.float32)

    candidates: dict[str, Callable[..., Any]] = {
        "read pass": lambda x, t: jnp.max(jnp.abs(x) * t),
        "compact": lambda x, t: compact(x, t, capacity=k),
        "select_in": lambda x, t: select_in(x, threshold=t, **whole),
        "select_in, an eighth": lambda x, t: select_in(x, threshold=t, **eighth),
        "count_in, 4 thresholds": lambda x, t: count_in(x, 0, n, ladder(t, 4), span=n),
        "lax.top_k": lambda x, t: jax.lax.top_k(jnp.abs(x) * t, k),
    }
    inner = {name: 1 if name == "lax.top_k" else _INNER for name in candidates}
    compiled = {
        name: jax.jit(functools.partial(_repeat, f, inner[name]))
        for name, f in candidates.items()
    }
    compiled["copy"] = jax.jit(_copies, donate_argnums=0)
    inner["copy"] = _INNER
    buffer = [jnp.copy(x)]

    def run(name):
        if name != "copy":
            return compiled[name](x, threshold)
        buffer[0] = compiled["copy"](buffer[0])
        return buffer[0]

    names = ["copy", *candidates]
    medians = interleaved_medians(
        {name: functools.partial(run, name) for name in names}, repeats, warm_up=2
    )
    ms = {name: medians[name] / inner[name] for name in names}
    return [
        {
            "what": name,
            "n": n,
            "density": density,
            "ms_median": ms[name],
            "read_passes": ms[name] / ms["read pass"],
            "copies": ms[name] / ms["copy"],
            "times_faster_than_top_k": ms["lax.top_k"] / ms[name],
        }
        for name in names
    ]


def _repeat(f: Callable, times: int, x: Float[Array, " n"], t: Float[Array, ""]):
    """Runs `f(x, t)` at different thresholds, so XLA cannot merge runs."""

    def body(i, total):
        out = f(x, t * (1.0 + 1e-4 * i.astype(jnp.float32)))
        return total + sum(jnp.sum(o).astype(jnp.float32) for o in jax.tree.leaves(out))

    return jax.lax.fori_loop(0, times, body, jnp.float32(0))


def _copies(x: Float[Array, " n"]) -> Float[Array, " n"]:
    """The memory traffic of `_INNER` copies: reads and writes each element."""
    return jax.lax.fori_loop(0, _INNER, lambda _, x: x * 1.0000001, x)
