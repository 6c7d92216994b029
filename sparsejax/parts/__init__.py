"""The three parts of a method, and the records that pass between them.

A method is a `Sparsifier`, an `Exchange` and a `Memory`, composed by
`sparsejax.sparsify`. Each part is a record of pure functions; most fields have a
default, so that a new part states only the functions that differ.

Shapes: `n` coordinates, `k` slots of a message per worker (static), `w` workers, `m`
delivered coordinates. *Per worker* values differ between workers, *replicated* values
are equal on all of them.
"""

from sparsejax.parts._method import (
    Exchange,
    Memory,
    Sparsifier,
    no_details,
    no_state,
    unchanged,
)
from sparsejax.parts._records import Choice, Delivery, Report, Step, Window
from sparsejax.parts._rules import Partition, ThresholdRule

__all__ = [
    "Choice",
    "Delivery",
    "Exchange",
    "Memory",
    "Partition",
    "Report",
    "Sparsifier",
    "Step",
    "ThresholdRule",
    "Window",
    "no_details",
    "no_state",
    "unchanged",
]
