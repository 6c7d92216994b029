"""THE table: every recipe is a row, and a row buys every test of the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import optax

import sparsejax
from sparsejax import thresholds


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe under test.

    Attributes:
      name: shown in test ids.
      make: `make(**overrides) -> transformation`.
      memory: whether what is not sent is kept: mass is conserved.
      at_density_one: `() -> transformation` that should equal the dense mean; None where
        the method has no density.
    """

    name: str
    make: Callable[..., optax.GradientTransformationExtraArgs]
    memory: bool
    at_density_one: Callable[[], optax.GradientTransformationExtraArgs] | None = None


def _row(name, recipe, *, memory=True, density=None, **arguments):
    if density is not None:
        arguments["density"] = density

    def make(**overrides):
        return recipe(**{**arguments, **overrides})

    one = (lambda: make(density=1.0)) if density is not None else None
    return Case(name, make, memory, one)


CASES = (
    _row("dense", sparsejax.dense, memory=False),
    _row("exdyna", sparsejax.exdyna, density=0.05),
    _row("micro", sparsejax.micro, density=0.05),
    # The published rules start far above their target, so that messages overflow.
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
    _row("exdyna_overflow", sparsejax.exdyna, density=0.2, capacity=3),
    # Gradients without zeros: everything fits, or nothing does.
    _row("zen", sparsejax.zen, memory=False, capacity=1.0),
    _row("zen_overflow", sparsejax.zen, memory=False, capacity=0.05),
    _row(
        "zen_hierarchical",
        sparsejax.zen,
        memory=False,
        capacity=1.0,
        owners="hierarchical_hash",
    ),
)
