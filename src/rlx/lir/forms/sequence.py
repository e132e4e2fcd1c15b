"""Loop forms of recurrences: one pass over the tokens, the state in registers (selective scan) or in its own buffer."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import I64
from rlx.ir.graph import Node
from rlx.lir.forms import gated_delta_net as gated_delta_net
from rlx.lir.forms import scan_gradient
from rlx.lir.forms.named_operands import Operands, state_after
from rlx.lir.loops import Assign, Const, Expr, For, Index, Let, Ref, Stmt, Var, fma, known
from rlx.lir.schedule import Elements, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.ops.sequence import chunks_of
from rlx.types import product

CHANNELS = 32  # of one unit of a selective scan


@loop_form("selective_scan", "selective_scan_carry", "selective_scan_kept")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """Lanes are channels; each walks the tokens with its n numbers of state in registers."""
    carried, keeps = node.op != "selective_scan", node.op == "selective_scan_kept"
    names = ("x", "delta", "a", "b", "c", "state", "d") if carried else ("x", "delta", "a", "b", "c", "d")
    operands = Operands(s, node.op)
    outs = [s.result(node)]
    for name, operand in zip(names, node.operands, strict=False):
        if operand is not None and name != "state":
            operands.read(name, s.view(operand))
    operands.write("y", outs[0])
    if carried:
        state = s.view(node.operands[names.index("state")])
        outs.append(s.result(node, 1) if keeps else state_after(s, node, state))
        operands.carry(state, outs[1])
    if keeps:
        outs.append(s.result(node, 2))
        operands.write("states", outs[2])
    n, kind = node.attrs["state_size"], outs[0].dtype.wide
    batch, seq, channels = outs[0].shape
    builder = operands.builder
    j, b, t = Index("j"), Index("b"), Ref("token", I64)

    rates: list[Stmt] = [Let(f"a{i}", operands.load("a", j, Const(i, I64))) for i in range(n)]
    start = [
        Var(f"h{i}", operands.load("state", b, j, Const(i, I64)) if carried else Const(0.0, kind)) for i in range(n)
    ]
    step: list[Stmt] = [Let("dt", operands.load("delta", b, t, j)), Let("now", operands.load("x", b, t, j))]
    step.append(Let("drive", Ref("dt", kind) * Ref("now", kind)))
    y: Expr = operands.load("d", j) * Ref("now", kind) if "d" in operands.numbers else Const(0.0, kind)
    for i in range(n):
        decay = (Ref("dt", kind) * Ref(f"a{i}", kind)).exp()
        driven = Ref("drive", kind) * operands.load("b", b, t, Const(i, I64))
        step.append(Assign(f"h{i}", fma(decay, Ref(f"h{i}", kind), driven)))
        step.append(Let(f"y{i}", fma(operands.load("c", b, t, Const(i, I64)), Ref(f"h{i}", kind), y)))
        y = Ref(f"y{i}", kind)
    step.append(operands.store("y", y, b, t, j))
    last = [operands.store("final", Ref(f"h{i}", kind), b, j, Const(i, I64)) for i in range(n)] if carried else []
    if keeps:
        chunk, first = Index("chunk"), Ref("first", I64)
        size = node.attrs["chunk"]
        kept = [operands.store("states", Ref(f"h{i}", kind), b, chunk, Const(i, I64), j) for i in range(n)]
        left = builder.arg("seq", seq) - first
        bounds = Let("first", chunk * size), Let("rest", known(size, I64).min(left))
        tokens = For("t", Ref("rest", I64), (Let("token", first + Index("t")), *step))
        walk = For("chunk", builder.arg("chunks", chunks_of(seq, node.attrs["chunk"])), (*bounds, *kept, tokens))
    else:
        walk = For("t", builder.arg("seq", seq), (Let("token", Index("t")), *step))
    rows = For("b", builder.arg("batch", batch), (*start, walk, *last))
    root = For("j", builder.arg("channels", channels), (*rates, rows), vector=True)
    units = (channels + (CHANNELS - 1)) // CHANNELS
    builder.launch(s, root, units, chunk=CHANNELS, split="channels", flops=product(outs[0].shape) * (8 * n))
    return outs


@loop_form("selective_scan_backward")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    results = [s.result(node, i) for i in range(6)]
    scan_gradient.backward(s, node, results)
    return results


@loop_form("depthwise_conv1d_causal", "depthwise_conv1d_causal_carry")
def _(s: Scheduler, node: Node) -> Sequence[View]:
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
    """The tokens of `before` and `x` up to the length of each row, the last ones: in the order in which they are
    written, none is read after its place was taken. Lanes are channels.
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
