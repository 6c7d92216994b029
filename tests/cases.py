"""THE table: every recipe is a row, and every row runs all tests of the contract."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import optax
import pytest

import sparsejax
from sparsejax import exchanges, thresholds


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
    recipe,
    *,
    memory=True,
    density=None,
    exact=True,
    dense=None,
    loses=False,
    **arguments,
):
    """`dense`: overrides that give the dense mean, if not density 1."""
    if density is not None:
        arguments["density"] = density

    # Equal arguments give the same object, so tests share compiled programs.
    @functools.cache
    def make(**overrides):
        return recipe(**{**arguments, **overrides})

    if dense is None:
        dense = {} if density is None else {"density": 1.0}
    one = (lambda: make(**dense)) if exact else None
    rounding = 2**-8 if name.endswith("_bf16") else 0.0
    return Case(name, make, memory, one, rounding, loses)


CASES = (
    _row("dense", sparsejax.dense, memory=False),
    _row("exdyna", sparsejax.exdyna, density=0.05),
    _row("micro", sparsejax.micro, density=0.05),
    # The published rules start far above their target, so messages overflow.
    _row(
        "exdyna_staircase",
        sparsejax.exdyna,
        density=0.05,
        threshold=thresholds.staircase(),
    ),
    _row(
        "micro_staircase",
        sparsejax.micro,
        density=0.05,
        threshold=thresholds.staircase(),
    ),
    _row("exdyna_overflow", sparsejax.exdyna, density=0.2, capacity=3, exact=False),
    _row(
        "exdyna_schedule",
        functools.partial(sparsejax.exdyna, optax.linear_schedule(0.2, 0.02, 6)),
        max_density=0.2,
        exact=False,
    ),
    _row("marsit", sparsejax.marsit, period=4, dense={"period": 1}),
    _row("marsit_never_full", sparsejax.marsit, period=None, exact=False),
    _row(
        "sign_majority",
        sparsejax.sign_majority,
        memory=False,
        exact=False,
        loses=True,
    ),
    _row("ef_sign", sparsejax.ef_sign, exact=False),
    # Gradients have no zeros: either everything fits, or nothing.
    _row("zen", sparsejax.zen, memory=False, max_density=1.0),
    _row("zen_overflow", sparsejax.zen, memory=False, max_density=0.05),
    _row(
        "zen_hierarchical",
        sparsejax.zen,
        memory=False,
        max_density=1.0,
        owners="hierarchical_hash",
    ),
    _row("exdyna_bf16", sparsejax.exdyna, density=0.05, value_dtype=jnp.bfloat16),
    _row("topk", sparsejax.topk, density=0.05),
    _row("topk_bf16", sparsejax.topk, density=0.05, value_dtype=jnp.bfloat16),
    _row(
        "topk_union_bf16",
        sparsejax.topk,
        density=0.05,
        exchange=exchanges.union(jnp.bfloat16),
    ),
    _row("cltk", sparsejax.cltk, density=0.05),
    _row("cltk_bf16", sparsejax.cltk, density=0.05, value_dtype=jnp.bfloat16),
    _row("sidco", sparsejax.sidco, density=0.05),
    _row(
        "sidco_leaf_bf16",
        sparsejax.sidco,
        density=0.05,
        fit="gamma",
        granularity="leaf",
        value_dtype=jnp.bfloat16,
    ),
    _row("random_k", sparsejax.random_k, density=0.05),
    _row(
        "random_k_unbiased",
        sparsejax.random_k,
        density=0.05,
        memory=False,
        loses=True,
        unbiased=True,
    ),
    _row(
        "hard_threshold",
        sparsejax.hard_threshold,
        max_density=0.05,
        threshold=0.05,
        dense={"max_density": 1.0, "threshold": 0.0},
    ),
    _row("deft", sparsejax.deft, density=0.05),
    _row("dgc", sparsejax.dgc, density=0.05, loses=True),
    _row("dgc_warmup", sparsejax.dgc, density=0.05, momentum=0.0, warmup_steps=2),
)


# One row for each recipe, without its variants: their names continue a recipe's name.
RECIPES = tuple(
    case for case in CASES if not any(case.name.startswith(f"{c.name}_") for c in CASES)
)


def parametrize(cases: Iterable[Case] = CASES):
    """Runs a test once for each case; one process compiles all programs of a case."""
    return pytest.mark.parametrize("case", [param(case) for case in cases])


def param(case: Case, *others):
    """A `pytest.param` of a case, and of other arguments."""
    name = "-".join([case.name, *(getattr(o, "__name__", str(o)) for o in others)])
    mark = pytest.mark.xdist_group(case.name)
    return pytest.param(case, *others, id=name, marks=mark)
