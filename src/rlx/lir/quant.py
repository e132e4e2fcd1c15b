"""Loop forms of packed weights."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import F16, I64, DType
from rlx.ir.graph import Node
from rlx.lir.blocks import Block, Position, Term, decode, units_of
from rlx.lir.loops import Expr, Stmt
from rlx.lir.schedule import Elements, Scheduler, loop_form, map_elements
from rlx.lir.views import View


def packed_reads(view: View, shape: tuple[object, ...], strides: tuple[object, ...]) -> list[View]:
    """The memory of packed rows, read as 16-bit units and as halves; the last axis is moved along by `element`."""
    units = View(view.buffer, view.dtype, shape, (*strides[:-1], 0), view.offset)  # type: ignore[arg-type]
    return [units, View(units.buffer, F16, units.shape, units.strides, units.offset)]


def element(e: Elements, storage: DType, index: Expr, *terms: tuple[Expr, object], halves: int = 1) -> Expr:
    """The number at `index` of a packed row: read 0 is its units, read `halves` the same memory as halves."""
    shift = storage.block.bit_length() - 1
    start = Term(index) >> shift

    def place(unit: Expr) -> tuple[tuple[Expr, object], ...]:
        return (*e.at[0], *terms, (start.expr(I64), units_of(storage)), (unit, 1))

    block = Block(place, units=0, halves=halves, lets=False)  # type: ignore[arg-type]
    return decode(storage, block, Position.of((Term(index) & storage.block - 1).expr(I64)))


@loop_form("dequantise")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, out = s.view(node.operands[0]), s.result(node)
    assert node.operands[0] is not None
    storage = node.operands[0].dtype
    last = len(out.shape) - 1

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return (), [element(e, storage, e.index(last))]

    map_elements(s, "dequantise", out.shape, packed_reads(x, out.shape, x.strides), [out], body, keep=(last,))
    return [out]
