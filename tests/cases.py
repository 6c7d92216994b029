"""Every recipe is a row, and every row runs all tests of the contract.

The recipes are those of `sparsejax.recipes._table`; this table adds variants.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import optax
import pytest

from sparsejax import exchanges, thresholds
from sparsejax.recipes._table import TABLE


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe under test.

    Attributes:
      name: shown in test ids.
      make: `make(**overrides) -> transformation`.
      memory: whether a worker keeps its unsent values, so mass is conserved.
      at_density_one: `() -> transformation` that should equal the dense mean; None if
        the messages are too small for that.
      rounding: the relative rounding error of values on the wire.
      loses: whether some of the gradient is neither sent nor kept.
    """

    name: str
    make: Callable[..., optax.GradientTransformationExtraArgs]
    memory: bool
    at_density_one: Callable[[], optax.GradientTransformationExtraArgs] | None = None
    rounding: float = 0.0
    loses: bool = False


def _row(
    name,
    variant="",
    *,
    exact=True,
    dense=None,
    memory=None,
    loses=None,
    **arguments,
):
    """A row of a recipe.

    Args:
      name: the name of the recipe in `TABLE`.
      variant: distinguishes further rows of the recipe.
      exact: whether some arguments give the dense mean.
      dense: those arguments, if not density 1.
      memory: overrides the entry of `TABLE`.
      loses: likewise.
      **arguments: arguments of the recipe; the density is 0.05 by default.
    """
    row = TABLE[name]
    if row.density is not None:
        arguments.setdefault(row.density, 0.05)

    # Equal arguments give the same object, so tests share compiled programs.
    @functools.cache
    def make(**overrides):
        return row.recipe(**{**arguments, **overrides})

    if dense is None:
        dense = {} if row.density is None else {row.density: 1.0}
    return Case(
        f"{name}_{variant}" if variant else name,
        make,
        row.memory if memory is None else memory,
        (lambda: make(**dense)) if exact else None,
        2**-8 if variant.endswith("bf16") else 0.0,
        row.loses if loses is None else loses,
    )


_BF16 = {"value_bits": 16}
_STAIRCASE = {"threshold": thresholds.staircase()}

# Recipes that need arguments here, and variants of recipes.
_LISTED = (
    # The published rules start far above their target, so messages overflow.
    _row("exdyna", "staircase", **_STAIRCASE),
    _row("micro", "staircase", **_STAIRCASE),
    _row("exdyna", "overflow", density=0.2, capacity=3, exact=False),
    _row(
        "exdyna",
        "schedule",
        density=optax.linear_schedule(0.2, 0.02, 6),
        max_density=0.2,
        exact=False,
    ),
    _row("marsit", period=4, dense={"period": 1}),
    _row("marsit", "never_full", period=None, exact=False),
    _row("sign_majority", exact=False),
    _row("ef_sign", exact=False),
    # Gradients have no zeros: either everything fits, or nothing.
    _row("zen", max_density=1.0),
    _row("zen", "overflow", max_density=0.05),
    _row("zen", "hierarchical", max_density=1.0, owners="hierarchical_hash"),
    _row("exdyna", "bf16", **_BF16),
    _row("topk", "bf16", **_BF16),
    _row("chunked_topk", chunk=40),
    _row("sparseloco", chunk=40, exact=False),
    _row("exdyna", "1_bit", value_bits=1, exact=False),
    _row("topk", "2_bits", value_bits=2, exact=False),
    _row("topk", "union_bf16", exchange=exchanges.union(16)),
    _row("cltk", "bf16", **_BF16),
    _row("sidco", "leaf_bf16", fit="gamma", granularity="leaf", **_BF16),
    _row("random_k", "unbiased", memory=False, loses=True, unbiased=True),
    _row(
        "hard_threshold",
        threshold=0.05,
        dense={"max_density": 1.0, "threshold": 0.0},
    ),
    _row("dgc", "warmup", momentum=0.0, warmup_steps=2, loses=False),
)
_NAMES = {case.name for case in _LISTED}
CASES = (*(_row(name) for name in TABLE if name not in _NAMES), *_LISTED)


# One row for each recipe, without its variants: their names continue a recipe's name.
RECIPES = tuple(
    case for case in CASES if not any(case.name.startswith(f"{c.name}_") for c in CASES)
)

# With every recipe, plain `jax.jit` runs the program of the `shard_map` loop, text for
# text (`test_jit.py`). So the numbers under plain `jax.jit` are checked for only three
# exchanges: a union, pairs and a ring of signs.
PLAIN = tuple(case for case in RECIPES if case.name in ("exdyna", "topk", "marsit"))


def parametrize(cases: Iterable[Case] = CASES):
    """Runs a test once for each case; one process compiles all programs of a case."""
    return pytest.mark.parametrize("case", [param(case) for case in cases])


def param(case: Case, *others, marks=()):
    """A `pytest.param` of a case and other arguments."""
    name = "-".join([case.name, *(getattr(o, "__name__", str(o)) for o in others)])
    marks = (pytest.mark.xdist_group(case.name), *marks)
    return pytest.param(case, *others, id=name, marks=marks)
