"""Loop forms of quantise and dequantise: one expression per element.

Blocks and shared bytes are expressed as views: k is split into [k / block, block], with scales broadcast over the
block axis, and columns that share a byte are separate strided views. So all loops are plain broadcasts.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import F16, F32, I32, DType
from rlx.formats.quant_blocks import Position
from rlx.ir.graph import Node
from rlx.lir.forms.elementwise import scalar_form
from rlx.lir.forms.quant_blocks import Block, RowBlocks, decode
from rlx.lir.forms.small_floats import FLOATS, small_bits, small_float
from rlx.lir.loops import Expr, Place, Stmt
from rlx.lir.schedule import Elements, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.quant_schemes import QuantScheme
from rlx.types import Size


# -- packed blocks ----------------------------------------------------------------------------------------------------
def packed_reads(rows: View, shape: tuple[Size, ...], strides: tuple[Size, ...]) -> tuple[View, View]:
    """Views of packed rows as integer units and as f16, at the start of each row; `element` indexes into it."""
    units = View(rows.buffer, rows.dtype, shape, (*strides[:-1], 0), rows.offset)
    return units, View(units.buffer, F16, units.shape, units.strides, units.offset)


def element(e: Elements, storage: DType, index: Expr, *terms: Place, halves: int = 1) -> Expr:
    """Decode element `index` of a packed row: read 0 is its integer units, read `halves` the same memory as f16."""
    block = index >> storage.block.bit_length() - 1
    within = index & storage.block - 1
    units = storage.size // storage.unit
    start: Place = (*e.at[0], *(t for place in terms for t in place), (block, units))
    rows = RowBlocks(lambda unit: (*start, (unit, 1)), units=0, halves=halves, size=storage.unit)
    return decode(storage, Block(rows, lets=False), Position.of(within))


def _unpack(s: Scheduler, node: Node) -> Sequence[View]:
    (operand, *_) = node.operands
    assert operand is not None
    x, out = s.view(operand), s.result(node)
    last = len(out.shape) - 1

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return (), [element(e, operand.dtype, e.index(last))]

    map_elements(s, "dequantise", out.shape, packed_reads(x, out.shape, x.strides), [out], body, keep=(last,))
    return [out]


# -- layout -----------------------------------------------------------------------------------------------------------
class _Layout:
    """The views of a node: `wide` are the float values, `narrow` the quantised bytes."""

    def __init__(self, s: Scheduler, node: Node, wide: View, narrow: View) -> None:
        scheme = node.attrs["scheme"]
        self.scheme = None if scheme is None else QuantScheme(scheme)
        self.kind = "int8" if self.scheme is None else self.scheme.kind
        self.parts = 1 if self.scheme is None else self.scheme.elements_per_byte
        self.narrow = self._in_blocks(narrow)
        self.wide = self._columns(self._in_blocks(wide))
        scale, zp = (None if o is None else s.view(o) for o in node.operands[1:])
        axis = node.attrs["axis"]
        self.scales, self.zero_points = (self._columns(self._spread(v, wide.rank, axis)) for v in (scale, zp))

    def _in_blocks(self, view: View) -> View:
        """[..., k, n] as [..., k / block, block, n]."""
        size = 1 if self.scheme is None else self.scheme.block
        if size == 1:
            return view
        *leading, k, n = view.shape
        *strides, row, column = view.strides
        return view.with_((*leading, k // size, size, n), (*strides, row * size, row, column))

    def _spread(self, view: View | None, rank: int, axis: int | None) -> View | None:
        """Scales with axes of size 1 where they broadcast."""
        if view is None or view.rank == 0:
            return view
        if self.scheme is not None and self.scheme.block > 1:
            *leading, n = zip(view.shape, view.strides, strict=True)
            ones = [*leading, (1, 0), n]
        else:
            after = 0 if axis is None else rank - 1 - axis % rank
            ones = [*zip(view.shape, view.strides, strict=True), *[(1, 0)] * after]
        return view.with_(tuple(d for d, _ in ones), tuple(s for _, s in ones))

    def _columns(self, view: View | None) -> list[View]:
        """One view per position within a byte: all first elements, all second elements, ..."""
        if view is None or view.rank == 0 or self.parts == 1:
            return [] if view is None else [view] * self.parts
        *leading, n = view.shape
        *strides, step = view.strides
        steps, shape = (*strides, step * self.parts), (*leading, n // self.parts)
        return [View(view.buffer, view.dtype, shape, steps, view.offset + step * i) for i in range(self.parts)]


# -- dequantise -------------------------------------------------------------------------------------------------------
def _number(stored: Expr, part: int, layout: _Layout) -> Expr:
    """The stored value, before zero point and scale."""
    if layout.parts == 1:
        return small_float(stored.cast(I32), layout.kind) if layout.kind in FLOATS else stored.cast(F32)
    nibble = stored.cast(I32) >> 4 * part & 15
    return small_float(nibble, layout.kind) if layout.kind in FLOATS else ((nibble + 8 & 15) - 8).cast(F32)


@loop_form("dequantise")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    operand = node.operands[0]
    assert operand is not None
    if operand.dtype.is_packed:
        return _unpack(s, node)
    out = s.result(node)
    layout = _Layout(s, node, wide=out, narrow=s.view(operand))

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        values = []
        for part in range(layout.parts):
            value = _number(e.load_wide(0), part, layout).cast(out.dtype)
            scale = e.load_wide(1 + part) if layout.scales else None
            zp = e.load_wide(1 + len(layout.scales) + part) if layout.zero_points else None
            if layout.kind == "nvfp4":  # block scales are fp8, and there is one global scale
                assert scale is not None
                factors: list[Expr | None] = [small_float(scale.cast(I32), "fp8e4m3"), zp]
            else:
                value = value if zp is None else value - zp.cast(value.dtype)
                factors = [scale]
            for factor in factors:
                value = value if factor is None else value * factor.cast(value.dtype)
            values.append(value)
        return (), values

    reads = [layout.narrow, *layout.scales, *layout.zero_points]
    map_elements(s, "dequantise", layout.narrow.shape, reads, layout.wide, body, flops=2 * layout.parts)
    return [out]


# -- quantise ---------------------------------------------------------------------------------------------------------
def _integer_code(x: Expr, scale: Expr, zp: Expr | None, parts: int) -> Expr:
    value = scalar_form["round"](x / scale.cast(x.dtype))
    value = value if zp is None else value + zp.cast(x.dtype)
    return value if parts == 1 else value.min(7).max(-8)


def _float_code(x: Expr, scale: Expr, zp: Expr | None, layout: _Layout) -> Expr:
    """The bits of a small float; a block whose scale is 0 becomes zeros."""
    if layout.kind != "nvfp4":
        return small_bits(x / scale.cast(x.dtype), layout.kind).cast(I32)
    step = small_float(scale.cast(I32), "fp8e4m3").cast(x.dtype)
    step = step if zp is None else step * zp.cast(x.dtype)
    return small_bits(step.eq(0.0).select(0.0, x / step), layout.kind).cast(I32)


@loop_form("quantise")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    out = s.result(node)
    layout = _Layout(s, node, wide=s.view(node.operands[0]), narrow=out)

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        parts = layout.parts
        stored = []
        for part in range(parts):
            x, scale = e.load_wide(part), e.load_wide(parts + part)
            zp = e.load_wide(2 * parts + part) if layout.zero_points else None
            stored.append(
                _float_code(x, scale, zp, layout) if layout.kind in FLOATS else _integer_code(x, scale, zp, parts)
            )
        if parts == 1:
            return (), [stored[0].cast(out.dtype)]
        low, high = (v.cast(I32) & 15 for v in stored)
        return (), [(low | high << 4).cast(out.dtype)]

    reads = [*layout.wide, *layout.scales, *layout.zero_points]
    map_elements(s, "quantise", layout.narrow.shape, reads, [layout.narrow], body, flops=3 * layout.parts)
    return [out]
