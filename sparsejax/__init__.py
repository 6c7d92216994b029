"""Sparse gradient exchange for data-parallel training in JAX."""

from sparsejax import (
    exchanges,
    memories,
    partitions,
    parts,
    sparsifiers,
    thresholds,
    vectors,
)
from sparsejax._labels import small_leaves
from sparsejax._report import log_row, report, reports
from sparsejax._transform import SparsifyState, sparsify
from sparsejax.parts import Report
from sparsejax.placement._clipping import clip_by_global_norm
from sparsejax.placement._delayed import delayed
from sparsejax.placement._gradients import (
    localize,
    rows,
    value_and_grad,
    worker_key,
)
from sparsejax.placement._init import init, per_worker
from sparsejax.placement._markers import PerShard, PerWorker, state_specs
from sparsejax.placement._replicas import check_replicas
from sparsejax.placement._resize import resize_workers
from sparsejax.placement._rounds import Rounds, RoundsState, rounds
from sparsejax.placement._shards import per_shard
from sparsejax.placement._simulation import simulate
from sparsejax.placement._specs import with_param_specs
from sparsejax.planning._best_exchange import best_exchange
from sparsejax.planning._characteristics import characteristics
from sparsejax.planning._compiled import compiled_wire_bytes
from sparsejax.planning._predict import predict
from sparsejax.planning._wire_bytes import wire_bytes
from sparsejax.recipes import (
    chunked_topk,
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
    sparseloco,
    topk,
    zen,
)

__all__ = [
    "PerShard",
    "PerWorker",
    "Report",
    "Rounds",
    "RoundsState",
    "SparsifyState",
    "best_exchange",
    "characteristics",
    "check_replicas",
    "chunked_topk",
    "clip_by_global_norm",
    "cltk",
    "compiled_wire_bytes",
    "deft",
    "delayed",
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
    "partitions",
    "parts",
    "per_shard",
    "per_worker",
    "predict",
    "random_k",
    "report",
    "reports",
    "resize_workers",
    "rounds",
    "rows",
    "sidco",
    "sign_majority",
    "simulate",
    "small_leaves",
    "sparseloco",
    "sparsifiers",
    "sparsify",
    "state_specs",
    "thresholds",
    "topk",
    "value_and_grad",
    "vectors",
    "wire_bytes",
    "with_param_specs",
    "worker_key",
    "zen",
]
