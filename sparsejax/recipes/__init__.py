"""Published methods: wiring of parts, one file each."""

from sparsejax.recipes._cltk import cltk
from sparsejax.recipes._dense import dense
from sparsejax.recipes._exdyna import exdyna
from sparsejax.recipes._micro import micro
from sparsejax.recipes._topk import topk

__all__ = ["cltk", "dense", "exdyna", "micro", "topk"]
