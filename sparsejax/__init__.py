"""Sparse gradient exchange for data-parallel training in JAX."""

from sparsejax import exchanges, memories, sparsifiers, thresholds
from sparsejax._accounting import wire_bytes
from sparsejax._base import Report
from sparsejax._characteristics import characteristics
from sparsejax._choice import best_exchange
from sparsejax._gradients import localize, value_and_grad
from sparsejax._hlo import compiled_wire_bytes
from sparsejax._placement import PerWorker, init, per_worker, state_specs
from sparsejax._reports import report, reports
from sparsejax._simulation import simulate
from sparsejax._transform import SparsifyState, sparsify
from sparsejax.recipes import (
    dense,
    ef_sign,
    exdyna,
    marsit,
    micro,
    sign_majority,
    zen,
)

__all__ = [
    "PerWorker",
    "Report",
    "SparsifyState",
    "best_exchange",
    "characteristics",
    "compiled_wire_bytes",
    "dense",
    "ef_sign",
    "exchanges",
    "exdyna",
    "init",
    "localize",
    "marsit",
    "memories",
    "micro",
    "per_worker",
    "report",
    "reports",
    "sign_majority",
    "simulate",
    "sparsifiers",
    "sparsify",
    "state_specs",
    "thresholds",
    "value_and_grad",
    "wire_bytes",
    "zen",
]
