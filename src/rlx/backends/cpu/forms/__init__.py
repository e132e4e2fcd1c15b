"""CPU loop forms that replace portable ones: launches of its matmul and attention kernels, tiled recurrences."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.lir.schedule import LoopForm, lazy_forms

WHERE = {
    "matmul": "linear.matmul",
    "integer_matmul": "linear.matmul",
    "fused_matmul": "linear.fused_matmul",
    "fused_grouped": "linear.fused_matmul",
    "grouped_matmul": "grouped.grouped_matmul",
    "outer_of_runs": "grouped.outer_of_runs",
    "attention": "attention.attention",
    "attention_lse": "attention.attention",
    "attention_grad": "attention.attention_grad",
    "cached_attention": "kv_cache.cached_attention",
    "gated_delta_net": "gated_delta_net.gated_delta_net",
    "gated_delta_net_carry": "gated_delta_net.gated_delta_net",
    "gated_delta_net_with_states": "gated_delta_net.gated_delta_net_with_states",
    "gated_delta_net_backward": "gated_delta_net.gated_delta_net_backward",
    "gated_linear_attention_carry": "delta_tokens.gated_linear_attention",
    "nearest_rows": "search.nearest_rows",
    "selective_scan_backward": "selective_scan_backward.selective_scan_backward",
}

FORMS: Mapping[str, LoopForm] = lazy_forms(__name__, WHERE)
