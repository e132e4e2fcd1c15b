"""Loop forms of 8-bit activations: a unit is one row, so that what made the row can round it as well."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import F32, F64, I8, I32, I64
from rlx.ir.graph import Node
from rlx.lir.loops import Arg, Const, Expr, For, Index, Let, Load, Place, Reduce, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, loop_form
from rlx.lir.views import View
from rlx.ops.activations import LARGEST, LEAST, SHORT, activations_for
from rlx.types import product

_BLOCK = Ref("block", I64)  # of all rows


def _over_rows(s: Scheduler, builder: LoopBuilder, block: int, body: Sequence[Stmt], flops: int) -> None:
    """Launch `body`, which is about one block, over the blocks of each row."""
    x, *_ = builder.views
    units, count = product(x.shape[:-1]), x.shape[-1] // block
    blocks = builder.arg("count", count)
    loop = For("b", blocks, (Let("block", Index("u") * blocks + Index("b")), *body))
    root = For("u", builder.arg("units", units), (loop,))
    builder.launch(s, root, units, flops=product(x.shape) * flops, shares={0: x.shape[-1]})


def _code(builder: LoopBuilder, *at: tuple[Expr, int | Arg]) -> Expr:
    """A number of the block times the inverse of its scale, rounded: it is small, or NaN, so two sums do that."""
    x = builder.load(0, at)
    far = 1.5 * 2.0 ** (52 if x.dtype is F64 else 23)
    return x * Ref("inverse", x.dtype) + far - far


def _scales(builder: LoopBuilder, block: int) -> list[Stmt]:
    """`largest`, `scale` and `inverse` of the block."""
    x = builder.load(0, ((_BLOCK, block), (Index("i"), 1)))
    largest = Ref("largest", x.dtype)
    tiny = largest < LEAST  # not so if there is a NaN
    return [
        Let("largest", Reduce("max", "i", block, abs(x))),
        Let("scale", tiny.select(0.0, largest / LARGEST)),
        Let("inverse", tiny.select(0.0, LARGEST / largest)),
    ]


@loop_form("round_blocks")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, out = s.contiguous(s.view(node.operands[0])), s.result(node)
    block = node.attrs["block"]
    builder = LoopBuilder(node.op)
    builder.param(x)
    builder.param(out, written=True)
    at = ((_BLOCK, block), (Index("i"), 1))
    code = _code(builder, *at)
    stores = For("i", block, (Store(1, at, code * Ref("scale", code.dtype)),), vector=True)
    _over_rows(s, builder, block, [*_scales(builder, block), stores], 4)
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

    def word(index: int, *more: tuple[Expr, int | Arg]) -> Place:
        return ((u, form.words), (Const(index, I64), 1), *more)

    def byte(index: int, *more: tuple[Expr, int | Arg]) -> Place:
        return ((u, 4 * form.words), (Const(4 * index, I64), 1), *more)

    def total(length: int, *more: tuple[Expr, int | Arg]) -> Expr:
        """The sum of codes that are written."""
        code = Load(signed, byte(form.codes, *more, (i, 1)), I8)
        return Reduce("sum", "i", length, code.cast(I32))

    codes = Store(signed, byte(form.codes, (i, 1)), _code(builder, (u, form.block), (i, 1)))
    body: list[Stmt] = [*_scales(builder, form.block), Store(numbers, word(form.scale), Ref("scale", F32))]
    body.append(For("i", form.block, (codes,), vector=True))
    sum_ = Ref("sum", I32)
    if form is SHORT:
        body.append(Let("sum", total(form.block)))
        body.append(Store(whole, word(form.sums), -sum_))
        body.append(Store(numbers, word(form.total), sum_.cast(F32) * Ref("scale", F32)))
    else:
        pair = [-Load(whole, word(form.sums + j, (run, 2)), I32) for j in range(2)]
        high = Store(signed, byte(form.high, (run, 1)), sum_ >> 7)
        low = Store(signed, byte(form.low, (run, 1)), sum_ & 127)
        short = Store(whole, word(form.sums, (run, 1)), -total(16, (run, 16)))
        body.append(For("g", 16, (short,)))
        body.append(For("g", 8, (Let("sum", pair[0] + pair[1]), high, low)))
    _over_rows(s, builder, form.block, body, 5)
    return [out]
