"""Softmax: its gradient needs only its result."""

from __future__ import annotations

from rlx.ir.graph import Value
from rlx.transforms.rule_tables import Cotangents, NodeCtx, batching, vjp
from rlx.transforms.rules.reduce import along_one_axis

batching("softmax")(along_one_axis)


@vjp("softmax")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    y = at.result
    share = ct * y
    return [share - y * at.graph.one("sum", share, axis=at.attrs["axis"], keepdims=True)]
