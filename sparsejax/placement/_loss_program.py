"""Finds mistakes in the traced program of a loss."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparsejax._workers import spec_axes

# Operations through which the search goes from a number back to its operands.
_THROUGH = {
    "convert_element_type", "squeeze", "reshape", "broadcast_in_dim", "copy", "neg",
    "max", "min", "add", "add_any", "stop_gradient", "clamp", "select_n", "integer_pow",
    "mul", "reduce_sum",
}  # fmt: skip
_SUMS = {"psum", "psum_invariant"}


def constrained_axes(jaxpr: Any) -> set[str]:
    """The mesh axes that sharding constraints in `jaxpr` name."""
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            found |= set(spec_axes(getattr(eqn.params["sharding"], "spec", None) or ()))
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found |= constrained_axes(inner)
    return found


def divides_by_all(jaxpr: Any, axes: frozenset[str]) -> bool:
    """Whether the first result of `jaxpr` is `x / psum(y)` with a local `x`.

    With w workers such a loss is 1/w of the intended one, and so is its gradient.
    `psum(x) / psum(y)` is right, and so is a `pmean` of it.

    Args:
      jaxpr: the program of the loss, with the workers' axes bound.
      axes: the workers' axes.
    """
    return _scaled(_Place(jaxpr, jaxpr.outvars[0]), axes)


class _Place(NamedTuple):
    """A variable of a program, and the call that the program is the body of.

    Attributes:
      jaxpr: the program.
      variable: one of its variables, or a literal.
      caller: the place of the call's operands, and the call; None for the outermost
        program.
    """

    jaxpr: Any
    variable: Any
    caller: tuple[Any, Any] | None = None

    def made_by(self) -> tuple[Any, _Place]:
        """The equation that makes the variable, and the place of its operands.

        None for a constant, and for an argument of the outermost program.
        """
        for eqn in self.jaxpr.eqns:
            for i, out in enumerate(eqn.outvars):
                if out is self.variable:
                    inner = _inner(eqn)
                    if inner is None:
                        return eqn, self
                    body = _Place(inner, inner.outvars[i], (self, eqn))
                    return body.made_by()
        for i, argument in enumerate(self.jaxpr.invars):
            if argument is self.variable and self.caller:
                outside, call = self.caller
                return outside._replace(variable=call.invars[i]).made_by()
        return None, self


def _inner(eqn: Any) -> Any:
    """The program that an equation calls once; None for other equations."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    inner = getattr(inner, "jaxpr", inner)
    same = inner is not None and len(inner.invars) == len(eqn.invars)
    return inner if same and eqn.primitive.name not in ("scan", "while") else None


def _scaled(place: _Place, axes: frozenset[str]) -> bool:
    eqn, here = place.made_by()
    if eqn is None:
        return False
    operands = [here._replace(variable=x) for x in eqn.invars]
    if eqn.primitive.name == "div":
        above, below = operands
        if _summed(below, axes):
            return not _summed(above, axes)
        return _scaled(above, axes)
    return eqn.primitive.name in _THROUGH and any(_scaled(x, axes) for x in operands)


def _summed(place: _Place, axes: frozenset[str]) -> bool:
    """Whether a number comes from a sum over the workers."""
    eqn, here = place.made_by()
    if eqn is None:
        return False
    if eqn.primitive.name in _SUMS:
        return bool(axes & set(eqn.params.get("axes", ())))
    operands = (here._replace(variable=x) for x in eqn.invars)
    return eqn.primitive.name in _THROUGH and any(_summed(x, axes) for x in operands)
