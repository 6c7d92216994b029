"""Published methods: wiring of parts, one file each."""

from sparsejax.recipes._dense import dense
from sparsejax.recipes._exdyna import exdyna
from sparsejax.recipes._micro import micro
from sparsejax.recipes._zen import zen

__all__ = ["dense", "exdyna", "micro", "zen"]
