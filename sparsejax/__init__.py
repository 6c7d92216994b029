"""Sparse gradient exchange for data-parallel training in JAX."""

from sparsejax import exchanges, memories, sparsifiers, thresholds
from sparsejax._accounting import wire_bytes
from sparsejax._base import Report
from sparsejax._characteristics import characteristics
from sparsejax._choice import best_exchange
from sparsejax._gradients import localize, value_and_grad
from sparsejax._hlo import compiled_wire_bytes
from sparsejax._labels import small_leaves
from sparsejax._model_shards import per_shard
from sparsejax._placement import PerShard, PerWorker, init, per_worker, state_specs
from sparsejax._predict import predict
from sparsejax._replicas import check_replicas
from sparsejax._reports import log_row, report, reports
from sparsejax._resize import resize_workers
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
    zen,
)

__all__ = [
    "PerShard",
    "PerWorker",
    "Report",
    "SparsifyState",
    "best_exchange",
    "characteristics",
    "check_replicas",
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
    "log_row",
    "marsit",
    "memories",
    "micro",
    "per_shard",
    "per_worker",
    "predict",
    "random_k",
    "report",
    "reports",
    "resize_workers",
    "sidco",
    "sign_majority",
    "simulate",
    "small_leaves",
    "sparsifiers",
    "sparsify",
    "state_specs",
    "thresholds",
    "topk",
    "value_and_grad",
    "wire_bytes",
    "zen",
]
