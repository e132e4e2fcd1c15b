"""Recurrences whose state is a matrix, token by token: gated linear attention and the gated delta net."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.backends.cpu.targets import cpu_target
from rlx.dtypes import I64, DType
from rlx.ir.graph import Node
from rlx.lir.forms.named_operands import Operands
from rlx.lir.forms.recurrent import find_start, read_segments, results_of, unless_start
from rlx.lir.loops import Assign, Const, Expr, For, Index, Let, Place, Ref, Stmt, Store, Var, fma
from rlx.lir.schedule import Scheduler, decode_unit, map_elements
from rlx.lir.views import View
from rlx.types import Size, TensorType, product

VECTORS = (2, 1)  # columns per unit, in vectors; the first that divides the matrix and fits in half the L1 cache


def gated_linear_attention(s: Scheduler, node: Node) -> Sequence[View]:
    outs, state = results_of(s, node)
    by_token(s, node, outs[0], state, outs[1], 1)
    return outs


def by_token(s: Scheduler, node: Node, out: View, state: View | None, last: View | None, times: Size) -> None:
    """Launches the recurrence token by token.

    A unit is some columns of one head's matrix, independent of all others: a contiguous copy of them stays in the L1
    cache for all tokens. The vector loop runs over columns. There are `times` as many units: none, or all.
    """
    corrects = node.op.startswith("gated_delta_net")
    operands = Operands(s, node.op)
    names = ("q", "k", "v", "g", "beta") if corrects else ("q", "k", "v", "g")
    batch, seq, heads, columns = out.shape
    rows, kind = s.view(node.operands[0]).shape[3], out.dtype.wide
    assert isinstance(rows, int) and isinstance(columns, int)
    for name, operand in zip(names, node.operands, strict=False):
        operands.read(name, _exponentials(s, s.view(operand), kind) if name == "g" else s.view(operand))
    read_segments(operands, node.operands[-1])
    operands.write("out", out)
    if state is not None and last is not None:
        operands.carry(state, last)
    span = cpu_target(s.target).lanes(kind.size)
    vectors = next((v for v in VECTORS if columns % (v * span) == 0), 0)  # several hide the latency of sums
    span = span if vectors else columns
    vectors = vectors or 1
    width = vectors * span
    operands.write("matrix", s.temporary(TensorType((batch, heads, columns // width, rows, width), kind)))
    builder = operands.builder
    lets = decode_unit(builder, [batch, heads, columns // width], ["b", "h", "c"])
    b, h, t, i, j = Ref("b", I64), Ref("h", I64), Index("t"), Index("i"), Index("j")
    zero, first = Const(0, I64), Ref("c", I64) * width
    lets.append(operands.base("matrix", b, h, Ref("c", I64), zero, zero))
    group: Expr = h
    if not corrects:
        groups = s.view(node.operands[0]).shape[2]
        lets.append(Let("group", h.quot(builder.arg("group_heads", heads // groups))))
        group = Ref("group", I64)

    def cell(v: int) -> Place:
        return ((Ref("matrix_base", I64), 1), (i, width), (Const(v * span, I64), 1), (j, 1))

    def column(name: str, v: int) -> Place:
        return ((Ref(f"{name}_base", I64), 1), (Const(v * span, I64), 1), (j, 1))

    def component(name: str) -> Expr:
        return operands.load_at(name, ((Ref(f"{name}_base", I64), 1), (i, 1)))

    def each(*names: str) -> list[list[Ref]]:
        return [[Ref(f"{name}{v}", kind) for v in range(vectors)] for name in names]

    seen, change, read, new = each("seen", "change", "read", "new")
    decay, rate, key, query = (Ref(name, kind) for name in ("decay", "rate", "key", "query"))
    look: list[Stmt] = [Let("key", component("k"))]
    update: list[Stmt] = [Let("key", component("k")), Let("query", component("q"))]
    changes: list[Stmt] = []
    results: list[Stmt] = []
    for v in range(vectors):
        value = operands.load_at("v", column("v", v))
        look.append(Assign(seen[v].name, fma(operands.load_at("matrix", cell(v)), key, seen[v])))
        missing = (value - unless_start(operands, decay * seen[v])) * rate if corrects else value
        changes.append(Let(change[v].name, missing))
        decayed = unless_start(operands, decay * operands.load_at("matrix", cell(v)))
        update.append(Let(new[v].name, fma(key, change[v], decayed)))
        update.append(operands.store_at("matrix", new[v], cell(v)))
        update.append(Assign(read[v].name, fma(new[v], query, read[v])))
        result = read[v] * (1 / math.sqrt(rows)) if corrects else read[v]
        results.append(operands.store_at("out", result, column("out", v)))
    looks: tuple[Stmt, ...] = (*(Var(x.name, Const(0.0, kind)) for x in seen), For("i", rows, tuple(look)))
    of_columns: tuple[Stmt, ...] = (
        *(looks if corrects else ()),
        *(Var(x.name, Const(0.0, kind)) for x in read),
        *changes,
        For("i", rows, tuple(update)),
        *results,
    )
    token: tuple[Stmt, ...] = (
        *find_start(operands, b, t),
        Let("decay", operands.load("g", b, t, h)),
        *((Let("rate", operands.load("beta", b, t, h)),) if corrects else ()),
        *(operands.base(name, b, t, group, zero) for name in ("q", "k")),
        *(operands.base(name, b, t, h, first) for name in ("v", "out")),
        For("j", span, of_columns, vector=True),
    )
    walk = For("t", builder.arg("seq", seq), token)
    units = batch * heads * (columns // width) * times
    stmts = _walk_matrix(operands, rows, width, state is not None, walk)
    root = For("u", builder.arg("units", units), (*lets, *stmts))
    builder.launch(s, root, units, split="columns", flops=product(out.shape) * (6 * rows) * times)


def _walk_matrix(operands: Operands, rows: int, width: int, carried: bool, walk: For) -> list[Stmt]:
    """The walk, between copying the columns of the state in and out, or from zeros."""
    kind = operands.builder.params[operands.numbers["matrix"]].dtype
    b, h, i, j = Ref("b", I64), Ref("h", I64), Index("i"), Index("j")
    at = Ref("c", I64) * width + j
    here: Place = ((Ref("matrix_base", I64), 1), (i, width), (j, 1))

    def each_cell(store: Store) -> For:
        return For("i", rows, (For("j", width, (store,), vector=True),))

    start = operands.load("state", b, h, i, at) if carried else Const(0.0, kind)
    copied: list[Stmt] = [each_cell(operands.store_at("matrix", start, here)), walk]
    if carried:
        copied.append(each_cell(operands.store("final", operands.load_at("matrix", here), b, h, i, at)))
    return copied


def _exponentials(s: Scheduler, x: View, kind: DType) -> View:
    """exp(x) in a launch of its own: element by element it would cost more than a token's complete matrix."""
    out = s.temporary(TensorType(x.shape, kind))
    map_elements(s, "exp", x.shape, [x], [out], lambda e: ((), [e.load_wide(0).cast(kind).exp()]))
    return out
