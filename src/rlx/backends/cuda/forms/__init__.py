"""CUDA loop forms that replace portable ones: launches of its matmul and attention kernels."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.lir.schedule import LoopForm, lazy_forms

WHERE = {
    "matmul": "linear.matmul",
    "fused_matmul": "linear.fused_matmul",
    "fused_grouped": "linear.fused_matmul",
    "grouped_matmul": "linear.grouped_matmul",
    "outer_of_runs": "linear.outer_of_runs",
    "attention": "attention.attention",
    "attention_lse": "attention.attention",
    "attention_grad": "attention.attention_grad",
    "cached_attention": "kv_cache.cached_attention",
    "kv_append": "kv_cache.kv_append",
}

FORMS: Mapping[str, LoopForm] = lazy_forms(__name__, WHERE)
