"""Loop forms of int8 activations: one unit per row, so that they merge with the kernel that writes the row."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import F64, I64
from rlx.ir.graph import Node
from rlx.lir.loops import Arg, Expr, For, Index, Let, Reduce, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, loop_form
from rlx.lir.views import View
from rlx.ops.quantised_activations import LARGEST, MIN_LARGEST
from rlx.types import product

BLOCK = Ref("block", I64)  # of all rows


def over_rows(s: Scheduler, builder: LoopBuilder, block: int, body: Sequence[Stmt], flops: int) -> None:
    """Launch `body`, which handles one block, over the blocks of each row."""
    x, *_ = builder.views
    units, count = product(x.shape[:-1]), x.shape[-1] // block
    blocks = builder.arg("count", count)
    loop = For("b", blocks, (Let("block", Index("u") * blocks + Index("b")), *body))
    root = For("u", builder.arg("units", units), (loop,))
    builder.launch(s, root, units, flops=product(x.shape) * flops, shares={0: x.shape[-1]})


def code(builder: LoopBuilder, *at: tuple[Expr, int | Arg]) -> Expr:
    """An element times the inverse of its block's scale, rounded by adding and subtracting a large number."""
    x = builder.load(0, at)
    far = 1.5 * 2.0 ** (52 if x.dtype is F64 else 23)
    return x * Ref("inverse", x.dtype) + far - far


def scales(builder: LoopBuilder, block: int) -> list[Stmt]:
    """Define `largest`, `scale` and `inverse` of the block."""
    x = builder.load(0, ((BLOCK, block), (Index("i"), 1)))
    largest = Ref("largest", x.dtype)
    tiny = largest < MIN_LARGEST  # false if there is a NaN
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
    at = ((BLOCK, block), (Index("i"), 1))
    value = code(builder, *at)
    stores = For("i", block, (Store(1, at, value * Ref("scale", value.dtype)),), vector=True)
    over_rows(s, builder, block, [*scales(builder, block), stores], 4)
    return [out]
