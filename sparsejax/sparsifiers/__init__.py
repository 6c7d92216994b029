"""Sparsifiers: they choose the coordinates that a worker would like to send."""

from sparsejax.sparsifiers._chunked_topk import chunked_topk
from sparsejax.sparsifiers._everything import everything
from sparsejax.sparsifiers._exclusive import exclusive
from sparsejax.sparsifiers._fit._fitted import fitted
from sparsejax.sparsifiers._hard_threshold import hard_threshold
from sparsejax.sparsifiers._layers._layerwise import layerwise
from sparsejax.sparsifiers._nonzero import nonzero
from sparsejax.sparsifiers._random_k import random_k
from sparsejax.sparsifiers._sampled import sampled
from sparsejax.sparsifiers._topk import topk

__all__ = [
    "chunked_topk",
    "everything",
    "exclusive",
    "fitted",
    "hard_threshold",
    "layerwise",
    "nonzero",
    "random_k",
    "sampled",
    "topk",
]
