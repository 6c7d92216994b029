"""Sparse gradient exchange for data-parallel training in JAX."""

from sparsejax import exchanges, memories, sparsifiers, thresholds
from sparsejax._accounting import wire_bytes
from sparsejax._base import Report
from sparsejax._gradients import localize, value_and_grad
from sparsejax._hlo import compiled_wire_bytes
from sparsejax._placement import PerWorker, init, per_worker, state_specs
from sparsejax._reports import report, reports
from sparsejax._simulation import simulate
from sparsejax._transform import SparsifyState, sparsify
from sparsejax.recipes import (
    cltk,
    deft,
    dense,
    dgc,
    ef_sign,
    exdyna,
    hard_threshold,
    marsit,
    micro,
    random_k,
    sidco,
    sign_majority,
    topk,
)

__all__ = [
    "PerWorker",
    "Report",
    "SparsifyState",
    "cltk",
    "compiled_wire_bytes",
    "deft",
    "dense",
    "dgc",
    "ef_sign",
    "exchanges",
    "exdyna",
    "hard_threshold",
    "init",
    "localize",
    "marsit",
    "memories",
    "micro",
    "per_worker",
    "random_k",
    "report",
    "reports",
    "sidco",
    "sign_majority",
    "simulate",
    "sparsifiers",
    "sparsify",
    "state_specs",
    "thresholds",
    "topk",
    "value_and_grad",
    "wire_bytes",
]
