"""Checks of the names by which a sparsifier and an exchange describe themselves."""

from __future__ import annotations

import reprlib
from collections.abc import Set
from typing import Any

from sparsejax._checks import check_choice
from sparsejax.parts._method import Exchange, Sparsifier


def check_names(sparsifier: Sparsifier, exchange: Exchange, supports: Set[str]) -> None:
    """Checks `support`, `reads`, `accepts` and `tells`.

    A string instead of a set would match by its substrings.

    Args:
      sparsifier: the sparsifier.
      exchange: the exchange.
      supports: every kind of `Sparsifier.support`.

    Raises:
      TypeError: if a field that contains names is not a set of strings.
      ValueError: for a kind of support that does not exist.
    """
    known = tuple(sorted(supports))
    check_choice("Sparsifier.support", sparsifier.support, known)
    _check_set("Sparsifier.reads", sparsifier.reads, "histogram")
    _check_set("Exchange.tells", exchange.tells, "histogram")
    _check_set("Exchange.accepts", exchange.accepts, "overlapping")
    for name in sorted(exchange.accepts):
        check_choice("Exchange.accepts", name, known)


def _check_set(field: str, value: Any, example: str) -> None:
    """Raises TypeError unless `value` is a set of strings."""
    if isinstance(value, Set) and all(isinstance(name, str) for name in value):
        return
    raise TypeError(
        f"{field}: got {reprlib.repr(value)}, expected a frozenset of names, such as "
        f"`frozenset({{{example!r}}})`."
    )
