"""CPU loop forms that replace portable ones: launches of its matmul and attention kernels, tiled recurrences."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from rlx.ir.graph import Node
from rlx.lir.schedule import LoopForm, Scheduler
from rlx.lir.views import View

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
    "selective_scan_backward": "selective_scan_backward.selective_scan_backward",
}


def _lazy_form(where: str) -> LoopForm:
    """A form in a module of this package, imported on first use; most programs need few."""
    module, function = where.split(".")

    def form(s: Scheduler, node: Node) -> Sequence[View]:
        loop_form: LoopForm = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        return loop_form(s, node)

    form.__module__, form.__qualname__ = f"{__name__}.{module}", function  # where `rlx ops` says it is
    return form


FORMS: Mapping[str, LoopForm] = {op: _lazy_form(where) for op, where in WHERE.items()}
