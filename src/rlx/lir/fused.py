"""Loop forms of ops that passes make: elementwise regions and packed weights."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, I32, I64
from rlx.ir.graph import Node
from rlx.lir import linear as linear
from rlx.lir import norm as norm
from rlx.lir.blocks import Place, Term, first_word, signed_word, unit_of
from rlx.lir.elementwise import body_lets
from rlx.lir.loops import Apply, Choose, Const, Expr, For, Index, Load, Ref, Stmt, Store
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, cast, decode_unit, loop_form, map_elements
from rlx.lir.views import View
from rlx.ops.fused import FOUR, Bits, apart_of, word_runs
from rlx.types import product


@loop_form("region")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    body = node.attrs["body"]
    reads = [s.view(o) for o in node.operands]
    outs = [s.result(node, i) for i in range(len(node.types))]
    ops = [n.op for n in body.nodes if n.op not in ("input", "const")]

    def emit(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return body_lets(body, [e.load(i) for i in range(len(reads))])

    map_elements(s, "_".join(ops)[:40], outs[0].shape, reads, outs, emit, flops=len(ops))
    return outs


def _sum(*terms: tuple[Expr, int]) -> Expr:
    """An index from its parts, each of which counts so many."""
    total: Expr | None = None
    for index, size in terms:
        part = index if size == 1 else Apply("mul", (index, Const(size, I64)), I64)
        total = part if total is None else Apply("add", (total, part), I64)
    assert total is not None
    return total


def _moved(word: Term, bits: Bits) -> Term:
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
        at = _sum((Ref("p", I64), part), (v, lanes), (c, 1))
        inside = Apply("lt", (at, columns), BOOL)
        row_number = at
        panel: Expr = Ref("p", I64)
        if groups:
            rows_before, panels_before = (
                Apply("mul", (Ref("g", I64), each), I64) for each in (columns, builder.arg("panels", out.shape[-4]))
            )
            row_number, panel = Apply("add", (rows_before, at), I64), Apply("add", (panels_before, panel), I64)
        block = Apply("add", (Apply("mul", (panel, count), I64), Ref("k", I64)), I64)
        number = _sum((block, vectors), (Const(source * many, I64), 1), (v, 1))
        column: Place = ((row_number, row), (Ref("k", I64), units))

        def unit(*more: tuple[Expr, int], source: int = source, column: Place = column, inside: Expr = inside) -> Expr:
            return Choose(inside, Load(source, (*column, *more), unit_type), Const(0, unit_type))

        inner: list[Stmt] = []
        for i, offset in enumerate(apart):
            place: Place = ((number, units * lanes), (Const(i, I64), lanes), (c, 1))
            inner.append(For("c", lanes, (Store(half, place, unit((Const(offset, I64), 1))),), vector=True))
        done = 0
        for run in word_runs(storage, node.attrs["whole"]):
            w, value = Index("w"), Term(0)
            for moved in run.bits:
                word = Term(0)
                for i in range(many_units):
                    piece = cast(unit((w, many_units), (Const(first + many_units * moved.word + i, I64), 1)), I32)
                    word = word | (Term(piece) & (1 << bits) - 1) << bits * i
                value = value | _moved(word, moved)
            place = ((number, storage.size * lanes // 4), (Const(start + done * lanes, I64), 1), (w, lanes), (c, 1))
            store = Store(whole, place, value.expr(I32))
            inner.append(For("w", run.count, (For("c", lanes, (store,), vector=True),)))
            done += run.count
        body.append(For("v", many, tuple(inner)))
    total = product((*groups, out.shape[-4], blocks))
    builder.launch(s, For("u", builder.arg("units", total), (*lets, *body)), total, flops=product(out.shape))
    return [out]


@loop_form("pack_panels", "pack_bytes")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is one row of one panel: an equal part of each matrix [k, n], zeros beyond the last column.

    A row of words has four rows of bytes.
    """
    matrices, out = [s.view(o) for o in node.operands], s.result(node)
    builder = LoopBuilder(node.op)
    width = node.attrs["width"]
    part = width // len(matrices)
    for view in matrices:
        builder.param(view)
    target = builder.param(out, written=True)
    *groups, _, n = matrices[0].shape
    lets = decode_unit(builder, out.shape[:-1], ["g", "p", "k"][-2 - len(groups) :])
    columns, depth = builder.arg("columns", n), builder.arg("depth", out.shape[-2])
    j = Index("j")
    body: list[Stmt] = []
    for i, view in enumerate(matrices):
        row = builder.stride(i, "k", view.strides[-2])
        column = builder.stride(i, "n", view.strides[-1], unit=True)
        group: Place = ((Ref("g", I64), builder.stride(i, "g", view.strides[0])),) if groups else ()
        at: Expr = Apply("add", (Apply("mul", (Ref("p", I64), Const(part, I64)), I64), j), I64)
        inside = Apply("lt", (at, columns), BOOL)
        zero = Const(view.dtype.numpy.type(0).item(), view.dtype)
        if node.op == "pack_bytes":
            value: Expr = Const(0, I32)
            for byte in range(FOUR):
                k = Apply("add", (Apply("mul", (Ref("k", I64), Const(FOUR, I64)), I64), Const(byte, I64)), I64)
                number = Choose(inside, Load(i, ((k, row), (at, column)), view.dtype), zero)
                low = Apply("and", (cast(number, I32), Const(255, I32)), I32)
                value = Apply("or", (value, Apply("shl", (low, Const(8 * byte, I32)), I32)), I32)
        else:
            value = Choose(inside, Load(i, (*group, (Ref("k", I64), row), (at, column)), view.dtype), zero)
        which: Expr = Ref("p", I64)
        if groups:
            before = Apply("mul", (Ref("g", I64), builder.arg("panels", out.shape[-3])), I64)
            which = Apply("add", (before, which), I64)
        panel: Expr = Apply("mul", (which, depth), I64)
        place = ((panel, width), (Ref("k", I64), width), (j, 1), (Const(part * i, I64), 1))
        body.append(For("j", part, (Store(target, place, value),), vector=True))
    units = product(out.shape[:-1])
    builder.launch(s, For("u", builder.arg("units", units), (*lets, *body)), units, flops=product(out.shape))
    return [out]
