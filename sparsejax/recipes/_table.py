"""The table of recipes: the demo, the benchmarks and the tests run its rows."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import optax

from sparsejax import recipes


@dataclasses.dataclass(frozen=True)
class Row:
    """One recipe, and the facts that training runs and tests need.

    Attributes:
      recipe: the function.
      density: the name of the argument that takes the density; `None` if the recipe
        sends everything, or exactly the non-zeros.
      arguments: other arguments for training runs.
      after: a transformation that follows the recipe in training runs, or `None`.
      lossless: whether the recipe sends exactly the non-zeros.
      period: steps from one of the most expensive steps to the next; all other steps
        are the cheapest ones.
      memory: whether a worker keeps values for later steps.
      loses: whether some of the gradient is neither sent nor kept.
    """

    recipe: Callable[..., optax.GradientTransformationExtraArgs]
    density: str | None = "density"
    # A factory: before Python 3.12 a mapping proxy has no hash, and counts as mutable.
    arguments: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: MappingProxyType({})
    )
    after: optax.GradientTransformation | None = None
    lossless: bool = False
    period: int = 1
    memory: bool = True
    loses: bool = False

    @property
    def has_widths(self) -> bool:
        """Whether the recipe sends values, in `value_bits` each."""
        return "value_bits" in inspect.signature(self.recipe).parameters

    def build(self, density: float, **more: Any) -> optax.GradientTransformation:
        """The recipe at `density`, as training runs use it."""
        given = {} if self.density is None else {self.density: density}
        tx = self.recipe(**self.arguments, **given, **more)
        return tx if self.after is None else optax.chain(tx, self.after)


TABLE: Mapping[str, Row] = {
    "dense": Row(recipes.dense, None, memory=False),
    "exdyna": Row(recipes.exdyna),
    "micro": Row(recipes.micro),
    "marsit": Row(recipes.marsit, None, {"period": 100}, period=100),
    # `None` makes the scale suit the learning rate of the other recipes.
    "sign_majority": Row(
        recipes.sign_majority, None, {"scale": None}, memory=False, loses=True
    ),
    "ef_sign": Row(recipes.ef_sign, None),
    "deft": Row(recipes.deft),
    "cltk": Row(recipes.cltk),
    "random_k": Row(recipes.random_k),
    "topk": Row(recipes.topk),
    "chunked_topk": Row(recipes.chunked_topk),
    # Its residual is multiplied by `beta` in each step.
    "sparseloco": Row(recipes.sparseloco, loses=True),
    "sidco": Row(recipes.sidco),
    "hard_threshold": Row(recipes.hard_threshold, "max_density", {"threshold": 0.03}),
    # Scaled by 1/10 to suit the learning rate of the other recipes: velocities sum up
    # to ten times the gradient. Factor masking drops velocities.
    "dgc": Row(
        recipes.dgc, arguments={"momentum": 0.9}, after=optax.scale(0.1), loses=True
    ),
    "zen": Row(recipes.zen, None, lossless=True, memory=False),
}
