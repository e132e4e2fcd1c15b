"""Vector search on the CPU: tiles of partial sums that stay in registers, and dot products of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.targets import cpu_target
from rlx.dtypes import I8
from rlx.ir.graph import Node
from rlx.lir.forms.search import Tile, search
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View

QUERIES = 4


def nearest_rows(s: Scheduler, node: Node) -> Sequence[View]:
    target = cpu_target(s.target)
    rows = node.operands[1]
    assert rows is not None
    height = 4 if target.vector_bytes == 64 else 2  # with 32 registers, or with 16
    return search(s, node, Tile(height, QUERIES, target.lanes(4), words=rows.type.dtype is I8))
