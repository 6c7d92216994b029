"""The details of a report that a sparsifier declares in `reads`."""

from __future__ import annotations

import collections
import functools
from typing import Any

from sparsejax.parts._records import Report


def declared(report: Report, reads: frozenset[str], exchange: str) -> Report:
    """`report`, with only the details that `reads` contains.

    Otherwise a rule that reads an undeclared detail would work with this exchange, and
    fail with another.

    Args:
      report: the report for `Sparsifier.adapt`.
      reads: `Sparsifier.reads`.
      exchange: the name of the exchange.

    Raises:
      ValueError: if the exchange does not report a detail that its `tells` contains.
    """
    for name in sorted(reads):
        if not hasattr(report.details, name):
            raise ValueError(
                f"exchange: `tells` of `{exchange}` contains {name!r}, but "
                f"`report.details` has no such field. Add the field to the NamedTuple "
                f"that `details` and `apply` return."
            )
    kind = _details(tuple(sorted(reads)))
    details = kind(*(getattr(report.details, name) for name in kind._fields))
    return report._replace(details=details)


# One class for each set of fields, so that both branches of a cond have one structure.
@functools.cache
def _details(fields: tuple[str, ...]) -> Any:
    def undeclared(self, name):
        raise AttributeError(
            f"adapt: reads `report.details.{name}`, which `Sparsifier.reads` does not "
            f"contain. Add it: `reads=frozenset({{{name!r}}})`."
        )

    record: Any = collections.namedtuple
    base = record("Declared", fields)
    return type("Declared", (base,), {"__slots__": (), "__getattr__": undeclared})
