"""Shared parts of recurrent loop forms: walks over chunks of tokens, resets at segment starts, matrix states."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.dtypes import BOOL, I64
from rlx.ir.graph import Node
from rlx.lir.forms.named_operands import Operands, state_after
from rlx.lir.forms.ragged import TOKEN, Tokens, clear_padding
from rlx.lir.loops import Const, Expr, For, Index, Let, Reduce, Ref, Stmt, fma, known
from rlx.lir.schedule import Scheduler, decode_unit
from rlx.lir.views import View
from rlx.ops.recurrent import chunks_of
from rlx.types import Size, TensorType, product

FIRST, REST, AT_START = Ref("first", I64), Ref("rest", I64), Ref("starts", BOOL)


def results_of(s: Scheduler, node: Node) -> tuple[list[View], View | None]:
    """The buffers of the results, and the carried state, if any."""
    out = s.result(node)
    if not node.op.endswith("_carry"):
        return [out], None
    state = s.view(node.operand("state"))
    return [out, state_after(s, node, state)], state


# -- segments ----------------------------------------------------------------------------------------------------------
def read_segments(operands: Operands, node: Node) -> None:
    segments = node.operand("segments")
    if segments is not None:
        operands.read("segments", operands.scheduler.view(segments))


def find_start(operands: Operands, b: Expr, token: Expr) -> list[Stmt]:
    """Define `starts`: whether `token` begins a segment. Empty without segments."""
    if "segments" not in operands.numbers:
        return []
    here, before = (operands.load("segments", b, at) for at in (token, token - token.min(1)))
    return [Let(AT_START.name, here.ne(before))]


def unless_start(operands: Operands, value: Expr) -> Expr:
    """A value of the state before the token: 0 at the start of a segment."""
    return AT_START.select(0, value) if "segments" in operands.numbers else value


# -- chunks ------------------------------------------------------------------------------------------------------------
def walk_chunks(operands: Operands, seq: Size, chunk: int, *body: Stmt, backwards: bool = False) -> For:
    """Run `body` per chunk: `chunk` is its index, `first` its first token, `rest` its number of tokens."""
    builder = operands.builder
    chunks = builder.arg("chunks", chunks_of(seq, chunk))
    turn = chunks - 1 - Index("turn") if backwards else Index("turn")
    bounds = (
        Let("chunk", turn),
        Let("first", Ref("chunk", I64) * chunk),
        Let("rest", known(chunk, I64).min(builder.arg("seq", seq) - FIRST)),
    )
    return For("turn", chunks, (*bounds, *body))


# -- states that are matrices ------------------------------------------------------------------------------------------
def walk_matrix(
    s: Scheduler, node: Node, out: View, *, state: View | None, last: View | None, saved: Sequence[View] = ()
) -> None:
    """Gated linear attention or the gated delta net, token by token. A unit is a head, with its own matrix state.

    `saved` receives the states before each chunk, and each token's prediction error.
    """
    corrects = node.op.startswith("gated_delta_net")
    operands, tokens = Operands(s, node.op), Tokens.of(s, node)
    clear_padding(s, node, out)
    out = tokens.rectangular(out)
    for name, operand in zip(("q", "k", "v", "g", "beta") if corrects else "qkvg", node.operands, strict=False):
        operands.read(name, tokens.rectangular(s.view(operand)))
    read_segments(operands, node)
    tokens.read(operands)
    operands.write("out", out)
    if state is not None and last is not None:
        operands.carry(state, last)
    for name, view in zip(("states", "misses"), saved, strict=False):
        operands.write(name, view)
    batch, seq, (heads, columns) = tokens.states, tokens.width, out.shape[2:]
    groups, rows = s.view(node.operands[0]).shape[-2:]
    kind = out.dtype.wide
    assert isinstance(rows, int) and isinstance(columns, int)
    operands.write("matrix", s.temporary(TensorType((batch, heads, rows, columns), kind)))
    builder = operands.builder
    lets = decode_unit(builder, [batch, heads], ["b", "h"])
    b, h, i, j = Ref("b", I64), Ref("h", I64), Index("i"), Index("j")
    lets.append(Let("group", h.quot(builder.arg("group_heads", heads // groups))))
    group, decay, change = Ref("group", I64), Ref("decay", kind), Ref("change", kind)

    def cell() -> Expr:
        return operands.load("matrix", b, h, i, j)

    def each_cell(*stmts: Stmt) -> For:
        return For("i", rows, (For("j", columns, stmts, vector=True),))

    entry = tokens.entry(b)
    key, query = (operands.load(name, entry, TOKEN, group, i) for name in "kq")
    value = operands.load("v", entry, TOKEN, h, j)
    column: list[Stmt] = []
    if corrects:
        seen = unless_start(operands, decay * Reduce("sum", "i", rows, cell() * key))
        column.append(Let("miss", value - seen))
        if saved:
            column.append(operands.store("misses", Ref("miss", kind), b, TOKEN, h, j))
        value = Ref("miss", kind) * operands.load("beta", entry, TOKEN, h)
    scale = 1 / math.sqrt(rows) if corrects else 1.0
    new = fma(key, change, unless_start(operands, decay * cell()))
    column += [
        Let("change", value),
        For("i", rows, (operands.store("matrix", new, b, h, i, j),)),
        operands.store("out", Reduce("sum", "i", rows, cell() * query) * scale, entry, TOKEN, h, j),
    ]
    token = (
        *tokens.find(operands, FIRST + Index("t")),
        *find_start(operands, b, TOKEN),
        Let("decay", operands.load("g", entry, TOKEN, h).exp()),
        For("j", columns, tuple(column), vector=True),
    )
    walk = For("t", REST, token)
    start = operands.load("state", b, h, i, j) if state is not None else Const(0.0, kind)
    body: list[Stmt] = [each_cell(operands.store("matrix", start, b, h, i, j))]
    if saved:
        save = each_cell(operands.store("states", cell(), b, h, Ref("chunk", I64), i, j))
        body.append(walk_chunks(operands, seq, node.attrs["chunk"], save, walk))
    else:
        body += [Let("first", known(0, I64)), Let("rest", known(0, I64) + tokens.own(operands)), walk]
    if last is not None:
        body.append(each_cell(operands.store("final", cell(), b, h, i, j)))
    units = batch * heads
    carried = (*lets, *tokens.count_own(operands, b), *tokens.unless_idle(operands, *body))
    root = For("u", builder.arg("units", units), carried)
    builder.launch(s, root, units, split="heads", flops=product(out.shape) * (6 * rows))
