"""Loop forms of packed weights."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import F16, I64, DType
from rlx.ir.graph import Node
from rlx.lir.blocks import Block, Place, Position, Term, decode, units_of
from rlx.lir.loops import Expr, Stmt
from rlx.lir.schedule import Elements, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.types import Size


def packed_reads(rows: View, shape: tuple[Size, ...], strides: tuple[Size, ...]) -> tuple[View, View]:
    """Packed rows seen as 16-bit units and as halves, at the start of the row; `element` moves along it."""
    units = View(rows.buffer, rows.dtype, shape, (*strides[:-1], 0), rows.offset)
    return units, View(units.buffer, F16, units.shape, units.strides, units.offset)


def element(e: Elements, storage: DType, index: Expr, *terms: Place, halves: int = 1) -> Expr:
    """The number at `index` of a packed row: read 0 is its units, read `halves` the same memory as halves."""
    block = Term(index) >> storage.block.bit_length() - 1
    within = Term(index) & storage.block - 1
    start: Place = (*e.at[0], *(t for place in terms for t in place), (block.expr(I64), units_of(storage)))
    reader = Block(lambda unit: (*start, (unit, 1)), units=0, halves=halves, lets=False)
    return decode(storage, reader, Position.of(within.expr(I64)))


@loop_form("dequantise")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    (operand,) = node.operands
    assert operand is not None
    x, out = s.view(operand), s.result(node)
    last = len(out.shape) - 1

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return (), [element(e, operand.dtype, e.index(last))]

    map_elements(s, "dequantise", out.shape, packed_reads(x, out.shape, x.strides), [out], body, keep=(last,))
    return [out]
