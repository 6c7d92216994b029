"""Published methods: wiring of parts, one file each."""

from sparsejax.recipes._dense import dense
from sparsejax.recipes._exdyna import exdyna
from sparsejax.recipes._micro import micro

__all__ = ["dense", "exdyna", "micro"]
