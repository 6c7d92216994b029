"""Vectors that a worker carries from one step to the next."""

from sparsejax.memories._decayed import decayed
from sparsejax.memories._error_feedback import error_feedback
from sparsejax.memories._momentum_correction import momentum_correction
from sparsejax.memories._none import none

__all__ = ["decayed", "error_feedback", "momentum_correction", "none"]
