"""The loop form of softmax: maximum, sum of exponentials and division of a row in one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Node
from rlx.lir.forms.reduce import rows_over
from rlx.lir.loops import For, Index, Let, Reduce, Ref, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, loop_form
from rlx.lir.views import View
from rlx.types import product


@loop_form("softmax")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, out = s.view(node.operands[0]), s.result(node)
    builder = LoopBuilder("softmax")
    builder.param(x)
    builder.param(out, written=True)
    rows = rows_over(builder, [x, out], x.shape, (node.attrs["axis"] % x.rank,))
    q, kind = Index("q"), x.dtype.wide
    top = Let("top", Reduce("max", "q", rows.extent(), rows.load(0, q)))
    power = (rows.load(0, q) - Ref(top.name, kind)).exp()
    total = Let("total", Reduce("sum", "q", rows.extent(), power))
    store = Store(1, rows.place(1, q), power / Ref("total", kind))
    stores = For("q", rows.extent(), (store,), vector=not rows.vector)
    rows.launch(s, [top, total, stores], product(x.shape) * 8)
    return [out]
