"""Published methods: wiring of parts, one file each."""

from sparsejax.recipes._dense import dense
from sparsejax.recipes._ef_sign import ef_sign
from sparsejax.recipes._exdyna import exdyna
from sparsejax.recipes._marsit import marsit
from sparsejax.recipes._micro import micro
from sparsejax.recipes._sign_majority import sign_majority
from sparsejax.recipes._zen import zen

__all__ = ["dense", "ef_sign", "exdyna", "marsit", "micro", "sign_majority", "zen"]
