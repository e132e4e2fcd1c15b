"""Matmuls of floats as launches of the matmul kernel; integers and quantised weights take the portable loops."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Node
from rlx.lir.forms.matmul_launch import grouped_matmul as grouped_matmul
from rlx.lir.forms.matmul_launch import launch_matmul
from rlx.lir.forms.matmul_launch import outer_of_runs as outer_of_runs
from rlx.lir.schedule import Scheduler, form_of
from rlx.lir.views import View


def matmul(s: Scheduler, node: Node) -> Sequence[View]:
    a, b = (s.view(o) for o in node.operands)
    if not node.types[0].dtype.is_float:
        return form_of(node)(s, node)
    out = s.result(node)
    launch_matmul(s, a, [b], [], [out], None, weights=1, layout=None, columns=out.shape[-1])
    return [out]


def fused_matmul(s: Scheduler, node: Node) -> Sequence[View]:
    """Weights are operands as they are: kernels read several with the same strides, so nothing is packed."""
    attrs = node.attrs
    weight = node.operands[1]
    assert weight is not None
    if not weight.dtype.is_float:
        return form_of(node)(s, node)
    a, *rest = (s.view(o) for o in node.operands)
    weights = attrs["weights"]
    outs = [s.result(node, i) for i in range(len(node.types))]
    index = rest.pop(weights) if node.op == "fused_grouped" else None
    launch_matmul(
        s, a, rest[:weights], rest[weights:], outs, attrs["body"], weights=weights, layout=None,
        columns=attrs["columns"], index=index,
    )  # fmt: skip
    return outs
