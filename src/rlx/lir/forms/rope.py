"""Loop form of rotary position embedding (RoPE): one unit per head of a token."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, I64
from rlx.ir.graph import Node, Value
from rlx.lir.forms.index import in_range
from rlx.lir.forms.shape import require_at_most
from rlx.lir.kernels import OUT_OF_RANGE
from rlx.lir.loops import Check, Const, Expr, For, Index, Let, Load, Place, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit, loop_form
from rlx.lir.views import View
from rlx.types import product


@loop_form("rope")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, cos, sin, positions = (s.view(o) for o in node.operands)
    if x.strides[-1] != 1:
        x = s.copied(x)
    cos, sin, positions = s.contiguous(cos), s.contiguous(sin), s.contiguous(positions)
    out = s.result(node)
    half = cos.shape[1]
    require_at_most(s, half * 2, x.shape[3])
    if _counts_from_zero(node.operands[3]):
        require_at_most(s, x.shape[1], cos.shape[0], "RoPE tables")
    pairs = node.attrs["style"] == "pairs"
    builder = LoopBuilder(f"rope_{node.attrs['style']}")
    for view in (x, cos, sin, positions):
        builder.param(view)
    builder.param(out, written=True)
    kind = x.dtype.wide
    tokens, heads = x.shape[0] * x.shape[1], x.shape[2]
    lets = decode_unit(builder, [x.shape[0], x.shape[1], heads], ["b", "t", "h"])
    n = builder.arg("half", half)
    seq = builder.arg("seq", x.shape[1])
    table = builder.arg("table", cos.shape[0])
    outer: Place = tuple((Ref(i, I64), builder.arg(f"x_{i}", x.strides[a])) for a, i in enumerate("bth"))
    target: Place = tuple((Ref(i, I64), builder.arg(f"y_{i}", out.strides[a])) for a, i in enumerate("bth"))
    j = Index("j")
    first: Place = ((j, 2),) if pairs else ((j, 1),)
    second: Place = (*first, (Const(1, I64), 1)) if pairs else (*first, (n, 1))

    def element(param: int, base: Place, place: Place) -> Expr:
        return builder.load(param, (*base, *place))

    def angle(param: int) -> Expr:
        return Ref("ok", BOOL).choose(builder.load(param, ((Ref("p", I64), n), (j, 1))), 0).cast(kind)

    a, b, c, d = (Ref(name, kind) for name in ("first", "second", "cosine", "sine"))
    rotate: tuple[Stmt, ...] = (
        Let("first", element(0, outer, first)),
        Let("second", element(0, outer, second)),
        Let("cosine", angle(1)),
        Let("sine", angle(2)),
        Store(4, (*target, *first), a * c - b * d),
        Store(4, (*target, *second), b * c + a * d),
    )
    body: list[Stmt] = [
        *lets,
        Let("p", Load(3, ((Ref("b", I64), seq), (Ref("t", I64), 1)), positions.dtype).cast(I64)),
        Let("ok", in_range(Ref("p", I64), table)),
        Check(Ref("ok", BOOL), OUT_OF_RANGE),
        For("j", n, rotate, vector=True),
    ]
    if half * 2 != x.shape[3]:
        rest: Place = ((j, 1), (n, 2))
        copy = Store(4, (*target, *rest), element(0, outer, rest))
        body.append(For("j", builder.arg("rest", x.shape[3] - half * 2), (copy,), vector=True))
    units = tokens * heads
    root = For("u", builder.arg("units", units), tuple(body))
    builder.launch(s, root, units, split="heads", flops=product(x.shape) * 3)
    return [out]


def _counts_from_zero(positions: Value | None) -> bool:
    """Whether positions are 0, 1, ... in each row, as `default_positions` builds them."""
    if positions is None or positions.node.op != "cumsum" or not positions.node.attrs["exclusive"]:
        return False
    ones = positions.node.operands[0]
    return ones is not None and ones.node.op == "expand" and positions.node.attrs["axis"] == 1
