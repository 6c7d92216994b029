"""Published methods: wiring of parts, one file each.

A recipe returns an optax transformation from local gradients (per worker) to averaged
updates (replicated). Errors name the argument, its value and the rule. Recipes raise
TypeError for a wrong type or a traced value, and ValueError for a value out of range
or for parts that do not fit together.
"""

from sparsejax.recipes._chunked_topk import chunked_topk
from sparsejax.recipes._cltk import cltk
from sparsejax.recipes._deft import deft
from sparsejax.recipes._dense import dense
from sparsejax.recipes._dgc import dgc
from sparsejax.recipes._ef_sign import ef_sign
from sparsejax.recipes._exdyna import exdyna
from sparsejax.recipes._hard_threshold import hard_threshold
from sparsejax.recipes._marsit import marsit
from sparsejax.recipes._micro import micro
from sparsejax.recipes._random_k import random_k
from sparsejax.recipes._sidco import sidco
from sparsejax.recipes._sign_majority import sign_majority
from sparsejax.recipes._sparseloco import sparseloco
from sparsejax.recipes._topk import topk
from sparsejax.recipes._zen import zen

__all__ = [
    "chunked_topk",
    "cltk",
    "deft",
    "dense",
    "dgc",
    "ef_sign",
    "exdyna",
    "hard_threshold",
    "marsit",
    "micro",
    "random_k",
    "sidco",
    "sign_majority",
    "sparseloco",
    "topk",
    "zen",
]
