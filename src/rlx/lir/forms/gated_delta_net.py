"""Loop forms of the gated delta net and its gradient, token by token, with one unit per head."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.dtypes import I64
from rlx.ir.graph import Node
from rlx.lir.forms.named_operands import Operands
from rlx.lir.forms.ragged import TOKEN
from rlx.lir.forms.recurrent import (
    FIRST,
    REST,
    find_start,
    read_segments,
    results_of,
    unless_start,
    walk_chunks,
    walk_matrix,
)
from rlx.lir.loops import Assign, Const, Expr, For, Index, Let, Reduce, Ref, Stmt, Var, fma
from rlx.lir.schedule import Scheduler, decode_unit, loop_form
from rlx.lir.views import View
from rlx.types import TensorType, product

NAMES = ("q", "k", "g", "beta", "states", "misses", "d_out", "d_last")
RESULTS = ("dq", "dk", "dv", "dg", "dbeta", "d_state")


@loop_form("gated_delta_net", "gated_delta_net_carry")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    outs, state = results_of(s, node)
    walk_matrix(s, node, outs[0], state=state, last=outs[1] if state is not None else None)
    return outs


@loop_form("gated_delta_net_with_states")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    out, last, *saved = (s.result(node, i) for i in range(4))
    walk_matrix(s, node, out, state=s.view(node.operands[5]), last=last, saved=saved)
    return [out, last, *saved]


@loop_form("gated_delta_net_backward")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """From the last chunk to the first: recompute the decayed state before each token of the chunk (`old`), then walk
    back through the tokens with the gradient of the state (`ds`).
    """
    operands, results = Operands(s, node.op), [s.result(node, i) for i in range(6)]
    for name, operand in zip(NAMES, node.operands, strict=False):
        operands.read(name, s.view(operand))
    read_segments(operands, node)
    for name, view in zip(RESULTS, results, strict=True):
        operands.write(name, view)
    batch, seq, heads, n = results[0].shape
    chunk, kind = node.attrs["chunk"], results[0].dtype.wide
    assert isinstance(n, int)
    for name, *shape in (("state", n, n), ("ds", n, n), ("old", chunk, n, n), ("change", n), ("row", n)):
        operands.write(name, s.temporary(TensorType((batch, heads, *shape), kind)))
    builder = operands.builder
    lets = decode_unit(builder, [batch, heads], ["b", "h"])
    b, h, at, i, j = Ref("b", I64), Ref("h", I64), Ref("at", I64), Index("i"), Index("j")
    decay, scale = Ref("decay", kind), 1 / math.sqrt(n)

    def own(name: str, *place: Expr) -> Expr:
        """An element of the unit's scratch memory."""
        return operands.load(name, b, h, *place)

    def store(name: str, value: Expr, *place: Expr) -> Stmt:
        return operands.store(name, value, b, h, *place)

    def at_token(name: str, *place: Expr) -> Expr:
        return operands.load(name, b, TOKEN, h, *place)

    def each_cell(*stmts: Stmt) -> For:
        return For("i", n, (For("j", n, stmts, vector=True),))

    def find_token(number: Expr) -> list[Stmt]:
        """Define `token`, its gate, and its change to the state."""
        change = at_token("misses", j) * at_token("beta")
        return [
            Let("at", number), Let("token", FIRST + at), *find_start(operands, b, TOKEN),
            Let("decay", at_token("g").exp()),
            For("j", n, (store("change", change, j),), vector=True),
        ]  # fmt: skip

    forwards = For("t", REST, (
        *find_token(Index("t")),
        each_cell(
            Let("left", unless_start(operands, decay * own("state", i, j))),
            store("old", Ref("left", kind), at, i, j),
            store("state", fma(at_token("k", i), own("change", j), Ref("left", kind)), i, j),
        ),
    ))  # fmt: skip
    new = fma(at_token("k", i), own("change", j), own("old", at, i, j))
    wrote = Reduce("sum", "j", n, own("ds", i, j) * own("change", j))
    read = Reduce("sum", "j", n, own("old", at, i, j) * own("row", j) * at_token("beta"))
    of_row = Reduce("sum", "j", n, own("ds", i, j) * own("old", at, i, j))
    backwards = For("back", REST, (
        *find_token(REST - 1 - Index("back")),
        each_cell(store("ds", fma(at_token("q", i) * scale, at_token("d_out", j), own("ds", i, j)), i, j)),
        For("i", n, (
            operands.store("dq", Reduce("sum", "j", n, new * at_token("d_out", j)) * scale, b, TOKEN, h, i),
        )),
        For("j", n, (
            Let("pulled", Reduce("sum", "i", n, own("ds", i, j) * at_token("k", i))),
            store("row", Ref("pulled", kind), j),
            operands.store("dv", Ref("pulled", kind) * at_token("beta"), b, TOKEN, h, j),
        ), vector=True),
        operands.store("dbeta", Reduce("sum", "j", n, own("row", j) * at_token("misses", j)), b, TOKEN, h),
        For("i", n, (operands.store("dk", wrote - read, b, TOKEN, h, i),)),
        each_cell(store("ds", fma(-at_token("k", i), own("row", j) * at_token("beta"), own("ds", i, j)), i, j)),
        Var("slope", Const(0.0, kind)),
        For("i", n, (Assign("slope", Ref("slope", kind) + of_row),)),
        operands.store("dg", unless_start(operands, Ref("slope", kind)), b, TOKEN, h),
        each_cell(store("ds", unless_start(operands, own("ds", i, j) * decay), i, j)),
    ))  # fmt: skip
    start = each_cell(store("state", operands.load("states", b, h, Ref("chunk", I64), i, j), i, j))
    body: tuple[Stmt, ...] = (
        *lets,
        each_cell(store("ds", operands.load("d_last", b, h, i, j), i, j)),
        walk_chunks(operands, seq, chunk, start, forwards, backwards, backwards=True),
        each_cell(operands.store("d_state", own("ds", i, j), b, h, i, j)),
    )
    units = batch * heads
    root = For("u", builder.arg("units", units), body)
    builder.launch(s, root, units, split="heads", flops=product(results[0].shape) * (20 * n))
    return results
