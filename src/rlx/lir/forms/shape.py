"""Loop forms of shape ops: views are free; concatenate and pad take one kernel each."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Node
from rlx.lir.loops import Expr, Stmt
from rlx.lir.schedule import Elements, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.types import Size, evaluate, is_monotone, symbols_of


@loop_form("reshape")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    view = s.view(node.operands[0])
    reshaped = view.reshape(node.types[0].shape)
    if reshaped is None:
        reshaped = s.copied(view).reshape(node.types[0].shape)
    assert reshaped is not None
    return [reshaped]


@loop_form("assume_equal")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    view = s.view(node.operands[0])
    for have, want in zip(view.shape, node.types[0].shape, strict=True):
        if have != want:
            s.assume(have, want)
    return [view.with_(node.types[0].shape, view.strides)]


@loop_form("transpose")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return [s.view(node.operands[0]).transpose(node.attrs["axes"])]


def require_at_most(s: Scheduler, a: Size, b: Size, subject: str = "") -> None:
    """Check at run time that a <= b, unless that holds for all values of the symbols."""
    gap = b - a
    if is_monotone(gap) and evaluate(gap, {symbol.name: 0 for symbol in symbols_of(gap)}) >= 0:
        return
    s.assume(a, b, "<=", subject)


@loop_form("slice")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    view, start, stop = s.view(node.operands[0]), node.attrs["start"], node.attrs["stop"]
    for low, high, size in zip(start, stop, view.shape, strict=True):
        require_at_most(s, 0, low)
        require_at_most(s, low, high)
        require_at_most(s, high, size)
    return [view.slice(start, stop, node.attrs["step"], node.types[0].shape)]


@loop_form("expand")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    return [s.view(node.operands[0]).expand(node.types[0].shape)]


@loop_form("concatenate")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """Each element is read from the operand whose range contains its index on the axis."""
    out = s.result(node)
    axis = node.attrs["axis"] % len(out.shape)
    reads: list[View] = []
    ends: list[Size] = []
    at: Size = 0
    for operand in node.operands:
        view = s.view(operand)
        shifted = View(view.buffer, view.dtype, out.shape, view.strides, view.offset - at * view.strides[axis])
        reads.append(shifted)
        at = at + view.shape[axis]
        ends.append(at)

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        native = s.target.native(out.dtype)
        value = e.load(len(reads) - 1).cast(native)
        for i in range(len(reads) - 2, -1, -1):
            value = (e.index(axis) < e.arg(f"end{i}", ends[i])).choose(e.load(i).cast(native), value)
        return (), [value]

    map_elements(s, "concatenate", out.shape, reads, [out], body, keep=(axis,))
    return [out]


@loop_form("pad")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    out = s.result(node)
    view = s.view(node.operands[0])
    low, high = node.attrs["low"], node.attrs["high"]
    for size in (*low, *high):
        require_at_most(s, 0, size)
    offset: Size = view.offset
    for size, stride in zip(low, view.strides, strict=True):
        offset = offset - size * stride
    inner = View(view.buffer, view.dtype, out.shape, view.strides, offset)
    padded = [a for a in range(len(low)) if not (low[a] == 0 and high[a] == 0)]

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        inside: Expr | None = None
        for axis in padded:
            start = e.arg(f"low{axis}", low[axis])
            stop = e.arg(f"stop{axis}", low[axis] + view.shape[axis])
            here = (e.index(axis) >= start) & (e.index(axis) < stop)
            inside = here if inside is None else inside & here
        value = e.load(0)
        fill = value.dtype.numpy.type(node.attrs["value"]).item()
        return (), [value if inside is None else inside.choose(value, fill)]

    map_elements(s, "pad", out.shape, [inner], [out], body, keep=padded)
    return [out]
