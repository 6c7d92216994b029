"""Rules that choose what a worker would like to send."""

from sparsejax.sparsifiers._everything import everything
from sparsejax.sparsifiers._exclusive import exclusive

__all__ = ["everything", "exclusive"]
