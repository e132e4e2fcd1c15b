"""Portable forms: ops for which a backend may have kernels of its own (matmuls, attention), as plain `loops` kernels.

A target that names them in `Target.forms` sees no other kind of kernel: `return FORMS`, or a part of it beside forms of
its own. They know no tiles, panels or vector widths. Units are many and independent: one per row of the result.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.lir.forms.portable_attention import attention, attention_grad, cached_attention
from rlx.lir.forms.portable_matmul import fused_matmul, grouped_matmul, matmul, outer_of_runs
from rlx.lir.schedule import LoopForm

FORMS: Mapping[str, LoopForm] = {
    "matmul": matmul,
    "integer_matmul": matmul,
    "fused_matmul": fused_matmul,
    "fused_grouped": fused_matmul,
    "grouped_matmul": grouped_matmul,
    "outer_of_runs": outer_of_runs,
    "attention": attention,
    "attention_lse": attention,
    "attention_grad": attention_grad,
    "cached_attention": cached_attention,
}
