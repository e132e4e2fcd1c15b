"""Loop forms of convolution and pooling: lanes run along an output row, each reducing its own window."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

from rlx.dtypes import I64
from rlx.ir.graph import Node
from rlx.lir.forms.index import in_range
from rlx.lir.forms.shape import require_at_most
from rlx.lir.loops import Const, Expr, For, Index, Let, Reduce, Ref, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit, loop_form
from rlx.lir.views import View
from rlx.ops.conv import Pair, pair, span
from rlx.types import product


def _source(out: Expr, kernel: Expr, stride: int, padding: int, dilation: int) -> Expr:
    """The index on an axis of x that an output reads; out of range in the padding."""
    return out * stride + kernel * dilation + -padding


class _Windows:
    """Loops over the output, and loads of x relative to a window."""

    def __init__(
        self, s: Scheduler, name: str, x: View, out: View, kernel: Sequence[int], stride: Pair, padding: Pair,
        dilation: Pair,
    ) -> None:  # fmt: skip
        self.builder = LoopBuilder(name)
        self.x, self.out = x, out
        self.builder.param(x)
        self.settings = list(zip(stride, padding, dilation, strict=True))
        self.padded = [p > 0 for p in padding]
        for size, k, side, spread in zip(x.shape[2:], kernel, padding, dilation, strict=True):
            require_at_most(s, span(k, spread), size + 2 * side)
        self.lets = decode_unit(self.builder, out.shape[:3], ["b", "c", "y"])

    def load(self, channel: Expr, row: Expr, column: Expr, fill: float) -> Expr:
        """x at a position of the window; `fill` in the padding."""
        builder = self.builder
        places: list[tuple[Expr, Expr]] = [(Ref("y", I64), row), (Index("j"), column)]
        at = [_source(o, k, *setting) for (o, k), setting in zip(places, self.settings, strict=True)]
        indices = (Ref("b", I64), channel, *at)
        place = tuple((i, builder.arg(f"x_{a}", self.x.strides[a])) for a, i in enumerate(indices[:3]))
        last = (indices[3], builder.stride(0, "3", self.x.strides[3], unit=True))
        value = builder.load(0, (*place, last))
        checks = [
            in_range(i, builder.arg(f"size_{a}", self.x.shape[2 + a])) for a, i in enumerate(at) if self.padded[a]
        ]
        if not checks:
            return value
        return functools.reduce(operator.and_, checks).choose(value, fill)

    def launch(self, s: Scheduler, value: Expr, flops: int) -> None:
        builder, out = self.builder, self.out
        number = builder.param(out, written=True)
        axes = (Ref("b", I64), Ref("c", I64), Ref("y", I64))
        place = tuple((i, builder.arg(f"out_{a}", out.strides[a])) for a, i in enumerate(axes))
        store = Store(number, (*place, (Index("j"), 1)), value)
        row = For("j", builder.arg("width", out.shape[3]), (store,), vector=True)
        units = product(out.shape[:3])
        root = For("u", builder.arg("units", units), (*self.lets, row))
        builder.launch(s, root, units, flops=product(out.shape) * flops)


def _nested_reduce(op: str, sizes: Sequence[tuple[str, int]], value: Callable[..., Expr]) -> Expr:
    """A reduction over several axes, the last one innermost."""
    inner = value(*(Index(name) for name, _ in sizes))
    for name, size in reversed(sizes):
        inner = Reduce(op, name, size, inner)
    return inner


@loop_form("conv2d")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, weight = (s.view(o) for o in node.operands[:2])
    out = s.result(node)
    minimum = {"stride": 1, "padding": 0, "dilation": 1}
    stride, padding, dilation = (pair("conv2d", name, node.attrs[name], low) for name, low in minimum.items())
    operand = node.operands[1]
    assert operand is not None
    channels, inside, *kernel = (int(d) for d in operand.shape)
    loops = _Windows(s, "conv2d", x, out, kernel, stride, padding, dilation)
    builder = loops.builder
    taps = builder.param(s.contiguous(weight), name="weight")
    group = channels // node.attrs["groups"]
    first: Expr = Const(0, I64)
    if node.attrs["groups"] > 1:
        loops.lets.append(Let("first", Ref("c", I64).quot(group) * inside))
        first = Ref("first", I64)
    steps = (inside * kernel[0] * kernel[1], kernel[0] * kernel[1], kernel[1], 1)

    def term(channel: Expr, row: Expr, column: Expr) -> Expr:
        place = tuple(zip((Ref("c", I64), channel, row, column), steps, strict=True))
        return loops.load(first + channel, row, column, 0.0) * builder.load(taps, place)

    total = _nested_reduce("sum", [("i", inside), ("r", kernel[0]), ("q", kernel[1])], term)
    if node.operands[2] is not None:
        bias = builder.param(s.contiguous(s.view(node.operands[2])), name="bias")
        total = total + builder.load(bias, ((Ref("c", I64), 1),)).cast(total.dtype)
    loops.launch(s, total, 2 * inside * kernel[0] * kernel[1])
    return [out]


@loop_form("pool2d")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, out = s.view(node.operands[0]), s.result(node)
    kernel = pair("pool2d", "kernel", node.attrs["kernel"], 1)
    stride = kernel if node.attrs["stride"] is None else pair("pool2d", "stride", node.attrs["stride"], 1)
    padding = pair("pool2d", "padding", node.attrs["padding"], 0)
    largest = node.attrs["kind"] == "max"
    loops = _Windows(s, f"pool2d_{node.attrs['kind']}", x, out, kernel, stride, padding, (1, 1))
    fill = float("-inf") if largest else 0.0
    sizes = [("r", kernel[0]), ("q", kernel[1])]
    value = _nested_reduce("max" if largest else "sum", sizes, lambda r, q: loops.load(Ref("c", I64), r, q, fill))
    if not largest:
        value = value / (kernel[0] * kernel[1])
    loops.launch(s, value, kernel[0] * kernel[1])
    return [out]
