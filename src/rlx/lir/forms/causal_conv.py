"""Loop forms of causal convolution: the sum over taps, and the last tokens, carried to the next call."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import I64
from rlx.ir.graph import Node
from rlx.lir.forms.named_operands import Operands, state_after
from rlx.lir.forms.ragged import BEGIN, COUNT, TOKEN, Tokens, clear_padding
from rlx.lir.loops import Const, Expr, For, Index, Let, Ref, Stmt
from rlx.lir.schedule import Elements, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.types import product

CHANNELS = 32  # per unit of the state update


@loop_form("depthwise_conv1d_causal", "depthwise_conv1d_causal_carry")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    if node.operand("rows") is not None:
        return _ragged(s, node)
    x, weight, before, *lengths = (s.view(o) for o in node.operands if o is not None)
    out = s.result(node)
    size = node.attrs["kernel_size"]
    taps = s.contiguous(weight)
    shape = out.shape
    reads = [
        View(x.buffer, x.dtype, shape, x.strides, x.offset - x.strides[1] * (size - 1)),
        View(before.buffer, before.dtype, shape, before.strides, before.offset),
        View(taps.buffer, taps.dtype, shape, (0, 0, size), taps.offset),
    ]

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        token = e.index(1)
        total: Expr | None = None
        for k in range(size):
            here = (Const(k, I64), e.arg("x_token", x.strides[1]))
            pad = (Const(k, I64), e.arg("pad_token", before.strides[1]))
            value = e.load_wide(0, here)
            if k < size - 1:
                value = (token < size - 1 - k).choose(e.load_wide(1, pad), value)
            tap = e.load_wide(2, (Const(k, I64), 1))
            term = value.cast(tap.dtype) * tap
            total = term if total is None else total + term
        assert total is not None
        return (), [total]

    map_elements(s, "depthwise_conv1d", shape, reads, [out], body, keep=(1,), flops=2 * size)
    return [out, _last_tokens(s, node, x, before, lengths[0])] if lengths else [out]


def _last_tokens(s: Scheduler, node: Node, x: View, before: View, lengths: View) -> View:
    """The last tokens of `before` and `x` up to the length of each row.

    Written in order, so that in place no token is overwritten before it is read.
    """
    operands = Operands(s, f"{node.op}_state")
    final = state_after(s, node, before)
    operands.carry(before, final)
    operands.read("x", x)
    operands.read("lengths", lengths)
    builder, size = operands.builder, node.attrs["kernel_size"]
    batch, seq, channels = x.shape
    j, b, end, limit = Index("j"), Index("b"), Ref("end", I64), builder.arg("seq", seq)
    body: list[Stmt] = [Let("end", operands.load("lengths", b).cast(I64).max(0).min(limit))]
    for k in range(size - 1):
        at = Ref(f"at{k}", I64)
        before_x, in_x = operands.load("state", b, at, j), operands.load("x", b, at - (size - 1), j)
        token = (at < size - 1).choose(before_x, in_x)
        body += [Let(at.name, end + k), operands.store("final", token, b, Const(k, I64), j)]
    rows = For("b", builder.arg("batch", batch), tuple(body))
    root = For("j", builder.arg("channels", channels), (rows,), vector=True)
    units = (channels + (CHANNELS - 1)) // CHANNELS
    builder.launch(s, root, units, chunk=CHANNELS, split="channels")
    return final


def _ragged(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is a block of channels: it walks the tokens of each row, then stores its last tokens for the next call."""
    x, weight, before = (s.view(o) for o in node.operands[:3])
    operands, tokens, size = Operands(s, node.op), Tokens.of(s, node), node.attrs["kernel_size"]
    out, final = s.result(node), state_after(s, node, before)
    clear_padding(s, node, out)
    operands.read("x", x)
    operands.read("weight", s.contiguous(weight).with_((x.shape[1], size), (size, 1)))
    tokens.read(operands)
    operands.write("y", out)
    operands.carry(before, final)
    builder, j, b = operands.builder, Index("j"), Index("b")

    def token_at(name: str, number: Expr) -> tuple[list[Stmt], Expr]:
        """Token `number` of the row, counting the tokens of the state first, then those of `x`."""
        at, own = Ref(name, I64), Ref(f"{name}_own", I64)
        since = at - (size - 1)
        nearest = since - since.min(0)  # clamped: the address is computed even if the load is not chosen
        lets: list[Stmt] = [Let(name, number), Let(own.name, operands.load("order", BEGIN + nearest).cast(I64))]
        return lets, (at < size - 1).choose(operands.load("state", b, at, j), operands.load("x", own, j))

    step: list[Stmt] = tokens.find(operands, Index("t"))
    total: Expr | None = None
    for k in range(size):
        tap = operands.load("weight", j, Const(k, I64))
        lets, value = token_at(f"at{k}", Index("t") + k) if k < size - 1 else ([], operands.load("x", TOKEN, j))
        step += lets
        term = value * tap
        total = term if total is None else total + term
    assert total is not None
    step.append(operands.store("y", total, TOKEN, j))
    last: list[Stmt] = []
    for k in range(size - 1):
        lets, value = token_at(f"last{k}", COUNT + k)
        last += [*lets, operands.store("final", value, b, Const(k, I64), j)]
    row = tokens.unless_idle(operands, For("t", tokens.own(operands), tuple(step)), *last)
    rows = For("b", builder.arg("batch", tokens.states), (*tokens.count_own(operands, b), *row))
    root = For("j", builder.arg("channels", x.shape[1]), (rows,), vector=True)
    units = (x.shape[1] + (CHANNELS - 1)) // CHANNELS
    builder.launch(s, root, units, chunk=CHANNELS, split="channels", flops=product(x.shape) * (2 * size))
    return [out, final]
