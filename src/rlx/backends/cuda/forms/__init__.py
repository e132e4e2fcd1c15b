"""CUDA loop forms that replace portable ones: launches of its matmul and attention kernels."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from rlx.ir.graph import Node
from rlx.lir.schedule import LoopForm, Scheduler
from rlx.lir.views import View

WHERE = {
    "matmul": "linear.matmul",
    "fused_matmul": "linear.fused_matmul",
    "fused_grouped": "linear.fused_matmul",
    "grouped_matmul": "linear.grouped_matmul",
    "outer_of_runs": "linear.outer_of_runs",
    "attention": "attention.attention",
    "attention_lse": "attention.attention",
    "attention_grad": "attention.attention_grad",
    "cached_attention": "attention.cached_attention",
    "kv_append": "kv_cache.kv_append",
}


def _lazy_form(where: str) -> LoopForm:
    """A form in a module of this package, imported on first use; most programs need few."""
    module, function = where.split(".")

    def form(s: Scheduler, node: Node) -> Sequence[View]:
        loop_form: LoopForm = getattr(importlib.import_module(f"{__name__}.{module}"), function)
        return loop_form(s, node)

    return form


FORMS: Mapping[str, LoopForm] = {op: _lazy_form(where) for op, where in WHERE.items()}
