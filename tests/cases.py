"""THE table: every recipe is a row, and a row buys every test of the contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import optax

import sparsejax
from sparsejax import exchanges, thresholds


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe under test.

    Attributes:
      name: shown in test ids.
      make: `make(**overrides) -> transformation`.
      memory: whether what is not sent is kept: mass is conserved.
      at_density_one: `() -> transformation` that should equal the dense mean; None where
        its messages are too small for that.
      rounding: of values on the wire, relative.
      conserves: whether what is given and not kept arrives. Not so with momentum, or
        where values are scaled.
    """

    name: str
    make: Callable[..., optax.GradientTransformationExtraArgs]
    memory: bool
    at_density_one: Callable[[], optax.GradientTransformationExtraArgs] | None = None
    rounding: float = 0.0
    conserves: bool = True


def _row(
    name,
    recipe,
    *,
    memory=True,
    density=None,
    exact=True,
    conserves=True,
    at_one=None,
    **arguments,
):
    if density is not None:
        arguments["density"] = density

    def make(**overrides):
        return recipe(**{**arguments, **overrides})

    one = (lambda: make(density=1.0, **(at_one or {}))) if density is not None else make
    narrow = "value_dtype" in arguments or name.endswith("_bf16")
    rounding = 2**-8 if narrow else 0.0
    return Case(name, make, memory, one if exact else None, rounding, conserves)


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
    one = (lambda: make(density=1.0, **(at_one or {}))) if density is not None else make
    narrow = "value_dtype" in arguments or name.endswith("_bf16")
    rounding = 2**-8 if narrow else 0.0
    return Case(name, make, memory, one if exact else None, rounding, conserves)
)
