"""Vector search on the CPU: tiles of partial sums that fill its registers, and dot products of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.targets import cpu_target
from rlx.dtypes import I8
from rlx.ir.graph import Node
from rlx.lir.forms.search import Tile, search
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View


def nearest_rows(s: Scheduler, node: Node) -> Sequence[View]:
    target = cpu_target(s.target)
    rows = node.operands[1]
    assert rows is not None
    many = target.vector_bytes == 64  # 32 registers
    integers = rows.type.dtype is I8
    height = 6 if many else 2 if integers else 3
    return search(s, node, Tile(height, 4, 6, target.lanes(4), words=integers))
