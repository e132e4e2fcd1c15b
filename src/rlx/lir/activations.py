"""Loop forms of 8-bit activations: a unit is one row, so that what made the row can round it as well."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, F32, F64, I8, I32, I64, DType
from rlx.ir.graph import Node
from rlx.lir.loops import Apply, Arg, Const, Expr, For, Index, Let, Load, Reduce, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, cast, loop_form, widened
from rlx.lir.views import View
from rlx.ops.activations import LARGEST, LEAST, SHORT, activations_for
from rlx.types import product

_BLOCK = Ref("block", I64)  # of all rows


def _over_rows(s: Scheduler, builder: LoopBuilder, block: int, body: Sequence[Stmt], flops: int) -> None:
    """Launch `body`, which is about one block, over the blocks of each row."""
    x, *_ = builder.views
    units, count = product(x.shape[:-1]), x.shape[-1] // block
    number = Apply("add", (Apply("mul", (Index("u"), builder.arg("count", count)), I64), Index("b")), I64)
    loop = For("b", builder.arg("count", count), (Let("block", number), *body))
    root = For("u", builder.arg("units", units), (loop,))
    builder.launch(s, root, units, flops=product(x.shape) * flops, shares={0: x.shape[-1]})


def _f32(op: str, *args: Expr) -> Expr:
    return Apply(op, args, F32)


def _same(op: str, *args: Expr) -> Expr:
    return Apply(op, args, args[0].dtype)


def _code(stored: DType, *at: tuple[Expr, int | Arg]) -> Expr:
    """A number of the block times the inverse of its scale, rounded: it is small, or NaN, so two sums do that."""
    x = widened(Load(0, at, stored))
    far = Const(1.5 * 2.0 ** (52 if x.dtype is F64 else 23), x.dtype)
    return _same("sub", _same("add", _same("mul", x, Ref("inverse", x.dtype)), far), far)


def _scales(stored: DType, block: int) -> list[Stmt]:
    """`largest`, `scale` and `inverse` of the block."""
    x = widened(Load(0, ((_BLOCK, block), (Index("i"), 1)), stored))
    kind = x.dtype
    largest, zero, top = Ref("largest", kind), Const(0.0, kind), Const(float(LARGEST), kind)
    tiny = Apply("lt", (largest, Const(LEAST, kind)), BOOL)  # not so if there is a NaN
    return [
        Let("largest", Reduce("max", "i", block, _same("abs", x))),
        Let("scale", Apply("select", (tiny, zero, _same("div", largest, top)), kind)),
        Let("inverse", Apply("select", (tiny, zero, _same("div", top, largest)), kind)),
    ]


@loop_form("round_blocks")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, out = s.contiguous(s.view(node.operands[0])), s.result(node)
    block = node.attrs["block"]
    builder = LoopBuilder(node.op)
    builder.param(x)
    builder.param(out, written=True)
    at = ((_BLOCK, block), (Index("i"), 1))
    code = _code(x.dtype, *at)
    stores = For("i", block, (Store(1, at, _same("mul", code, Ref("scale", code.dtype))),), vector=True)
    _over_rows(s, builder, block, [*_scales(x.dtype, block), stores], 4)
    return [out]


@loop_form("activation_blocks")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, out = s.contiguous(s.view(node.operands[0])), s.result(node)
    form = activations_for(node.attrs["block"])
    builder = LoopBuilder(node.op)
    builder.param(x)
    for dtype in (I32, F32, I8):
        builder.param(View(out.buffer, dtype, out.shape, out.strides, out.offset * (4 // dtype.size)), written=True)
    whole, numbers, signed = 1, 2, 3
    u, i, run = _BLOCK, Index("i"), Index("g")

    def word(index: int, *more: tuple[Expr, int | Arg]) -> tuple[tuple[Expr, int | Arg], ...]:
        return ((u, form.words), (Const(index, I64), 1), *more)

    def byte(index: int, *more: tuple[Expr, int | Arg]) -> tuple[tuple[Expr, int | Arg], ...]:
        return ((u, 4 * form.words), (Const(4 * index, I64), 1), *more)

    def total(length: int, *more: tuple[Expr, int | Arg]) -> Expr:
        """The sum of codes that are written."""
        code = Load(signed, byte(form.codes, *more, (i, 1)), I8)
        return Reduce("sum", "i", length, cast(code, I32))

    codes = Store(signed, byte(form.codes, (i, 1)), _code(F32, (u, form.block), (i, 1)))
    body: list[Stmt] = [*_scales(F32, form.block), Store(numbers, word(form.scale), Ref("scale", F32))]
    body.append(For("i", form.block, (codes,), vector=True))
    sum_ = Ref("sum", I32)
    if form is SHORT:
        body.append(Let("sum", total(form.block)))
        body.append(Store(whole, word(form.sums), Apply("neg", (sum_,), I32)))
        body.append(Store(numbers, word(form.total), _f32("mul", cast(sum_, F32), Ref("scale", F32))))
    else:
        pair = [Apply("neg", (Load(whole, word(form.sums + j, (run, 2)), I32),), I32) for j in range(2)]
        high = Store(signed, byte(form.high, (run, 1)), Apply("shr", (sum_, Const(7, I32)), I32))
        low = Store(signed, byte(form.low, (run, 1)), Apply("and", (sum_, Const(127, I32)), I32))
        short = Store(whole, word(form.sums, (run, 1)), Apply("neg", (total(16, (run, 16)),), I32))
        body.append(For("g", 16, (short,)))
        body.append(For("g", 8, (Let("sum", Apply("add", tuple(pair), I32)), high, low)))
    _over_rows(s, builder, form.block, body, 5)
    return [out]
