"""Loop forms of ops that passes make: elementwise regions and packed weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.dtypes import I16, I32, I64
from rlx.ir.graph import Node
from rlx.lir.forms import linear as linear
from rlx.lir.forms import norm as norm
from rlx.lir.forms.blocks import signed_word, unit_of
from rlx.lir.forms.elementwise import body_lets
from rlx.lir.loops import Const, Expr, For, Index, Load, Place, Ref, Stmt, Store
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, decode_unit, loop_form, map_elements
from rlx.lir.views import View
from rlx.ops.fused import FOUR, Bits, apart_of, first_word, word_runs
from rlx.types import product


@loop_form("region")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    body = node.attrs["body"]
    reads = [s.view(o) for o in node.operands]
    outs = [s.result(node, i) for i in range(len(node.types))]
    ops = [n.op for n in body.nodes if n.op not in ("input", "const")]

    def emit(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return body_lets(body, [e.load(i) for i in range(len(reads))], s.target)

    map_elements(s, "_".join(ops)[:40], outs[0].shape, reads, outs, emit, flops=len(ops))
    return outs


def _moved(word: Expr, bits: Bits) -> Expr:
    """Bits of a word where a panel has them; no mask has bits that a shift of signed words would fill."""
    there = word >> bits.right if bits.right >= 0 else word << -bits.right
    return there & signed_word(bits.mask)


@loop_form("interleave_blocks")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is a block of all columns of a panel; zeros beyond the last column."""
    out = s.result(node)
    matrices = [s.view(o) for o in node.operands]
    storage, lanes, width = node.operands[0].dtype, node.attrs["lanes"], node.attrs["width"]  # type: ignore[union-attr]
    part, unit_type, units = width // len(matrices), unit_of(storage), storage.size // storage.unit
    builder = LoopBuilder(node.op)
    for view in matrices:
        builder.param(View(view.buffer, unit_type, view.shape, view.strides, view.offset))
    whole = builder.param(View(out.buffer, I32, out.shape, out.strides, out.offset // 2), written=True)
    half = builder.param(
        View(out.buffer, unit_type, out.shape, out.strides, out.offset * 2 // storage.unit), written=True
    )
    *groups, n, blocks = node.operands[0].type.array_shape  # type: ignore[union-attr]
    lets = decode_unit(builder, [*groups, out.shape[-4], blocks], ["g", "p", "k"][-2 - len(groups) :])
    columns, count = builder.arg("columns", n), builder.arg("blocks", blocks)
    row = builder.arg("row", blocks * units)
    apart, first, c = apart_of(storage), first_word(storage) // storage.unit, Index("c")
    vectors, start = width // lanes, len(apart) * lanes * storage.unit // 4
    many_units, bits = 4 // storage.unit, 8 * storage.unit  # of a word, and of a unit
    body: list[Stmt] = []
    for source in range(len(matrices)):  # whose vectors follow each other in a panel
        v, many = Index("v"), vectors // len(matrices)
        panel: Expr = Ref("p", I64)
        at = panel * part + v * lanes + c
        inside, row_number = at < columns, at
        if groups:
            group = Ref("g", I64)
            row_number, panel = group * columns + at, group * builder.arg("panels", out.shape[-4]) + panel
        number = (panel * count + Ref("k", I64)) * vectors + source * many + v
        column: Place = ((row_number, row), (Ref("k", I64), units))

        def unit(*more: tuple[Expr, int], source: int = source, column: Place = column, inside: Expr = inside) -> Expr:
            return inside.choose(Load(source, (*column, *more), unit_type), 0)

        inner: list[Stmt] = []
        for i, offset in enumerate(apart):
            place: Place = ((number, units * lanes), (Const(i, I64), lanes), (c, 1))
            inner.append(For("c", lanes, (Store(half, place, unit((Const(offset, I64), 1))),), vector=True))
        done = 0
        for run in word_runs(storage, node.attrs["whole"]):
            w = Index("w")
            value: Expr = Const(0, I32)
            for moved in run.bits:
                word: Expr = Const(0, I32)
                for i in range(many_units):
                    piece = unit((w, many_units), (Const(first + many_units * moved.word + i, I64), 1)).cast(I32)
                    word = word | (piece & (1 << bits) - 1) << bits * i
                value = value | _moved(word, moved)
            place = ((number, storage.size * lanes // 4), (Const(start + done * lanes, I64), 1), (w, lanes), (c, 1))
            store = Store(whole, place, value)
            inner.append(For("w", run.count, (For("c", lanes, (store,), vector=True),)))
            done += run.count
        body.append(For("v", many, tuple(inner)))
    total = product((*groups, out.shape[-4], blocks))
    builder.launch(s, For("u", builder.arg("units", total), (*lets, *body)), total, flops=product(out.shape))
    return [out]


@loop_form("pack_panels", "pack_bytes")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is one row of one panel: an equal part of each matrix [k, n], zeros beyond the last column.

    A row of words has four rows of bytes. Narrow floats are moved as bits.
    """
    out = s.result(node)
    matrices = [s.view(o) for o in node.operands]
    panels = out
    if out.dtype.is_float and out.dtype.size == I16.size:
        panels, *matrices = (replace(view, dtype=I16) for view in (out, *matrices))
    builder = LoopBuilder(node.op)
    width = node.attrs["width"]
    part = width // len(matrices)
    for view in matrices:
        builder.param(view)
    target = builder.param(panels, written=True)
    *groups, _, n = matrices[0].shape
    lets = decode_unit(builder, out.shape[:-1], ["g", "p", "k"][-2 - len(groups) :])
    columns, depth = builder.arg("columns", n), builder.arg("depth", out.shape[-2])
    j = Index("j")
    body: list[Stmt] = []
    for i, view in enumerate(matrices):
        row = builder.stride(i, "k", view.strides[-2])
        column = builder.stride(i, "n", view.strides[-1], unit=True)
        group: Place = ((Ref("g", I64), builder.stride(i, "g", view.strides[0])),) if groups else ()
        at = Ref("p", I64) * part + j
        inside = at < columns
        if node.op == "pack_bytes":
            value: Expr = Const(0, I32)
            for byte in range(FOUR):
                number = inside.choose(Load(i, ((Ref("k", I64) * FOUR + byte, row), (at, column)), view.dtype), 0)
                value = value | (number.cast(I32) & 255) << 8 * byte
        else:
            value = inside.choose(Load(i, (*group, (Ref("k", I64), row), (at, column)), view.dtype), 0)
        which: Expr = Ref("p", I64)
        if groups:
            which = Ref("g", I64) * builder.arg("panels", out.shape[-3]) + which
        place = ((which * depth, width), (Ref("k", I64), width), (j, 1), (Const(part * i, I64), 1))
        body.append(For("j", part, (Store(target, place, value),), vector=True))
    units = product(out.shape[:-1])
    builder.launch(s, For("u", builder.arg("units", units), (*lets, *body)), units, flops=product(out.shape))
    return [out]
