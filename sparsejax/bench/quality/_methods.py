"""The methods that are compared: the rows of the table, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import optax

import sparsejax
from sparsejax.bench.quality._task import Task
from sparsejax.recipes._table import TABLE

_AVERAGE = optax.sgd(1.0)


@dataclasses.dataclass(frozen=True)
class Method:
    """One row: a recipe with its arguments, and how it is wired to the optimizer.

    Attributes:
      name: the name of the row.
      recipe: the name in the table of recipes.
      density: the target; None for a recipe without a density.
      arguments: other arguments of the recipe.
      momentum: the momentum of the optimizer; 0 without, or if the recipe has its own.
      before: whether the optimizer runs on each worker before the exchange.
      rounds: the number of local steps between two exchanges; 0 without rounds.
      outer: the transformation after the exchange of a round.
      factors: more learning rates: the grid of the task times each of these.
      rate_of: the row whose learning rate is used; None to search for one.
    """

    name: str
    recipe: str
    density: float | None = None
    arguments: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: MappingProxyType({})
    )
    momentum: float = 0.9
    before: bool = False
    rounds: int = 0
    outer: optax.GradientTransformation = _AVERAGE
    factors: tuple[float, ...] = (1.0,)
    rate_of: str | None = None

    @property
    def lossless(self) -> bool:
        return TABLE[self.recipe].lossless

    @property
    def period(self) -> int:
        """Steps from one of the most expensive steps to the next."""
        return TABLE[self.recipe].period

    def rates(self, task: Task) -> tuple[float, ...]:
        """The learning rates to choose from."""
        grid = task.local_rates if self.rounds else task.rates
        return tuple(sorted({rate * f for rate in grid for f in self.factors}))

    def exchange(
        self, sparse: Sequence[str], names: Sequence[str]
    ) -> optax.GradientTransformation:
        """The transformation that exchanges gradients.

        Args:
          sparse: the parameters whose gradients are mostly rows of zeros.
          names: all parameters.
        """
        row = TABLE[self.recipe]
        given = dict(row.arguments) | dict(self.arguments)
        if row.density is not None:
            given[row.density] = self.density
        tx = row.recipe(**given)
        if not row.lossless or not sparse:
            return tx
        labels = {name: "sparse" if name in sparse else "rest" for name in names}
        return optax.partition({"sparse": tx, "rest": sparsejax.dense()}, labels)


def _at(recipe: str, density: float = 0.01, bits: int = 32, **wiring: Any) -> Method:
    """A row of a recipe; at other densities and widths it uses the rate of 1 %."""
    name, arguments = recipe, {}
    if bits != 32:
        name, arguments = f"{name} {bits} bits", {"value_bits": bits}
    if density != 0.01:
        name = f"{name} {density:.1%}"
    return Method(
        name,
        recipe,
        density,
        arguments,
        rate_of=recipe if name != recipe else None,
        **wiring,
    )


def _rounds(recipe: str, steps: int, density: float | None, **outer: Any) -> Method:
    return Method(f"{recipe} {steps} steps", recipe, density, rounds=steps, **outer)


_DILOCO = {"outer": optax.sgd(0.7, momentum=0.9, nesterov=True)}
_LOCO = 64 / 4096  # the density of SparseLoCo, with two bits a value
_EXCLUSIVE = ("exdyna", "micro", "cltk", "deft")
_PAIRS = ("topk", "chunked_topk", "sidco")
# One-bit updates all have the same size, whatever the gradient. So the optimizer runs
# before the exchange, on each worker, as published. With momentum a worker's steps
# would point the same way for a while, and compensation would pile up until a step
# that sends whole vectors applies all of it. Without momentum, SGD needs a higher rate:
# momentum adds up ten gradients.
_MARSIT = Method(
    "marsit", "marsit", momentum=0.0, before=True, factors=(0.25, 1.0, 4.0)
)

_DEFAULT = (
    Method("dense", "dense"),
    *map(_at, ("exdyna", "micro", "topk", "sidco", "cltk", "deft")),
    Method("zen", "zen", arguments={"max_density": 0.2}, rate_of="dense"),
    _at("exdyna", bits=2),
    _MARSIT,
    _rounds("sparseloco", 15, _LOCO),
)
_MORE = (
    *map(_at, ("chunked_topk", "random_k")),
    Method("hard_threshold", "hard_threshold", 0.05),
    Method("dgc", "dgc", 0.01, {"momentum": 0.9}, momentum=0.0),
    Method("sign_majority", "sign_majority"),
    Method("ef_sign", "ef_sign"),
    *(_at(name, 0.001) for name in (*_EXCLUSIVE, *_PAIRS, "random_k")),
    *(_at(name, bits=8) for name in (*_EXCLUSIVE, *_PAIRS)),
    *(_at(name, bits=2) for name in (*_EXCLUSIVE[1:], *_PAIRS)),
    _rounds("sparseloco", 30, _LOCO),
    _rounds("dense", 15, None),
    _rounds("exdyna", 15, 0.01, **_DILOCO),
)
METHODS = {
    "default": {method.name: method for method in _DEFAULT},
    "full": {method.name: method for method in _DEFAULT + _MORE},
}
