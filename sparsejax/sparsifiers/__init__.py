"""Rules that choose what a worker would like to send."""

from sparsejax.sparsifiers._everything import everything
from sparsejax.sparsifiers._exclusive import exclusive
from sparsejax.sparsifiers._nonzero import nonzero

__all__ = ["everything", "exclusive", "nonzero"]
